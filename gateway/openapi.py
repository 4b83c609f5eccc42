"""The OpenAPI 3.1 document of the gateway's HTTP API, generated from the wire types that validate requests."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from backends.protocol import Json
from gateway import openapi_batches
from gateway.openapi_schemas import components, error, ref
from tiers import TIERS

_ERRORS = {
    "400": "The request is malformed, or asks for something that no model here can do.",
    "401": "The API key is missing, unknown, expired or revoked.",
    "403": "The key may not use this model.",
    "404": "The model is unknown.",
    "409": "The answer to this idempotency key was too large to be kept; or the file or batch is in another state.",
    "408": "The request came too slowly.",
    "413": "The body is larger than the configured limit.",
    "422": "The idempotency key belongs to another request.",
    "429": "A rate limit or a budget is exhausted; `retry-after` says when to try again.",
    "500": "A fault of the gateway; its log has the reason under the request id.",
    "502": "The backend answered with something that is not an answer.",
    "503": "No backend can answer now.",
    "504": "The backend did not answer in time.",
}
_REQUEST_HEADERS: dict[str, tuple[str, Json]] = {
    "x-tierline-tier": ("Use this tier whatever the policy says; chat only.", {"enum": list(TIERS)}),
    "x-tierline-cache": (
        "no-cache (do not read), no-store (do not write), max-age=SECONDS (none older), only-if-cached (answer 504 on"
        " a miss); several by commas.",
        {"type": "string"},
    ),
    "cache-control": ("The same directives, as RFC 9111 has them; any other changes nothing.", {"type": "string"}),
    "x-tierline-tags": ("Comma-separated NAME=VALUE pairs that go into the ledger row.", {"type": "string"}),
    "x-tierline-deadline-ms": (
        "Give up after this many milliseconds, all attempts together.",
        {"type": "integer", "minimum": 1, "maximum": 86_400_000},
    ),
    "idempotency-key": (
        "The same request with the same key gets the first one's answer, and is billed once.",
        {"type": "string"},
    ),
}
_RESPONSE_HEADERS = {
    "x-request-id": "Id of this request, as in the ledger and in `tierline explain`.",
    "x-tierline-policy": "Policy and version that decided.",
    "x-tierline-reason": "Why that tier, in a word.",
    "x-tierline-task": "What kind of task the request was taken for, where its policy looks at that.",
    "x-tierline-p": "With `tier: auto`: how likely the answering tier is to do it well, 0 to 1.",
    "x-tierline-tier": "Tier of the model that answered.",
    "x-tierline-model": "Model that answered.",
    "x-tierline-backend": "Backend that answered.",
    "x-tierline-cache": "miss, exact, semantic or bypass; audit or shadow: a hit was found and not given.",
    "x-tierline-cache-score": "Similarity of the question whose answer was found.",
    "x-tierline-cache-p": "Chance that the answer found fits, under a promise.",
    "x-tierline-cache-age": "Seconds since the answer found was made.",
    "x-tierline-cache-entry": "The request that the answer found was made for.",
    "x-tierline-cache-reason": "Why less of the cache was used than the policy allows, or nothing was found.",
    "x-tierline-escalated": "Tiers whose answers were got, and why answers failed the policy's checks, if one did.",
    "x-tierline-fallback": "Why another tier than the one decided on answered.",
    "idempotent-replayed": "true: the answer of an earlier request with the same idempotency key.",
    "x-tierline-cost-usd": "Cost of a non-streaming answer; a stream carries it in its usage chunk.",
    "x-ratelimit-limit-requests": "Requests per minute allowed.",
    "x-ratelimit-remaining-requests": "Requests left in this window.",
}


def document() -> dict[str, Any]:
    """The whole document, as plain data."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tierline",
            "version": metadata.version("tierline"),
            "description": "One endpoint for every large language model a company uses.",
        },
        "servers": [{"url": "/"}],  # where this document came from, whatever the client and proxies call it
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": {
                "post": _model_route(
                    "Answer a conversation, whole or as a stream of server-sent events.",
                    "createChatCompletion",
                    "ChatRequest",
                    answer="ChatCompletion",
                    event="ChatChunk",
                )
            },
            "/v1/completions": {
                "post": _model_route(
                    "Continue a text.", "createCompletion", "CompletionRequest", "TextCompletion", "ChatChunk"
                )
            },
            "/v1/embeddings": {
                "post": _model_route("Turn texts into vectors.", "createEmbedding", "EmbeddingsRequest", "Embeddings")
            },
            "/v1/rerank": {"post": _model_route("Order documents by a query.", "rerank", "RerankRequest", "Ranking")},
            "/v1/responses": {
                "post": _model_route(
                    "Answer a conversation that the gateway may remember, in the Responses dialect.",
                    "createResponse",
                    "ResponsesRequest",
                    answer="Response",
                    event="ResponseEvent",
                )
            },
            "/v1/responses/{response_id}": {
                "get": _kept("Look up a kept answer.", "getResponse", "Response"),
                "delete": _kept("Delete a kept answer.", "deleteResponse", "DeletedResponse"),
            },
            "/v1/responses/{response_id}/input_items": {"get": _input_items_route()},
            "/v1/responses/{response_id}/cancel": {"post": _cancel_route()},
            "/v1/messages": {
                "post": _model_route(
                    "Answer a conversation in the Anthropic dialect.",
                    "createMessage",
                    "MessagesRequest",
                    answer="AnthropicMessage",
                    event="AnthropicEvent",
                    error="MessagesError",
                )
            },
            "/v1/messages/count_tokens": {"post": _count_route()},
            "/v1/feedback": {"post": _feedback_route()},
            **openapi_batches.paths(_error_responses, _headers),
            "/v1/models": {"get": _get("List the models that this key may use.", "listModels", answer="ModelList")},
            "/v1/models/{model}": {"get": _get("Describe one model.", "getModel", ["model"], answer="Model")},
            "/health/live": {"get": _open("The process runs.", "live", schema=ref("Live"))},
            "/health/ready": {"get": _ready_route()},
            "/metrics": {"get": _open("Prometheus metrics.", "metrics", "text/plain", {"type": "string"})},
            "/openapi.json": {"get": _open("This document.", "openapi")},
        },
        "components": {
            "schemas": components() | openapi_batches.schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def error_schema() -> dict[str, Any]:
    """An error in the OpenAI dialect."""
    return error()


def _error_responses(*statuses: str, schema: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": ref(schema)}}
    return {
        status: {"description": _ERRORS[status], "content": content, "headers": _headers("x-request-id")}
        for status in statuses
    }


def _headers(*names: str) -> Json:
    return {name: {"description": _RESPONSE_HEADERS[name], "schema": {"type": "string"}} for name in names}


def _model_route(
    summary: str,
    operation: str,
    request: str,
    answer: str | None = None,
    event: str | None = None,
    error: str = "Error",
) -> Json:
    """A route that reaches models. An answer without a schema is as the dialect has it; without events there is no
    stream."""
    content: Json = {"application/json": {"schema": ref(answer) if answer else {"type": "object"}}}
    if event is not None:
        content["text/event-stream"] = {"schema": _event(event)}
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
            for name, (text, schema) in _REQUEST_HEADERS.items()
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref(request)}}},
        "responses": {
            "200": {"description": "The answer.", "content": content, "headers": _headers(*_RESPONSE_HEADERS)}
        }
        | _error_responses(*_ERRORS, schema=error),
    }


