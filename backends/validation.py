"""What the types of a request cannot say: ranges, and which fields go together. Shared by the gateway and the engine.

Every request passes here, so what it does not have costs nothing.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from backends.protocol import (
    MAX_SALT_CHARACTERS,
    ChatRequest,
    CompletionRequest,
    InvalidRequest,
    Message,
    whole_number,
)

_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")  # the last is vLLM's
_TOKEN_ID_DIGITS = 10
RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("n", 1, 128),
    ("top_logprobs", 0, 20),
    ("max_tokens", 1, 2**31 - 1),
    ("max_completion_tokens", 1, 2**31 - 1),
    ("seed", -(2**63), 2**63 - 1),
)


def check_ranges(request: msgspec.Struct) -> None:
    """Check the numbers of a request, whichever of them it has.

    Raises:
        InvalidRequest: names the parameter and says what is allowed.
    """
    values, ranges = _ranged(type(request))
    for value, (name, low, high) in zip(values(request), ranges, strict=True):
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"'{name}' must be between {low} and {high}, got {value}.", param=name)


def check_completion(request: CompletionRequest) -> None:
    """The same for text completions. With `echo`, `max_tokens` may be 0: the prompt is wanted back, scored perhaps."""
    only_echo = request.max_tokens == 0 and request.echo
    check_ranges(msgspec.structs.replace(request, max_tokens=None) if only_echo else request)


@lru_cache
def _ranged(kind: type[msgspec.Struct]) -> tuple[attrgetter[tuple[Any, ...]], tuple[tuple[str, float, float], ...]]:
    """Reads the numbers that this kind of request has; their ranges. Each has several."""
    ranges = tuple(known for known in RANGES if known[0] in kind.__struct_fields__)
    return attrgetter(*(name for name, _, _ in ranges)), ranges


def validate(request: ChatRequest) -> None:
    """Check ranges and combinations of a chat request.

    Raises:
        InvalidRequest: names the parameter and says what is allowed.
    """
    if not request.messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages", code="empty_array")
    check_ranges(request)
    if request.response_format and request.response_format.get("type", "text") not in _RESPONSE_FORMATS:
        text = f"'response_format.type' is an unknown type: it must be one of {', '.join(_RESPONSE_FORMATS)}."
        raise InvalidRequest(text, param="response_format.type")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_CHARACTERS:
        raise InvalidRequest(
            f"'cache_salt' must have 1 to {MAX_SALT_CHARACTERS} characters; leave it out to share the cache.",
            param="cache_salt",
        )
    if request.stop is not None:
        stops = [request.stop] if isinstance(request.stop, str) else request.stop
        if len(stops) > 4:
            raise InvalidRequest("'stop' takes at most 4 strings.", param="stop", code="array_too_long")
        if not all(stops):
            raise InvalidRequest("'stop' must not hold an empty string.", param="stop")
    if request.logit_bias:
        _validate_bias(request.logit_bias)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("'stream_options' is only allowed with 'stream': true.", param="stream_options")
    if request.tool_choice is not None and not (request.tools or request.functions):
        raise InvalidRequest("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")
    _validate_messages(request.messages)


def _validate_bias(logit_bias: dict[str, float]) -> None:
    for token, bias in logit_bias.items():
        if whole_number(token, _TOKEN_ID_DIGITS) is None:
            raise InvalidRequest(f"'logit_bias' keys are token ids, got {token[:20]!r}.", param="logit_bias")
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"'logit_bias' values must be between -100 and 100, got {bias}.", param="logit_bias")


def _validate_messages(messages: list[Message]) -> None:
    for i, message in enumerate(messages):
        if isinstance(message.content, str) and message.role != "tool":
            continue  # most are a text, about which there is nothing more to ask
        where = f"messages[{i}]"
        if message.content is None and message.role in ("system", "developer", "user", "tool"):
            raise InvalidRequest(
                f"'{where}.content' must be a string or a list of parts.",
                param=f"{where}.content",
                code="invalid_type",
            )
        if message.role == "tool" and not message.tool_call_id:
            raise InvalidRequest(
                f"'{where}.tool_call_id' is missing: a tool message answers one tool call.",
                param=f"{where}.tool_call_id",
                code="missing_required_parameter",
            )
        if isinstance(message.content, list):
            for j, part in enumerate(message.content):
                if not isinstance(part.get("type"), str):
                    raise InvalidRequest(
                        f"'{where}.content[{j}].type' must be a string such as \"text\".",
                        param=f"{where}.content[{j}].type",
                        code="invalid_type",
                    )
                if part["type"] == "text" and not isinstance(part.get("text"), str):
                    raise InvalidRequest(
                        f"'{where}.content[{j}].text' must be a string.",
                        param=f"{where}.content[{j}].text",
                        code="invalid_type",
                    )
