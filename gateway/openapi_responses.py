"""Schemas of the Responses dialect for the OpenAPI document: what its requests are held to, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backends.protocol import MAX_SALT_CHARACTERS, Json
from gateway.dialects import openai_responses as dialect
from gateway.dialects.responses_input import DETAILS, MAX_ITEMS, ROLES, STATES

_TEXT: Json = {"type": "string"}
_NOTHING: Json = {"enum": [None, False]}
_ANYTHING: Json = {}


def _item(optional: Mapping[str, Json], **required: Json) -> Json:
    """An object that may have other fields only if they say nothing."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": _NOTHING,
    }


def _kind(name: str) -> Json:
    return {"const": name}


def _or_null(*values: str) -> Json:
    return {"enum": [*values, None]}


_PART: Json = {
    "anyOf": [
        _item({}, type=_kind("input_text"), text=_TEXT),
        _item({"detail": _or_null(*DETAILS)}, type=_kind("input_image"), image_url=_TEXT),
        _item(
            {"annotations": _ANYTHING, "logprobs": _ANYTHING, "parsed": _ANYTHING},
            type=_kind("output_text"),
            text=_TEXT,
        ),
        _item({}, type=_kind("refusal"), refusal=_TEXT),
    ]
}
_CONTENT: Json = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_COMMON: Mapping[str, Json] = {"id": {"type": ["string", "null"]}, "status": _or_null(*STATES)}
_THOUGHTS: Json = {
    "type": ["array", "null"],
    "items": {"type": "object", "properties": {"type": _TEXT, "text": _TEXT}, "required": ["type", "text"]},
}
INPUT_ITEM: Final[Json] = {
    "anyOf": [
        _item(
            {**_COMMON, "type": _or_null("message"), "phase": _ANYTHING}, role={"enum": list(ROLES)}, content=_CONTENT
        ),
        _item(
            {**_COMMON, "parsed_arguments": _ANYTHING},
            type=_kind("function_call"),
            call_id=_TEXT,
            name=_TEXT,
            arguments=_TEXT,
        ),
        _item(_COMMON, type=_kind("function_call_output"), call_id=_TEXT, output=_CONTENT),
        _item(
            {**_COMMON, "summary": _THOUGHTS, "content": _THOUGHTS, "encrypted_content": {"type": ["string", "null"]}},
            type=_kind("reasoning"),
        ),
    ]
}
# Bounds by the name of the type, in the form of `openapi_schemas`.
BOUNDS: Final[Mapping[str, Mapping[str, Json]]] = {
    "ResponsesRequest": {
        "input": {"items": INPUT_ITEM, "minItems": 1, "maxItems": MAX_ITEMS},
        "cache_salt": {"minLength": 1, "maxLength": MAX_SALT_CHARACTERS},
        "include": {"items": {"enum": list(dialect.INCLUDABLE)}},
        "max_output_tokens": {"minimum": 1, "maximum": 2**31 - 1},
        "metadata": {
            "maxProperties": dialect.MAX_PAIRS,
            "propertyNames": {"maxLength": dialect.MAX_NAME},
            "additionalProperties": {"type": "string", "maxLength": dialect.MAX_VALUE},
        },
        "tool_choice": {"enum": ["none", "auto", "required"]},
        "truncation": {"enum": ["disabled"]},
    },
    "ReasoningOptions": {
        "effort": {"enum": list(dialect.EFFORTS)},
        "summary": {"enum": ["auto", "detailed"]},
        "context": {"enum": ["auto"]},
        "mode": {"enum": ["standard"]},
    },
    "ResponsesStreamOptions": {"include_obfuscation": {"enum": [False]}},
}
# Parameters that are refused if they say anything.
REFUSED: Final[Mapping[str, Json]] = {
    name: {**_NOTHING, "description": advice} for name, advice in dialect.REFUSED.items()
}


def answers(usage: Json) -> dict[str, Json]:
    """What the routes answer, by name."""
    output = {"type": "array", "items": {"type": "object", "properties": {"type": _TEXT}, "required": ["type"]}}
    response: dict[str, Any] = {
        "id": _TEXT,
        "object": _kind("response"),
        "created_at": {"type": "number"},
        "status": {"enum": ["completed", "incomplete", "in_progress", "failed"]},
        "model": _TEXT,
        "output": output,
        "error": {"type": ["object", "null"]},
        "incomplete_details": {"type": ["object", "null"]},
        "usage": usage,
    }
    deleted: dict[str, Any] = {"id": _TEXT, "object": _kind("response"), "deleted": {"const": True}}
    page: dict[str, Any] = {
        "object": _kind("list"),
        "data": output,
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
        "has_more": {"type": "boolean"},
    }
    return {
        name: {"type": "object", "properties": fields, "required": list(fields)}
        for name, fields in (("Response", response), ("DeletedResponse", deleted), ("ResponseItems", page))
    }
