"""Wire types of the OpenAI dialect: what a client may send, what a server answers, what usage means.

Requests are checked by converting the decoded JSON into these structs, and by `validation.py`; the decoded dictionary
itself is kept and forwarded, so fields that Tierline does not know survive untouched. Shared by the gateway, the
backends' clients and the engine's own server; it imports nothing of Tierline.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, TypeVar

import msgspec

from backends.choices import choices

_Request = TypeVar("_Request")

# JSON objects that are passed through without being interpreted.
Json = dict[str, Any]

# The older and the newer name for the most tokens of a chat answer.
OutputLimitField = Literal["max_tokens", "max_completion_tokens"]


class FunctionCall(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, omit_defaults=True):
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None
    index: int | None = None


class Message(msgspec.Struct, omit_defaults=True):
    """One turn of a conversation. `content` is text or a list of typed parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None


class StreamOptions(msgspec.Struct, omit_defaults=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(msgspec.Struct, omit_defaults=True):
    """`POST /v1/chat/completions`: every documented parameter with its type; `validation.validate` checks ranges."""

    model: str
    messages: list[Message]
    audio: Json | None = None
    cache_salt: str | None = None  # vLLM's: requests with different salts share no cached work
    frequency_penalty: float | None = None
    function_call: str | Json | None = None
    functions: list[Json] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    metadata: dict[str, str] | None = None
    modalities: list[str] | None = None
    n: int | None = None
    parallel_tool_calls: bool | None = None
    prediction: Json | None = None
    presence_penalty: float | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    response_format: Json | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    service_tier: str | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    tool_choice: str | Json | None = None
    tools: list[Json] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None
    verbosity: str | None = None
    web_search_options: Json | None = None


class CompletionRequest(msgspec.Struct):
    """`POST /v1/completions`: every documented parameter; a prompt is text, texts, token ids, or lists of token ids."""

    model: str
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    cache_salt: str | None = None
    echo: bool | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    response_format: Json | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    cached_tokens: int | None = None
    audio_tokens: int | None = None
    cache_creation_tokens: int | None = None


class CompletionTokensDetails(msgspec.Struct, omit_defaults=True):
    reasoning_tokens: int | None = None
    audio_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts as the OpenAI dialect reports them; `cached_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    """What a choice says next. Servers have two names for its thoughts, and some send both (`thoughts`)."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content or self.reasoning


class ChunkChoice(msgspec.Struct, omit_defaults=True):
    index: int = 0
    delta: Delta = msgspec.field(default_factory=Delta)
    text: str | None = None  # of a text completion
    finish_reason: str | None = None
    logprobs: Json | None = None


class ChatChunk(msgspec.Struct, omit_defaults=True):
    """One `data:` event of a stream. Decoded to meter it; the bytes themselves are relayed."""

    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[ChunkChoice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: Json | None = None
    service_tier: Any = None  # text, of servers that have such; what others put there breaks no stream


class AnswerMessage(msgspec.Struct, omit_defaults=True):
    """What a choice says, whole. `thoughts` is as in `Delta`."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content or self.reasoning


class AnswerChoice(msgspec.Struct, omit_defaults=True):
    index: int = 0
    message: AnswerMessage = msgspec.field(default_factory=AnswerMessage)
    text: str | None = None  # of a text completion
    finish_reason: str | None = None
    logprobs: Json | None = None


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    """The non-streaming answer."""

    id: str | None = None
    object: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[AnswerChoice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    error: Json | None = None
    service_tier: Any = None


class InvalidRequest(ValueError):
    """A request that no backend should see. `param` names the field, `code` is stable for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


_LARGEST_WHOLE: Final = 2.0**63
_MOST_FRACTIONS: Final = 16  # in one body
_WANTS_INTEGER: Final = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$([^`]+)`")
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def convert(body: Json, kind: type[_Request]) -> _Request:
    """The typed view of a decoded body. An integer may be written `5.0`, as SDKs of languages without integers write it
    and OpenAI takes it; in the body it becomes `5`, so that nobody after this sees anything else.

    Raises:
        msgspec.ValidationError: a field that is missing or of the wrong type.
    """
    for _ in range(_MOST_FRACTIONS):
        try:
            return msgspec.convert(body, kind)
        except msgspec.ValidationError as error:
            if not _make_whole(body, str(error)):
                raise
    return msgspec.convert(body, kind)


def _make_whole(body: Json, message: str) -> bool:
    """Write a whole number as an integer where the message says that a field wants one; False if it says anything else.
    What stands in a list by itself, such as a token id, is no field.
    """
    found = _WANTS_INTEGER.fullmatch(message)
    if found is None:
        return False
    *path, last = [int(index) if index else name for name, index in _STEP.findall(found[1])]
    holder: Any = body
    try:
        for step in path:
            holder = holder[step]
        value = holder[last]
    except (KeyError, IndexError, TypeError):  # a name with a dot or a bracket in it
        return False
    if isinstance(last, int) or not isinstance(value, float) or not value.is_integer() or abs(value) > _LARGEST_WHOLE:
        return False
    holder[last] = int(value)
    return True


def wrong_type(error: msgspec.ValidationError, kind: type[Any] | None = None) -> InvalidRequest:
    """msgspec's "Expected `int`, got `str` - at `$.max_tokens`" in the dialect's terms, with the field as `param`.
    With the type of the request, whoever sent a word that is not allowed is told which are."""
    what, _, where = str(error).partition(" - at `$")
    param = where.rstrip("`").removesuffix("[...]").lstrip(".") or None
    if what.startswith(("Object missing required field", "Object contains unknown field")):
        name = what.rsplit("`", 2)[-2]
        param = f"{param}.{name}" if param else name
        if "unknown" in what:
            return InvalidRequest(f"Unknown parameter '{param}'.", code="unknown_parameter", param=param)
        return InvalidRequest(f"'{param}' is missing.", code="missing_required_parameter", param=param)
    if what.startswith("Invalid enum value") and kind is not None and (words := choices(kind, param or "")):
        text = f"'{param}' must be one of {', '.join(words)}, not {what.removeprefix('Invalid enum value ')}."
        return InvalidRequest(text, code="invalid_type", param=param)
    return InvalidRequest(f"'{param}': {what}." if param else f"{what}.", code="invalid_type", param=param)


# A header of a stream of the bundled engine: how many tokens its prompt has.
PROMPT_TOKENS_HEADER = "x-tierline-prompt-tokens"
# A header of its answers: the last full page of the prompt, as its feed of pages names it.
PROMPT_PAGE_HEADER = "x-tierline-prompt-page"
# Headers of a request to it: where another engine has computed the prompt, and how many tokens it had to compute.
PAGES_FROM_HEADER = "x-tierline-pages-from"
PREFILLED_HEADER = "x-tierline-prefilled-tokens"


def whole_number(text: str, digits: int) -> int | None:
    """The number that a text of ASCII digits says, at most so many of them; else None.

    `str.isdigit` alone takes "²", and `int` refuses thousands of digits: neither may decide about what a client sends.
    """
    return int(text) if len(text) <= digits and text.isascii() and text.isdigit() else None


MAX_SALT_CHARACTERS = 128


def text_of(content: str | list[Json] | None) -> str:
    """The text of a message: the string itself, or its text parts joined by newlines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if part.get("type") == "text" and "text" in part)
