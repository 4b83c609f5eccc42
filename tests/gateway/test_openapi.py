"""The description of the API is true: requests made from it, right and wrong ones, get answers as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis

from gateway.app import ROUTES
from gateway.openapi import document
from tests.gateway.described import RIGHT, WRONG, Running, check, running

DOCUMENT = document()
PATHS = list(ROUTES)
FREE_TEXTS = ("x-tierline-tags", "x-tierline-cache", "idempotency-key")
STORING = ("/v1/files", "/v1/batches", "/v1/messages/batches")  # these ask no model themselves
ASKING = [path for method, path in PATHS if method == "POST" and not path.endswith("/cancel") and path not in STORING]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("gateway")) as found:
        yield found


# The document.


def test_every_route_is_described_with_its_methods_and_errors() -> None:
    assert {(method, path) for method, path in ROUTES} == {
        (method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item
    }
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    for (method, path), route in ROUTES.items():
        described = DOCUMENT["paths"][path][method.lower()]
        if route.access == "key":
            assert {"400", "401"} <= set(described["responses"]), path
        if path in ASKING:
            errors = {"400", "401", "404", "408", "413", "429", "500", "503"}
            errors |= {"403", "502", "504"} if path != "/v1/feedback" else set()  # that one asks no model
            assert errors <= set(described["responses"]), path


@pytest.mark.parametrize(
    ("request_name", "field", "value"),
    [
        ("ChatRequest", "temperature", 2.1),
        ("ChatRequest", "n", 129),
        ("ChatRequest", "messages", []),
        ("ChatRequest", "stop", ["a"] * 5),
        ("ChatRequest", "stop", ""),
        ("ChatRequest", "store", True),
        ("ChatRequest", "cache_salt", "x" * 129),
        ("CompletionRequest", "max_tokens", 0),
        ("MessagesRequest", "temperature", 1.1),
        ("MessagesRequest", "top_k", -1),
        ("ResponsesRequest", "temperature", 2.1),
        ("ResponsesRequest", "max_output_tokens", 0),
        ("ResponsesRequest", "metadata", {"a" * 65: "b"}),
        ("ResponsesRequest", "metadata", {str(number): "b" for number in range(17)}),
        ("ResponsesRequest", "input", []),
        ("ResponsesRequest", "truncation", "auto"),
        ("ResponsesRequest", "background", True),
        ("EmbeddingsRequest", "encoding_format", "hex"),
        ("EmbeddingsRequest", "dimensions", 0),
        ("EmbeddingsRequest", "input", ""),
        ("EmbeddingsRequest", "input", ["a"] * 2049),
        ("RerankRequest", "top_n", 0),
    ],
)
def test_bounds_are_in_the_document_and_in_force(gateway: Running, request_name: str, field: str, value: Any) -> None:
    (path,) = (
        path
        for path, item in DOCUMENT["paths"].items()
        if request_name in json.dumps(item.get("post", {}).get("requestBody", {})) and not path.endswith("count_tokens")
    )
    message = {"role": "user", "content": "a"}
    body = {
        "ChatRequest": {"model": "mock", "messages": [message]},
        "CompletionRequest": {"model": "mock", "prompt": "a"},
        "MessagesRequest": {"model": "mock", "messages": [message], "max_tokens": 5},
        "ResponsesRequest": {"model": "mock", "input": "a"},
        "EmbeddingsRequest": {"model": "vectors", "input": "a"},
        "RerankRequest": {"model": "mock", "query": "a", "documents": ["b"]},
    }[request_name]
    schema = {"$ref": f"#/components/schemas/{request_name}", "components": DOCUMENT["components"]}
    jsonschema.validate(body, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {field: value}, schema)
    response = gateway.client.post(path, json=body | {field: value}, headers=gateway.headers())
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_events_of_a_stream_are_as_described(gateway: Running, path: str, body: dict[str, Any]) -> None:
    response = gateway.client.post(path, json={"model": "mock", "stream": True, **body}, headers=gateway.headers())
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    said = content["schema"]["properties"]["data"]
    described = next(choice for choice in said.get("anyOf", [said]) if "contentSchema" in choice)["contentSchema"]
    *events, last = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert len(events) >= 1
    assert (last == "[DONE]") == ("anyOf" in said)
    for event in events if last == "[DONE]" else [*events, last]:
        jsonschema.validate(json.loads(event), {**described, "components": DOCUMENT["components"]})


# Methods.


@pytest.mark.parametrize("path", sorted({path for _, path in PATHS}))
def test_other_methods_are_refused_and_the_right_ones_named(gateway: Running, path: str) -> None:
    allowed = {method for method, other in ROUTES if other == path}
    allowed |= {"HEAD"} if "GET" in allowed else set()
    for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"} - allowed:
        response = gateway.client.request(method, gateway.filled(path), headers=gateway.headers())
        assert response.status_code == 405, (method, path)
        assert {name.strip() for name in response.headers["allow"].split(",")} == allowed
        assert response.headers["x-request-id"]
        if method == "HEAD":
            assert response.content == b""
        else:
            assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", sorted(path for method, path in PATHS if method == "GET"))
def test_head_is_get_without_a_body(gateway: Running, path: str) -> None:
    path = gateway.filled(path)
    head = gateway.client.head(path, headers=gateway.headers())
    assert (head.status_code, head.content) == (200, b"")
    got = gateway.client.get(path, headers=gateway.headers())
    assert head.headers["content-type"] == got.headers["content-type"]
    if not path.endswith("/results"):  # which are written as they are read
        assert int(head.headers["content-length"]) > 0


# Requests made from the document.


def schema(gateway: Running) -> Any:
    made = schemathesis.openapi.from_dict(DOCUMENT).exclude(path_regex="^/metrics")
    kept, file, batch, messages = gateway.kept(), gateway.file(), gateway.batch(), gateway.message_batch()

    @made.hook
    def map_body(context: Any, body: Any) -> Any:
        """Most requests name a model and an earlier answer that there are, so that they come further than to them."""
        if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 4 != 3:
            body["model"] = "vectors" if "embeddings" in context.operation.path else "mock"
        if isinstance(body, dict) and isinstance(body.get("previous_response_id"), str):
            body["previous_response_id"] = "resp_none" if len(body["previous_response_id"]) % 4 == 3 else kept
        given = body.get("input_file_id") if isinstance(body, dict) else None
        if isinstance(given, str) and len(given) % 4 != 3:
            body["input_file_id"] = file
        return body

    @made.hook
    def map_path_parameters(context: Any, path_parameters: Any) -> Any:
        """Likewise; what is deleted is there before."""
        given = path_parameters or {}
        if len(given.get("response_id", "...")) % 4 != 3:
            path_parameters["response_id"] = gateway.kept() if context.operation.method == "delete" else kept
        if len(given.get("file_id", "...")) % 4 != 3:
            path_parameters["file_id"] = gateway.file() if context.operation.method == "delete" else file
        if len(given.get("batch_id", "...")) % 4 != 3:
            path_parameters["batch_id"] = batch
        if len(given.get("message_batch_id", "...")) % 4 != 3:
            path_parameters["message_batch_id"] = messages
        return path_parameters

    @made.hook
    def map_headers(context: Any, headers: Any) -> Any:
        """Free texts that are nearly always wrong stay in every fourth request; no deadline ends one by chance."""
        return {
            name: value
            for name, value in (headers or {}).items()
            if name.lower() != "x-tierline-deadline-ms" and (name.lower() not in FREE_TEXTS or len(str(value)) % 4 == 3)
        }

    return made


OPERATIONS = sorted((path, method.lower()) for method, path in PATHS if path != "/metrics")
# What is wrong in a query may be lost on its way into one: wrong requests have bodies.
FEW = [
    (path, method, mode) for path, method in OPERATIONS for mode in (RIGHT, WRONG) if mode is RIGHT or path in ASKING
]


@pytest.mark.parametrize(("path", "method", "mode"), FEW)
def test_a_few_requests(gateway: Running, path: str, method: str, mode: schemathesis.GenerationMode) -> None:
    operation = schema(gateway)[path][method]
    check(gateway.url, gateway.headers(), operation, mode, 20 if path in ASKING else 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [RIGHT, WRONG])
@pytest.mark.parametrize("path", ASKING)
def test_many_requests(gateway: Running, path: str, mode: schemathesis.GenerationMode) -> None:
    check(gateway.url, gateway.headers(), schema(gateway)[path]["post"], mode, 120)
