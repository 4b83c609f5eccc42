"""The types of Anthropic's own SDK as the judge of what we send and of what our mock says; requests to judge."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming, MessageCreateParamsStreaming
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from backends.anthropic_request import messages_request
from backends.dialect import CannotTranslate

Json = dict[str, Any]

HELLO = [{"role": "user", "content": "hello"}]

# Sampling parameters that the API takes for older models; the SDK has no types for them any more.
_UNTYPED = {"temperature", "top_p", "top_k"}


def decoded(value: Any) -> Any:
    """As it looks on the wire."""
    return msgspec.json.decode(msgspec.json.encode(value))


def check_request(request: Json) -> None:
    """Raise unless it is a request of the Messages API, without a field that the API does not have."""
    kind = MessageCreateParamsStreaming if request.get("stream") else MessageCreateParamsNonStreaming
    assert set(request) <= {*get_type_hints(kind), *_UNTYPED}
    typed = {name: value for name, value in request.items() if name not in _UNTYPED}
    assert _taken(_adapter(kind).validate_python(typed)) == typed  # what no type names does not come back


def check_message(message: Json) -> Message:
    found: Message = _adapter(Message).validate_json(msgspec.json.encode(message), strict=True)
    return found


def check_event(event: Json) -> None:
    if event["type"] == "error":
        _adapter(ErrorResponse).validate_json(msgspec.json.encode(event), strict=True)
    elif event["type"] != "ping":  # the SDK drops these, and has no type for them
        _adapter(RawMessageStreamEvent).validate_json(msgspec.json.encode(event), strict=True)


def check_error(error: Json) -> None:
    _adapter(ErrorResponse).validate_json(msgspec.json.encode(error), strict=True)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _taken(value: Any) -> Any:
    """The same with every lazy list taken: pydantic checks the items of an Iterable only then."""
    if isinstance(value, dict):
        return {name: _taken(item) for name, item in value.items()}
    return [_taken(item) for item in value] if isinstance(value, (list, tuple, Iterator)) else value


def translated(
    messages: list[Any] | None = None, model: str = "claude-opus-5", stream: bool = False, **fields: Any
) -> Any:
    """The request on the wire, approved by the SDK's types."""
    payload = {"model": "public", "messages": messages or HELLO, "max_tokens": 4096, **fields}
    before = copy.deepcopy(payload)
    request = decoded(messages_request(payload, model, stream))
    assert payload == before
    check_request(request)
    return request


def refused(*messages: Any, **fields: Any) -> CannotTranslate:
    with pytest.raises(CannotTranslate) as caught:
        translated(list(messages), **fields)
    return caught.value