def _event(name: str) -> Json:
    """Each event of a stream: a JSON document is its data. Streams of chunks end with an event that is none."""
    data: Json = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(name)}
    if name == "ChatChunk":
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "description": "Each event.",
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _count_route() -> Json:
    route = _model_route(
        "Count the input tokens of a message.",
        "countMessageTokens",
        "CountTokensRequest",
        answer="TokenCount",
        error="MessagesError",
    )
    text = "counted by the server that would answer, or estimated."
    route["responses"]["200"]["headers"] = _headers("x-request-id", "x-tierline-policy", "x-tierline-model") | {
        "x-tierline-count": {"description": text, "schema": {"type": "string"}}
    }
    return route


def _feedback_route() -> Json:
    errors = [status for status in _ERRORS if status not in ("403", "409", "422", "502", "504")]
    content = {"application/json": {"schema": ref("Feedback")}}
    return {
        "operationId": "giveFeedback",
        "summary": "Say whether the answer to a request of your team was good; a bad one leaves the answer cache.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": ref("FeedbackRequest")}}},
        "responses": {"200": {"description": "Taken.", "content": content, "headers": _headers("x-request-id")}}
        | _error_responses(*errors),
    }


def _get(
    summary: str, operation: str, path_parameters: list[str] | None = None, answer: str | None = None
) -> dict[str, Any]:
    content = {"application/json": {"schema": ref(answer) if answer else {"type": "object"}}}
    errors = ("400", "401", "403", "404", "500") if path_parameters else ("400", "401", "500")
    described: dict[str, Any] = {
        "operationId": operation,
        "summary": summary,
        "responses": {"200": {"description": "Found.", "content": content, "headers": _headers("x-request-id")}}
        | _error_responses(*errors),
    }
    if path_parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in path_parameters
        ]
    return described


def _input_items_route() -> Json:
    route = _kept("List what a kept answer was made from, the latest item first.", "listInputItems", "ResponseItems")
    asked: dict[str, tuple[str, Json]] = {
        "after": ("Only items behind this one.", {"type": "string"}),
        "limit": ("Items per page.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
        "order": ("Which end comes first.", {"enum": ["asc", "desc"], "default": "desc"}),
    }
    route["parameters"] += [
        {"name": name, "in": "query", "required": False, "description": text, "schema": schema}
        for name, (text, schema) in asked.items()
    ]
    return route


def _kept(summary: str, operation: str, answer: str) -> Json:
    """A route about a kept answer: the database may be away."""
    route = _get(summary, operation, ["response_id"], answer)
    route["responses"] |= _error_responses("503")
    return route


def _cancel_route() -> Json:
    route = _kept("Refused: no answer is made in the background.", "cancelResponse", "Response")
    del route["responses"]["200"]
    return route


def _open(
    summary: str, operation: str, content: str = "application/json", schema: Json | None = None
) -> dict[str, Any]:
    return {
        "operationId": operation,
        "summary": summary,
        "security": [],
        "responses": {"200": {"description": summary, "content": {content: {"schema": schema or {"type": "object"}}}}},
    }


def _ready_route() -> Json:
    route = _open("Whether this process should get traffic.", "ready", schema=ref("Ready"))
    route["responses"]["503"] = {**route["responses"]["200"], "description": "It should not; `reasons` says why."}
    return route
