"""`POST /v1/chat/completions`: read and check the request, shape the stream's end.

The decoded dictionary is kept beside the typed request: it is what backends receive, so unknown fields survive.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.protocol import ChatRequest, InvalidRequest, Json, validate
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
    except (msgspec.ValidationError, RecursionError) as error:
        raise _type_error(str(error)) from None
    try:
        validate(request)
    except InvalidRequest as error:
        raise BadRequest(str(error), code=error.code, param=error.param) from None
    for name, advice in _REFUSED.items():
        if payload.get(name):
            raise BadRequest(advice, code="unsupported_parameter", param=name)
    return payload, request


def _type_error(text: str) -> BadRequest:
    """msgspec says `Expected `int`, got `str` - at `$.max_tokens``: turn that into the dialect's terms."""
    what, _, where = text.partition(" - at `$.")
    param = where.rstrip("`") or None
    if "missing required field" in what:
        name = what.rsplit("`", 2)[-2]
        param = f"{param}.{name}" if param else name
        return BadRequest(f"'{param}' is missing.", code="missing_required_parameter", param=param)
    prefix = f"'{param}': " if param else ""
    return BadRequest(f"{prefix}{what}.", code="invalid_type", param=param)


def needs(request: ChatRequest) -> frozenset[str]:
    """Capabilities that a model must have to answer this request, as named in `tierline.yaml`."""
    found = {capability for name, capability in _NEEDS if getattr(request, name)}
    if has_images(request):
        found.add("vision")
    if wants_json(request):
        found.add("json_schema")
    if request.modalities and "audio" in request.modalities:
        found.add("audio")
    return frozenset(found)


def has_images(request: ChatRequest) -> bool:
    return any(
        part.get("type") in ("image_url", "input_image", "image")
        for message in request.messages
        if isinstance(message.content, list)
        for part in message.content
    )


def wants_json(request: ChatRequest) -> bool:
    kind = (request.response_format or {}).get("type")
    return kind is not None and kind != "text"


def wants_usage(request: ChatRequest) -> bool:
    """Whether the client asked for the usage chunk of a stream."""
    return bool(request.stream_options and request.stream_options.include_usage)


def output_limit(request: ChatRequest) -> int | None:
    """The most tokens that one choice may produce, if the client said so."""
    return request.max_completion_tokens or request.max_tokens


def with_tierline(data: bytes, extra: dict[str, Any]) -> bytes:
    """The usage chunk `data` (JSON) as an event, with Tierline's own figures added under `tierline`."""
    chunk = _decoder.decode(data)
    chunk["tierline"] = extra
    return b"data: " + _encoder.encode(chunk) + b"\n\n"
