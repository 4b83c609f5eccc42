"""What an Anthropic server answers, in the form of chat completions: messages, usage, stop reasons and errors.

It promises that text, tool calls and readable thoughts arrive whole and in their order, that tool arguments are the
server's own JSON, and that no token is counted twice or lost: there the input leaves out what was read from or written
to the prompt cache, here it contains it.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from backends.attempt import Answer
from backends.dialect import MalformedAnswer
from backends.errors import recognised
from backends.protocol import (
    AnswerChoice,
    AnswerMessage,
    ChatCompletion,
    CompletionTokensDetails,
    FunctionCall,
    Json,
    PromptTokensDetails,
    ToolCall,
    Usage,
)

NAME = "anthropic"

# A turn that the server paused, or that hit the end of its context, is not whole: to a chat client it is cut short.
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
# Type there: status that such an error has, type and code in the OpenAI dialect.
_ERRORS: dict[str, tuple[int, str, str | None]] = {
    "invalid_request_error": (400, "invalid_request_error", None),
    "authentication_error": (401, "authentication_error", "invalid_api_key"),
    "billing_error": (402, "insufficient_quota", "insufficient_quota"),
    "permission_error": (403, "permission_error", "permission_denied"),
    "not_found_error": (404, "invalid_request_error", "model_not_found"),
    "request_too_large": (413, "invalid_request_error", "request_too_large"),
    "rate_limit_error": (429, "rate_limit_error", "rate_limit_exceeded"),
    "api_error": (500, "server_error", "internal_error"),
    "timeout_error": (504, "server_error", "timeout"),
    "overloaded_error": (529, "server_error", "overloaded"),
}


class TokenDetails(msgspec.Struct):
    thinking_tokens: int | None = None


class WireUsage(msgspec.Struct):
    """Token counts as that API reports them. In a stream they are cumulative, and the later ones name only some."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens_details: TokenDetails | None = None

    def update(self, later: WireUsage) -> None:
        """Take over what a later report says; what it leaves out stays."""
        for name in self.__struct_fields__:
            if (value := getattr(later, name)) is not None:
                setattr(self, name, value)

    def chat(self, *, final: bool) -> Usage:
        """The counts in the common form; before the answer is `final` its output is not known."""
        read, written = self.cache_read_input_tokens or 0, self.cache_creation_input_tokens or 0
        prompt = None if self.input_tokens is None else self.input_tokens + read + written
        output = self.output_tokens if final else None
        thinking = self.output_tokens_details.thinking_tokens if self.output_tokens_details else None
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=None if prompt is None or output is None else prompt + output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=read, cache_creation_tokens=written),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=thinking)
            if final and thinking
            else None,
        )


class StopDetails(msgspec.Struct):
    explanation: str | None = None


class Block(msgspec.Struct):
    """A content block of any type; `input` is a tool's input as the server wrote it."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"{}")


class WireMessage(msgspec.Struct):
    """A whole answer, or the empty one that a stream begins with; `error` in its place."""

    type: str | None = None
    id: str | None = None
    model: str | None = None
    content: list[Block] | None = None
    stop_reason: str | None = None
    stop_details: StopDetails | None = None
    usage: WireUsage | None = None
    error: Json | None = None


_message = msgspec.json.Decoder(WireMessage)
_error_body = msgspec.json.Decoder(dict[str, Any])


def read_answer(body: bytes) -> Answer:
    """Read a plain answer; an error object becomes the completion's `error`.

    Raises:
        MalformedAnswer: neither a message nor an error.
    """
    try:
        message = _message.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedAnswer(f"the answer is no message of an Anthropic server: {error}") from error
    if message.error is not None:
        return Answer(body, ChatCompletion(error=said(message.error)), NAME)
    if message.content is None:
        raise MalformedAnswer("the answer is no message of an Anthropic server: it has no content")
    choice = AnswerChoice(message=_chat_message(message), finish_reason=finish_reason(message.stop_reason))
    completion = ChatCompletion(
        id=message.id,
        object="chat.completion",
        created=int(time.time()),
        model=message.model,
        choices=[choice],
        usage=message.usage.chat(final=True) if message.usage else None,
    )
    return Answer(body, completion, NAME)


def finish_reason(stop_reason: str | None) -> str | None:
    """The word of the common form; "stop" for a reason that is newer than this table."""
    return None if stop_reason is None else _FINISH_REASONS.get(stop_reason, "stop")


def tool_call(block: Block, index: int | None, arguments: str) -> ToolCall:
    """A tool_use block as a tool call; only those of a stream have an index."""
    return ToolCall(block.id, "function", FunctionCall(block.name, arguments), index)


def error_in(body: bytes) -> Json | None:
    """The error of a body in the common form, if it has one."""
    try:
        error = _error_body.decode(body).get("error")
    except (msgspec.DecodeError, RecursionError):
        return None
    return said(error) if isinstance(error, dict) else None


def said(error: Json) -> Json:
    """An error object in the common form, with the `status` that such an error has."""
    name = str(error.get("type") or "api_error")
    status, kind, code = _ERRORS.get(name, (500, name, None))
    details = error.get("details")
    named = details.get("error_code") if isinstance(details, dict) else None
    said = {"message": error.get("message"), "type": kind, "code": named or code, "param": None, "status": status}
    # Where the type says what is wrong, the words are not searched for more.
    return recognised(said) if code is None or status == 413 else said


def _chat_message(message: WireMessage) -> AnswerMessage:
    blocks = message.content or []
    texts = [block.text for block in blocks if block.type == "text" and block.text]
    thoughts = [block.thinking for block in blocks if block.type == "thinking" and block.thinking]
    calls = [tool_call(block, None, bytes(block.input).decode()) for block in blocks if block.type == "tool_use"]
    why = message.stop_details if message.stop_reason == "refusal" else None
    return AnswerMessage(
        role="assistant",
        content="".join(texts) or None,
        reasoning_content="".join(thoughts) or None,
        refusal=why.explanation if why else None,
        tool_calls=calls or None,
    )
