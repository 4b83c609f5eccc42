"""Answers in the Anthropic dialect: unchanged where the backend speaks it, else written from the common form.

The events of a message come in one order: its start, then block after block (each started, filled, stopped), then the
reason why it ended with the usage, then its stop. A backend without the dialect reports its usage last, so the start
says zero input tokens and the end says the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from backends.attempt import Answer, Event, StreamCut
from backends.protocol import ChunkChoice, Json, ToolCall, Usage
from gateway.dialects.errors import GatewayError
from gateway.dialects.tool_calls import CallOrder

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_ERROR_TYPES: dict[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_Kind = Literal["text", "thinking", "tool_use"]


class MessagesWriter:
    """One answer. See `gateway.dialects.dialect.Writer`."""

    def __init__(self, model: str, request_id: str) -> None:
        self._id = f"msg_{request_id.removeprefix('req-').replace('-', '')}"
        self._request_id = request_id
        self._model = model
        self._native = False
        self._started = False
        self._stopped = False
        self._kind: _Kind | None = None  # of the open block
        self._index = -1  # of the last block
        self._tool = -1  # index among the tool calls of the open or last tool block
        self._calls: CallOrder | None = None  # there from the first call on
        self._finish: str | None = None
        self._stop_sequence: str | None = None
        self._usage: Usage | None = None

    async def whole(self, answer: Answer) -> bytes:
        if answer.dialect == "anthropic":
            return answer.body
        completion = answer.completion
        content: list[Json] = []
        finish: str | None = None
        if completion.choices:
            choice = completion.choices[0]
            message, finish = choice.message, choice.finish_reason
            if message.thoughts:
                content.append({"type": "thinking", "thinking": message.thoughts, "signature": ""})
            if text := message.content or message.refusal:
                content.append({"type": "text", "text": text})
            content += [_tool_use(call) for call in message.tool_calls or []]
        stop = _matched_stop(answer.body)
        said = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": completion.model or self._model,
            "content": content,
            "stop_reason": _stop_reason(finish, stop, any(block["type"] == "tool_use" for block in content)),
            "stop_sequence": stop,
            "usage": _usage(completion.usage),
        }
        return _encode(said)

    def event(self, event: Event) -> Sequence[bytes]:
        if event.dialect == "anthropic":
            self._native = self._started = True
            self._stopped = self._stopped or event.done
            return (event.raw,)
        chunk = event.chunk
        if chunk is None:
            return ()
        out: list[bytes] = []
        if not self._started:
            self._started = True
            out.append(self._start(chunk.model))
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._delta(choice, out)
            if choice.finish_reason:
                self._rest_of_calls(out)
                self._finish = choice.finish_reason
                self._stop_sequence = _matched_stop(event.data)
        return out

    async def end(self, summary: Json) -> Sequence[bytes]:
        if self._native:
            return () if self._stopped else (_event("message_stop", {}),)
        out: list[bytes] = []
        if not self._started:
            out.append(self._start(None))
        self._rest_of_calls(out)
        self._close(out)
        delta = {
            "stop_reason": _stop_reason(self._finish, self._stop_sequence, self._tool >= 0),
            "stop_sequence": self._stop_sequence,
        }
        out.append(_event("message_delta", {"delta": delta, "usage": _usage(self._usage), "tierline": summary}))
        out.append(_event("message_stop", {}))
        return out

    def broken(self, error: GatewayError) -> bytes:
        return b"event: error\ndata: " + _encode(error_object(error, self._request_id)) + b"\n\n"

    def _start(self, model: str | None) -> bytes:
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": model or self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(None), "output_tokens": 0},
        }
        return _event("message_start", {"message": message})

    def _delta(self, choice: ChunkChoice, out: list[bytes]) -> None:
        delta = choice.delta
        text = delta.content or delta.refusal
        if self._calls is not None and (text or delta.thoughts):
            self._rest_of_calls(out)
        if delta.thoughts:
            self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
            out.append(self._fill({"type": "thinking_delta", "thinking": delta.thoughts}))
        if text:
            self._open("text", {"type": "text", "text": ""}, out)
            out.append(self._fill({"type": "text_delta", "text": text}))
        if delta.tool_calls:
            calls = self._calls = self._calls or CallOrder()
            for call in delta.tool_calls:
                for piece in calls.take(call):
                    self._tool_delta(piece, out)

    def _rest_of_calls(self, out: list[bytes]) -> None:
        for piece in self._calls.rest() if self._calls is not None else ():
            self._tool_delta(piece, out)

    def _tool_delta(self, call: ToolCall, out: list[bytes]) -> None:
        number = call.index
        assert number is not None
        if number > self._tool:
            self._tool = number
            function = call.function
            block = {"type": "tool_use", "id": call.id or f"toolu_{self._id[4:]}{number}", "input": {}}
            block["name"] = (function and function.name) or ""
            self._close(out)
            self._open("tool_use", block, out)
        elif self._kind != "tool_use":
            # Blocks follow one another here; a call that goes on after text has begun cannot be said.
            raise StreamCut("protocol", "the backend went on with a tool call after it had begun a text")
        if call.function is not None and call.function.arguments:
            out.append(self._fill({"type": "input_json_delta", "partial_json": call.function.arguments}))

    def _open(self, kind: _Kind, block: Json, out: list[bytes]) -> None:
        if self._kind == kind and kind != "tool_use":
            return
        self._close(out)
        self._kind = kind
        self._index += 1
        out.append(_event("content_block_start", {"index": self._index, "content_block": block}))

    def _fill(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _close(self, out: list[bytes]) -> None:
        if self._kind is not None:
            self._kind = None
            out.append(_event("content_block_stop", {"index": self._index}))


def error_object(error: GatewayError, request_id: str) -> Json:
    """An error as the dialect words it, with the code and the parameter that the common form has."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    said: Json = {"type": kind, "message": error.message, "code": error.code}
    if error.param:
        said["param"] = error.param
    return {"type": "error", "error": said, "request_id": request_id}


