"""The description of the API is true: requests made from it, right and wrong ones, get answers as it says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from bench.mock_agent import AgentWire
from bench.mock_upstream import MockUpstream
from gateway.app import ROUTES
from gateway.openapi import document
from tests.gateway.front_door import PRICE, configuration, front_door

DOCUMENT = document()
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# Kept answers are a dialect with a state of its own, tested by itself.
PATHS = [(method, path) for method, path in ROUTES if not path.startswith("/v1/responses")]
FREE_TEXTS = ("x-tierline-tags", "x-tierline-cache", "idempotency-key")
ASKING = [path for method, path in PATHS if method == "POST"]


@dataclass
class Running:
    """A gateway in a thread of its own, because the tests here wait for its answers without an event loop."""

    url: str
    token: str
    client: httpx.Client

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    ready, stop = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def serve(root: Path) -> None:
        upstream = MockUpstream(AgentWire())
        await upstream.start()
        model = {"tier": "small", "backend": "up", "price": PRICE, "max_output_tokens": 2**31 - 1}
        model["capabilities"] = ["tools", "logprobs", "json_schema", "vision", "audio", "reasoning", "prefill"]
        models = {"mock": model, "vectors": {"kind": "embedding", "backend": "up", "price": PRICE}}
        async with front_door(root, configuration({"up": upstream}, models)) as door:
            found.update(url=door.url, token=door.token, loop=asyncio.get_running_loop())
            ready.set()
            await stop.wait()
        await upstream.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve(tmp_path_factory.mktemp("gateway"))))
    thread.start()
    assert ready.wait(60)
    with httpx.Client(base_url=found["url"], timeout=30) as client:
        yield Running(found["url"], found["token"], client)
    found["loop"].call_soon_threadsafe(stop.set)
    thread.join(30)


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
            errors = {"400", "401", "403", "404", "408", "413", "429", "500", "502", "503", "504"}
            assert errors < set(described["responses"]), path


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
        "EmbeddingsRequest": {"model": "vectors", "input": "a"},
        "RerankRequest": {"model": "mock", "query": "a", "documents": ["b"]},
    }[request_name]
    schema = {"$ref": f"#/components/schemas/{request_name}", "components": DOCUMENT["components"]}
    jsonschema.validate(body, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {field: value}, schema)
    response = gateway.client.post(path, json=body | {field: value}, headers=gateway.headers())
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


# Methods.


@pytest.mark.parametrize("path", sorted({path for _, path in PATHS}))
def test_other_methods_are_refused_and_the_right_ones_named(gateway: Running, path: str) -> None:
    allowed = {method for method, other in ROUTES if other == path}
    allowed |= {"HEAD"} if "GET" in allowed else set()
    for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"} - allowed:
        response = gateway.client.request(method, path.replace("{model}", "mock"), headers=gateway.headers())
        assert response.status_code == 405, (method, path)
        assert {name.strip() for name in response.headers["allow"].split(",")} == allowed
        assert response.headers["x-request-id"]
        if method == "HEAD":
            assert response.content == b""
        else:
            assert response.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", sorted(path for method, path in PATHS if method == "GET"))
def test_head_is_get_without_a_body(gateway: Running, path: str) -> None:
    path = path.replace("{model}", "mock")
    head = gateway.client.head(path, headers=gateway.headers())
    assert (head.status_code, head.content) == (200, b"")
    got = gateway.client.get(path, headers=gateway.headers())
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


# Requests made from the document.


def schema() -> Any:
    made = schemathesis.openapi.from_dict(DOCUMENT).exclude(path_regex="^/v1/responses|^/metrics")

    @made.hook
    def map_body(context: Any, body: Any) -> Any:
        """Most requests name a model that there is, so that they come further than to the question which one."""
        if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 4:
            body["model"] = "vectors" if "embeddings" in context.operation.path else "mock"
        return body

    @made.hook
    def map_headers(context: Any, headers: Any) -> Any:
        """Free texts that are nearly always wrong stay in every fourth request; no deadline ends one by chance."""
        return {
            name: value
            for name, value in (headers or {}).items()
            if name.lower() != "x-tierline-deadline-ms" and (name.lower() not in FREE_TEXTS or len(str(value)) % 4 == 3)
        }

    return made


def check(gateway: Running, examples: int, mode: schemathesis.GenerationMode, path: str, method: str) -> None:
    """Send so many requests to one operation."""
    operation = schema()[path][method]

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    def send(case: Any) -> None:
        response = case.call(base_url=gateway.url, headers=gateway.headers(), timeout=20)
        case.validate_response(response, checks=CHECKS)
        assert response.headers["x-request-id"]

    send()


OPERATIONS = sorted((path, method.lower()) for method, path in PATHS if path != "/metrics")
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.mark.parametrize("mode", MODES, ids=["right", "wrong"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_a_few_requests(gateway: Running, path: str, method: str, mode: schemathesis.GenerationMode) -> None:
    if mode is schemathesis.GenerationMode.NEGATIVE and path not in ASKING:
        pytest.skip("nothing in this request can be wrong")
    check(gateway, 25, mode, path, method)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=["right", "wrong"])
@pytest.mark.parametrize("path", ASKING)
def test_many_requests(gateway: Running, path: str, mode: schemathesis.GenerationMode) -> None:
    check(gateway, 120, mode, path, "post")
