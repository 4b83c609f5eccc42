"""`POST /v1/chat/completions`: read and check the request, shape the stream's end.

The decoded dictionary is kept beside the typed request: it is what backends receive, so unknown fields survive.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.protocol import ChatRequest, InvalidRequest, Json, validate, wrong_type
from gateway.dialects.errors import BadRequest

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"

# Documented parameters that ask for something which no backend behind Tierline does on its own: refused, never ignored.
_REFUSED: dict[str, str] = {
    "store": "Tierline does not store completions for later retrieval; leave 'store' out or set it to false.",
    "web_search_options": "Tierline has no web search of its own; leave 'web_search_options' out.",
    "functions": "'functions' is the deprecated form; send 'tools' instead.",
    "function_call": "'function_call' is the deprecated form; send 'tool_choice' instead.",
}

# Parameters that need a capability of the model that answers: name in the request, name in `tierline.yaml`.
_NEEDS: tuple[tuple[str, str], ...] = (
    ("tools", "tools"),
    ("logprobs", "logprobs"),
    ("audio", "audio"),
    ("reasoning_effort", "reasoning"),
)
# Likewise for the types of content parts.
_PART_NEEDS = {"image_url": "vision", "input_image": "vision", "image": "vision", "input_audio": "audio"}


def parse(body: bytes) -> tuple[Json, ChatRequest]:
    """Decode and check a request body.

    Returns:
        The decoded dictionary as the client sent it, and its typed view.

    Raises:
        BadRequest: not JSON, a wrong type, a value out of range, or a parameter that cannot be honoured.
    """
    try:
        payload = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(payload, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_type")
    try:
        request = msgspec.convert(payload, ChatRequest)
        validate(request)
    except msgspec.ValidationError as error:
        raise _bad_request(wrong_type(error)) from None
    except InvalidRequest as error:
        raise _bad_request(error) from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.", code="invalid_json") from None
    for name, advice in _REFUSED.items():
        if payload.get(name) not in (None, False, []):  # an empty `web_search_options` asks for a search
            raise BadRequest(advice, code="unsupported_parameter", param=name)
    return payload, request


def _bad_request(error: InvalidRequest) -> BadRequest:
    return BadRequest(str(error), code=error.code, param=error.param)


def needs(request: ChatRequest) -> dict[str, str]:
    """What a model must be capable of to answer this request, in the terms of `tierline.yaml`, each with the field that
    asks for it."""
    found = {capability: name for name, capability in _NEEDS if getattr(request, name)}
    if request.modalities and "audio" in request.modalities:
        found.setdefault("audio", "modalities")
    if wants_json(request):
        found["json_schema"] = "response_format"
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            capability = _PART_NEEDS.get(part["type"])
            if capability is not None:
                found.setdefault(capability, f"messages[{i}].content[{j}]")
    return found


def wants_json(request: ChatRequest) -> bool:
    kind = (request.response_format or {}).get("type")
    return kind is not None and kind != "text"


def wants_usage(request: ChatRequest) -> bool:
    """Whether the client asked for the usage chunk of a stream."""
    return bool(request.stream_options and request.stream_options.include_usage)


def output_limit(request: ChatRequest) -> int | None:
    """The most tokens that one choice may produce, if the client said so."""
    return request.max_completion_tokens or request.max_tokens


def named_output_limit(request: ChatRequest) -> tuple[str, int] | None:
    """The same behind the name of the field that says it."""
    limit = output_limit(request)
    field = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    return None if limit is None else (field, limit)


def with_tierline(data: bytes, extra: dict[str, Any]) -> bytes:
    """The usage chunk `data` (JSON) as an event, with Tierline's own figures added under `tierline`."""
    chunk = _decoder.decode(data)
    chunk["tierline"] = extra
    return b"data: " + _encoder.encode(chunk) + b"\n\n"