def _event(kind: str, fields: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _tool_use(call: ToolCall) -> Json:
    function = call.function
    arguments = (function and function.arguments) or "{}"
    given: Json | msgspec.Raw
    try:
        _decode(arguments.encode())
        given = msgspec.Raw(arguments.encode())  # as the model wrote it
    except msgspec.DecodeError:
        given = {"_malformed_arguments": arguments}  # the model broke its own JSON: nothing of it is lost
    return {"type": "tool_use", "id": call.id or "", "name": (function and function.name) or "", "input": given}


def _stop_reason(finish: str | None, stop: str | None, called: bool) -> str:
    if called and finish == "stop":  # in the other dialect, calls that the request demanded end like that
        return "tool_use"
    if stop is not None and finish == "stop":
        return "stop_sequence"
    return _STOP_REASONS.get(finish or "stop", "end_turn")


def _matched_stop(data: bytes) -> str | None:
    """The stop sequence that ended the answer, where the server says it, as text: vLLM and the bundled engine in
    `stop_reason` of the choice, SGLang in `matched_stop`."""
    for choice in _decode(data).get("choices") or ():
        for name in ("stop_reason", "matched_stop"):
            if isinstance(choice, dict) and isinstance(stop := choice.get(name), str):
                return stop
    return None


def _usage(usage: Usage | None) -> Json:
    """Input here is what was neither read from nor written to a prompt cache; the common form counts those in."""
    prompt = usage.prompt_tokens_details if usage else None
    cached = (prompt.cached_tokens if prompt else None) or 0
    written = (prompt.cache_creation_tokens if prompt else None) or 0
    total = (usage.prompt_tokens if usage else None) or 0
    return {
        "input_tokens": max(0, total - cached - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": (usage.completion_tokens if usage else None) or 0,
    }
