"""Schemas of the OpenAPI document: requests from the wire types, with the bounds that are checked beside the types;
answers as far as Tierline itself vouches for them. What a backend adds to an answer is there as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.bounds import MAX_FIELDS, MAX_TEXTS, MAX_TOKEN_IDS, MOST_ELEMENTS
from backends.protocol import (
    MAX_SALT_CHARACTERS,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    Json,
)
from backends.validation import RANGES
from gateway import openapi_responses
from gateway.dialects import anthropic_messages
from gateway.dialects.anthropic_messages import MessagesRequest
from gateway.dialects.openai_embeddings import EmbeddingsRequest, RerankRequest
from gateway.dialects.openai_responses import ResponsesRequest

REF = "#/components/schemas/{name}"

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_STOPS: Json = {"minLength": 1}
_BLOCK: Json = {"type": "object", "properties": {"type": _TEXT}, "required": ["type"]}
_PART: Json = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}, "text": _TEXT}, "required": ["type", "text"]},
        {**_BLOCK, "properties": {"type": {"type": "string", "not": {"const": "text"}}}},
    ]
}
# What a turn must have besides its role.
_SAID: Json = {"type": ["string", "array"]}
_TURNS: list[Json] = [
    {"properties": {"role": {"enum": ["assistant", "function"]}}},
    {"properties": {"role": {"enum": ["system", "developer", "user"]}, "content": _SAID}, "required": ["content"]},
    {
        "properties": {"role": {"const": "tool"}, "content": _SAID, "tool_call_id": {"type": "string", "minLength": 1}},
        "required": ["content", "tool_call_id"],
    },
]
# Nothing is generated only where the prompt is given back.
_SOME_TOKENS: list[Json] = [
    {"properties": {"max_tokens": {"not": {"const": 0}}}},
    {"properties": {"echo": {"const": True}}, "required": ["echo"]},
]
# Bounds of fields by the name of their request, beside ranges and numbers of elements.
_BOUNDS: Mapping[str, Mapping[str, Json]] = {
    "ChatRequest": {
        "messages": {"minItems": 1},
        "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_CHARACTERS},
        "stop": _STOPS,
        "store": {"enum": [False]},
    },
    "CompletionRequest": {"prompt": {"minItems": 1, "maxItems": MAX_TOKEN_IDS}, "max_tokens": {"minimum": 0}},
    "Message": {"content": {"items": _PART}},
    "MessagesTurn": {"content": {"items": _BLOCK, "minItems": 1}},
    "MessagesRequest": {"messages": {"minItems": 1}, "stop_sequences": {"items": {"type": "string", "minLength": 1}}},
    "EmbeddingsRequest": {
        "input": {"minLength": 1, "minItems": 1, "maxItems": MAX_TEXTS},
        "dimensions": {"minimum": 1},
        "encoding_format": {"enum": ["float", "base64"]},
    },
    "RerankRequest": {"documents": {"minItems": 1}, "top_n": {"minimum": 1}},
    **openapi_responses.BOUNDS,
}
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"maxProperties", "propertyNames", "additionalProperties"}),
    "string": frozenset({"minLength", "maxLength", "enum"}),
    "number": frozenset({"minimum", "maximum"}),
    "integer": frozenset({"minimum", "maximum"}),
    "boolean": frozenset({"enum"}),
}


def ref(name: str) -> Json:
    return {"$ref": REF.format(name=name)}


def components() -> dict[str, Json]:
    """Every schema, by its name."""
    requests = [ChatRequest, CompletionRequest, MessagesRequest, EmbeddingsRequest, RerankRequest, ResponsesRequest]
    _, found = msgspec.json.schema_components([*requests, ChatCompletion, ChatChunk], ref_template=REF)
    for name, ranges in (
        ("ChatRequest", RANGES),
        ("CompletionRequest", RANGES),
        ("MessagesRequest", anthropic_messages.RANGES),
        ("ResponsesRequest", RANGES),
    ):
        for field, low, high in ranges:
            _bound(found[name], field, {"minimum": low, "maximum": high})
    for request in requests:
        schema = found[request.__name__]
        schema["maxProperties"] = MAX_FIELDS
        for field in schema["properties"]:
            if field in MOST_ELEMENTS:
                most = MOST_ELEMENTS[field]
                _bound(schema, field, {"maxItems": most, "maxProperties": most})
    found["ResponsesRequest"]["properties"] |= openapi_responses.REFUSED
    for name, bounded in _BOUNDS.items():
        for field, bounds in bounded.items():
            _bound(found[name], field, bounds)
    found["Message"]["anyOf"] = _TURNS
    found["CompletionRequest"]["anyOf"] = _SOME_TOKENS
    messages = found["MessagesRequest"]
    found["CountTokensRequest"] = {**messages, "title": "CountTokensRequest"}
    found["MessagesRequest"] = {
        **messages,
        "properties": {**messages["properties"], "max_tokens": messages["properties"]["max_tokens"]["anyOf"][0]},
        "required": [*messages["required"], "max_tokens"],
    }
    return (
        found
        | _ANSWERS
        | openapi_responses.answers(_USAGE_OF_RESPONSE)
        | {"Error": error(), "MessagesError": _MESSAGES_ERROR}
    )


def error() -> Json:
    """An error in the OpenAI dialect."""
    properties = {
        "message": _TEXT,
        "type": _TEXT,
        "code": {"type": ["string", "null"]},
        "param": {"type": ["string", "null"]},
        "request_id": _TEXT,
    }
    return _object(error=_object(**properties, optional=("param",)))


def _bound(schema: Json, field: str, bounds: Json) -> None:
    """Put each bound where its type is: a field may be null, or of several types."""
    described = schema["properties"].get(field)
    for choice in described.get("anyOf", [described]) if described else ():
        allowed = _OF_TYPE.get(choice.get("type"), frozenset())
        choice.update({name: value for name, value in bounds.items() if name in allowed})


def _object(optional: tuple[str, ...] = (), **properties: Any) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


_MESSAGES_ERROR = _object(
    type={"const": "error"},
    error=_object(type=_TEXT, message=_TEXT, code=_TEXT, param=_TEXT, optional=("param",)),
    request_id=_TEXT,
)
_USAGE = {"anyOf": [{"$ref": REF.format(name="Usage")}, {"type": "null"}]}
_USAGE_OF_RESPONSE = {
    "anyOf": [_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT), {"type": "null"}]
}
_MODEL = _object(
    id=_TEXT,
    object={"const": "model"},
    created=_COUNT,
    owned_by=_TEXT,
    type={"const": "model"},
    display_name=_TEXT,
    created_at={"type": "string", "format": "date-time"},
    tierline=_object(
        kind={"enum": ["chat", "embedding", "rerank"]},
        tier={"type": ["string", "null"]},
        backend=_TEXT,
        context_length=_COUNT,
        capabilities={"type": "array", "items": _TEXT},
    ),
    optional=("tierline",),
)
_ANSWERS: dict[str, Json] = {
    "TextCompletion": _object(
        id=_TEXT,
        object={"const": "text_completion"},
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "items": _object(index=_COUNT, text=_TEXT)},
        usage=_USAGE,
        optional=("usage",),
    ),
    "Embeddings": _object(
        data={
            "type": "array",
            "items": _object(
                index=_COUNT,
                embedding={"anyOf": [{"type": "array", "items": {"type": "number"}}, _TEXT]},
            ),
        },
        model=_TEXT,
        usage=_USAGE,
        optional=("model", "usage"),
    ),
    "Ranking": _object(
        results={"type": "array", "items": _object(index=_COUNT, relevance_score={"type": "number"})},
        optional=("results",),
    ),
    "AnthropicMessage": _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content={"type": "array", "items": _object(type=_TEXT)},
        stop_reason={"type": ["string", "null"]},
        stop_sequence={"type": ["string", "null"]},
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
        optional=("stop_sequence",),
    ),
    "AnthropicEvent": _object(type=_TEXT),
    "ResponseEvent": _object(type=_TEXT),
    "TokenCount": _object(input_tokens=_COUNT),
    "Model": _MODEL,
    "ModelList": _object(
        object={"const": "list"},
        data={"type": "array", "items": ref("Model")},
        has_more={"type": "boolean"},
        first_id={"type": ["string", "null"]},
        last_id={"type": ["string", "null"]},
    ),
    "FeedbackRequest": {
        **_object(
            request_id={"type": "string", "minLength": 1, "maxLength": 128},
            rating={"enum": ["good", "bad"]},
        ),
        "additionalProperties": False,
    },
    "Feedback": _object(
        request_id=_TEXT, rating={"enum": ["good", "bad"]}, evicted=_COUNT, learned={"type": "boolean"}
    ),
    "Live": _object(status={"const": "live"}),
    "Ready": _object(
        status={"enum": ["ready", "degraded", "not ready"]},
        reasons={"type": "array", "items": _TEXT},
        backends={"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}},
        cache=_TEXT,
        ledger_lag_rows=_COUNT,
        policies=_object(version=_TEXT, problems=_COUNT),
    ),
}
