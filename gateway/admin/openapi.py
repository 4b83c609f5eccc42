"""The OpenAPI 3.1 document of the admin API, made from the table of routes and the types that they take and give."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import msgspec

from backends.protocol import Json
from gateway.admin.call import AdminRoute
from gateway.openapi import error_schema

_REF = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request is malformed; the message names the field.",
    "401": "The admin key is missing, unknown, expired or revoked.",
    "403": "The admin key may not do this.",
    "404": "There is no such thing, or not for this admin key.",
    "409": "It exists.",
    "412": "It was changed since it was read.",
    "429": "Too many wrong keys came from this address.",
    "503": "The database, or the cache, does not answer.",
}


def document(routes: Iterable[AdminRoute]) -> dict[str, Any]:
    """The whole document, as plain data."""
    known = list(routes)
    types = [kind for route in known for kind in (route.answer, route.body, route.query) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {repr(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    components["Error"] = error_schema()
    paths: dict[str, dict[str, Any]] = {}
    for route in known:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tierline admin API",
            "version": metadata.version("tierline"),
            "description": "Organisations to keys, usage, policies, models, cache and audit log of a gateway.",
        },
        "servers": [{"url": "/"}],
        "security": [{"admin_key": []}],
        "paths": paths,
        "components": {
            "schemas": {name: _closed(name, schema, known) for name, schema in components.items()},
            "securitySchemes": {"admin_key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: AdminRoute, by_type: dict[str, Json], components: dict[str, Any]) -> Json:
    names = re.findall(r"{(\w+)}", route.path)
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if route.query is not None:
        fields = components[route.query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    if route.tagged and route.method == "PATCH":
        text = "The ETag of what was read: change it only if it is still so."
        parameters.append({"name": "if-match", "in": "header", "description": text, "schema": {"type": "string"}})
    statuses = {"400", "401", "429", "503"} | ({"403"} if route.role == "write" or route.gateway_wide else set())
    statuses |= {"404"} if names or route.path.startswith("/admin/v1/cache") else set()
    statuses |= {"409"} if route.status == 201 else set()
    statuses |= {"412"} if route.tagged and route.method == "PATCH" else set()
    answered: Json = {
        "description": "Done." if route.role == "write" else "Found.",
        "content": {"application/json": {"schema": by_type[repr(route.answer)]}},
    }
    if route.text is not None:
        answered["content"][route.text] = {"schema": {"type": "string"}}
    if route.tagged:
        answered["headers"] = {"etag": {"description": "Names this state.", "schema": {"type": "string"}}}
    described: Json = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "description": f"Role: {route.role}{', and a key without an organisation' if route.gateway_wide else ''}.",
        "parameters": parameters,
        "responses": {
            str(route.status): answered,
            **{
                status: {
                    "description": _ERRORS[status],
                    "content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}},
                }
                for status in sorted(statuses)
            },
        },
    }
    if route.body is not None:
        described["requestBody"] = {
            "required": bool(components[route.body.__name__].get("required")),
            "content": {"application/json": {"schema": by_type[repr(route.body)]}},
        }
    return described


def _operation_id(route: AdminRoute) -> str:
    words = re.sub(r"[{}]", "", route.path.removeprefix("/admin/v1/")).replace(".", "/").split("/")
    return route.method.lower() + "".join(word.capitalize() for word in words)


def _closed(name: str, schema: Json, routes: list[AdminRoute]) -> Json:
    """Bodies take no fields but those they have."""
    bodies = {route.body.__name__ for route in routes if route.body is not None}
    return {**schema, "additionalProperties": False} if name in bodies else schema
