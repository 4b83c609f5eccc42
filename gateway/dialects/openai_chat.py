"""`POST /v1/chat/completions`, whose form is also the common one: read and check the request.

The decoded dictionary is kept beside the typed request: it is what backends receive, so unknown fields survive.
"""

from __future__ import annotations

from operator import attrgetter

from backends.protocol import ChatRequest, InvalidRequest
from backends.validation import validate
from gateway.dialects import errors
from gateway.dialects.dialect import Asked, Writer
from gateway.dialects.errors import BadRequest, GatewayError
from gateway.dialects.openai_answer import chunk_writer
from gateway.dialects.reading import bad_request, beams, convert, decode

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
_asks = attrgetter(*(name for name, _ in _NEEDS))
# Likewise for the types of content parts.
_PART_NEEDS = {"image_url": "vision", "input_image": "vision", "image": "vision", "input_audio": "audio"}


class OpenAIChat:
    """The chat completions of the OpenAI SDKs. See `gateway.dialects.dialect.Dialect`."""

    route = "chat.completions"
    keep_alive = b": keep-alive\n\n"
    request_id_header = "x-request-id"

    def parse(self, body: bytes) -> Asked:
        payload = decode(body)
        request = convert(payload, ChatRequest)
        try:
            validate(request)
        except InvalidRequest as error:
            raise bad_request(error) from None
        for name in _REFUSED.keys() & payload:
            if payload[name] not in (None, False, []):  # an empty `web_search_options` asks for a search
                raise BadRequest(_REFUSED[name], code="unsupported_parameter", param=name)
        choices = request.n or 1
        return Asked(
            operation="chat",
            model=request.model,
            payload=payload,
            messages=payload["messages"],
            stream=bool(request.stream),
            choices=choices,
            generated=max(choices, beams(payload)) if "beam_width" in payload else choices,
            output_limit=_output_limit(request),
            needs=_needs(request),
            wants_usage=bool(request.stream_options and request.stream_options.include_usage),
            metadata=request.metadata or {},
        )

    def writer(self, asked: Asked, request_id: str) -> Writer:
        return chunk_writer(asked, request_id)

    def error(self, error: GatewayError, request_id: str) -> bytes:
        return errors.body(error, request_id)


CHAT = OpenAIChat()


def _needs(request: ChatRequest) -> dict[str, str]:
    """What a model must be capable of to answer this request, in the terms of `tierline.yaml`, each with the field that
    asks for it."""
    found = {capability: name for name, capability in _NEEDS if getattr(request, name)} if any(_asks(request)) else {}
    if request.modalities and "audio" in request.modalities:
        found.setdefault("audio", "modalities")
    if _wants_json(request):
        found["json_schema"] = "response_format"
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            capability = _PART_NEEDS.get(part["type"])
            if capability is not None:
                found.setdefault(capability, f"messages[{i}].content[{j}]")
    return found


def _wants_json(request: ChatRequest) -> bool:
    form = request.response_format
    return form is not None and form.get("type") not in (None, "text")


def _output_limit(request: ChatRequest) -> tuple[str, int] | None:
    """The most tokens that one choice may have, behind the name of the field that says it."""
    if limit := request.max_completion_tokens:
        return "max_completion_tokens", limit
    return ("max_tokens", request.max_tokens) if request.max_tokens else None
