"""Files and batches in the OpenAPI document: their routes, what they take and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from backends.protocol import Json
from gateway.batches.checking import MAX_CUSTOM_ID
from gateway.batches.line import ENDPOINTS
from gateway.batches.record import STATUSES
from gateway.dialects.openai_responses import MAX_NAME, MAX_PAIRS, MAX_VALUE
from gateway.files.routes import LEAST_KEPT_S, MOST_KEPT_S, MOST_LISTED
from gateway.files.store import PURPOSES

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_TIME: Json = {"type": ["integer", "null"]}
_ID: Json = {"type": ["string", "null"]}
_KEPT: Json = {"type": "integer", "minimum": LEAST_KEPT_S, "maximum": MOST_KEPT_S}
_AFTER: tuple[str, Json] = ("Only what is behind this one.", {"type": "string", "pattern": "^[!-~]{1,100}$"})
# What every route of these may answer besides: the database or the disk may be away.
_ALWAYS: Final = ("400", "401", "403", "500", "503")

# Builds the answers of errors; the document has one for all.
Errors = Callable[..., Json]
Headers = Callable[..., Json]


def paths(errors: Errors, headers: Headers) -> dict[str, Json]:
    """The routes, by path and method."""

    def route(
        summary: str, operation: str, answer: Json, *more: str, query: Mapping[str, tuple[str, Json]] | None = None,
        path: str | None = None, content: str = "application/json", error: str = "Error",
    ) -> Json:  # fmt: skip
        described: Json = {
            "operationId": operation,
            "summary": summary,
            "parameters": [
                {"name": name, "in": "query", "required": False, "description": text, "schema": schema}
                for name, (text, schema) in (query or {}).items()
            ],
            "responses": {
                "200": {
                    "description": "Done.",
                    "content": {content: {"schema": answer}},
                    "headers": headers("x-request-id"),
                },
                **errors(*_ALWAYS, *more, schema=error),
            },
        }
        if path is not None:
            described["parameters"].append(
                {"name": path, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            )
            described["responses"] |= errors("404", schema=error)
        return described

    def ref(name: str) -> Json:
        return {"$ref": f"#/components/schemas/{name}"}

    def limit(most: int, usual: int) -> tuple[str, Json]:
        return "Items per page.", {"type": "integer", "minimum": 1, "maximum": most, "default": usual}

    create_file = route("Upload a file of requests for a batch.", "createFile", ref("File"), "404", "408", "413", "429")
    create_file["requestBody"] = {
        "required": True,
        "content": {"multipart/form-data": {"schema": ref("FileForm"), "encoding": {"file": {"contentType": "*/*"}}}},
    }
    list_files = route(
        "List the project's files.", "listFiles", ref("FileList"),
        query={
            "after": _AFTER, "limit": limit(MOST_LISTED, MOST_LISTED),
            "order": ("Which end comes first.", {"enum": ["asc", "desc"], "default": "desc"}),
            "purpose": ("Only these.", {"enum": list(PURPOSES)}),
        },
    )  # fmt: skip
    bytes_of: Json = {"type": "string", "format": "binary"}
    create_batch = route(
        "Make a batch: each line of a file is asked within a day, when there is room.",
        "createBatch", ref("Batch"), "404", "408", "413", "429",
    )  # fmt: skip
    create_batch["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": ref("BatchRequest")}},
    }
    cancel = route("Stop a batch; what was answered is kept.", "cancelBatch", ref("Batch"), "409", path="batch_id")
    create_messages = route(
        "Make a batch of messages, in the Anthropic dialect: each is asked within a day, when there is room.",
        "createMessageBatch", ref("MessageBatch"), "404", "408", "413", "429", error="MessagesError",
    )  # fmt: skip
    create_messages["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": ref("MessageBatchRequest")}},
    }

    def of_messages(summary: str, operation: str) -> Json:
        answer = ref("MessageBatch")
        return route(summary, operation, answer, path="message_batch_id", error="MessagesError")

    results = route(
        "Fetch the results of a batch of messages.", "getMessageBatchResults", bytes_of, path="message_batch_id",
        content="application/x-jsonl", error="MessagesError",
    )  # fmt: skip
    return {
        "/v1/messages/batches": {
            "post": create_messages,
            "get": route(
                "List the project's batches of messages, the newest first.", "listMessageBatches",
                ref("MessageBatchList"), query={"after_id": _AFTER, "limit": limit(100, 20)}, error="MessagesError",
            ),
        },
        "/v1/messages/batches/{message_batch_id}": {
            "get": of_messages("Describe a batch of messages.", "getMessageBatch")
        },
        "/v1/messages/batches/{message_batch_id}/cancel": {
            "post": of_messages("Stop a batch of messages; what was answered is kept.", "cancelMessageBatch")
        },
        "/v1/messages/batches/{message_batch_id}/results": {"get": results},
        "/v1/files": {"post": create_file, "get": list_files},
        "/v1/files/{file_id}": {
            "get": route("Describe a file.", "getFile", ref("File"), path="file_id"),
            "delete": route("Delete a file.", "deleteFile", ref("DeletedFile"), "409", path="file_id"),
        },
        "/v1/files/{file_id}/content": {
            "get": route(
                "Download a file.", "getFileContent", bytes_of, path="file_id", content="application/octet-stream"
            )
        },
        "/v1/batches": {
            "post": create_batch,
            "get": route(
                "List the project's batches, the newest first.", "listBatches", ref("BatchList"),
                query={"after": _AFTER, "limit": limit(100, 20)},
            ),
        },
        "/v1/batches/{batch_id}": {"get": route("Describe a batch.", "getBatch", ref("Batch"), path="batch_id")},
        "/v1/batches/{batch_id}/cancel": {"post": cancel},
    }  # fmt: skip


def schemas() -> dict[str, Json]:
    """What they take and answer, by name."""
    metadata: Json = {
        "type": "object",
        "maxProperties": MAX_PAIRS,
        "propertyNames": {"maxLength": MAX_NAME},
        "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
    }
    expires: Json = {
        "type": "object",
        "properties": {"anchor": {"const": "created_at"}, "seconds": _KEPT},
        "required": ["anchor", "seconds"],
        "additionalProperties": False,
    }
    request: Json = {
        "type": "object",
        "properties": {
            "input_file_id": _TEXT,
            "endpoint": {"enum": list(ENDPOINTS)},
            "completion_window": {"const": "24h"},
            "metadata": {"anyOf": [metadata, {"type": "null"}]},
            "output_expires_after": {"anyOf": [expires, {"type": "null"}]},
        },
        "required": ["input_file_id", "endpoint", "completion_window"],
        "additionalProperties": False,
    }
    form: Json = {
        "type": "object",
        "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
        "required": ["purpose", "file"],
        "additionalProperties": False,
    }
    file = _object(
        id=_TEXT, object={"const": "file"}, bytes=_COUNT, created_at=_COUNT, expires_at=_TIME, filename=_TEXT,
        purpose={"enum": list(PURPOSES)}, status={"const": "processed"},
    )  # fmt: skip
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = _object(
        id=_TEXT, object={"const": "batch"}, endpoint=_TEXT, errors={"type": ["object", "null"]}, input_file_id=_TEXT,
        completion_window={"const": "24h"}, status={"enum": list(STATUSES)}, output_file_id=_ID, error_file_id=_ID,
        created_at=_COUNT, expires_at=_TIME, **{f"{time}_at": _TIME for time in times},
        request_counts=_object(total=_COUNT, completed=_COUNT, failed=_COUNT), usage={"type": "object"},
        metadata={"type": ["object", "null"]},
    )  # fmt: skip
    return {
        "FileForm": form,
        "File": file,
        "FileList": _list("File"),
        "DeletedFile": _object(id=_TEXT, object={"const": "file"}, deleted={"const": True}),
        "BatchRequest": request,
        "Batch": batch,
        "BatchList": _list("Batch"),
        **_of_messages(),
    }


def _of_messages() -> dict[str, Json]:
    one: Json = {
        "type": "object",
        "properties": {
            "custom_id": {"type": "string", "minLength": 1, "maxLength": MAX_CUSTOM_ID},
            "params": {"type": "object", "description": "What POST /v1/messages takes, without `stream`."},
        },
        "required": ["custom_id", "params"],
        "additionalProperties": False,
    }
    request: Json = {
        "type": "object",
        "properties": {"requests": {"type": "array", "items": one, "minItems": 1}},
        "required": ["requests"],
        "additionalProperties": False,
    }
    moment: Json = {"type": ["string", "null"]}
    counts = _object(**dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), _COUNT))
    batch = _object(
        id=_TEXT, type={"const": "message_batch"}, processing_status={"enum": ["in_progress", "canceling", "ended"]},
        request_counts=counts, created_at=_TEXT, expires_at=_TEXT, ended_at=moment, cancel_initiated_at=moment,
        archived_at=moment, results_url=moment,
    )  # fmt: skip
    items: Json = {"type": "array", "items": {"$ref": "#/components/schemas/MessageBatch"}}
    return {
        "MessageBatchRequest": request,
        "MessageBatch": batch,
        "MessageBatchList": _object(data=items, first_id=_ID, last_id=_ID, has_more={"type": "boolean"}),
    }


def _list(name: str) -> Json:
    items = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}
    return _object(object={"const": "list"}, data=items, first_id=_ID, last_id=_ID, has_more={"type": "boolean"})


def _object(**fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": list(fields)}
