"""A gateway to be asked what its descriptions say, and requests made from them, right and wrong ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import hypothesis
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
from tests.gateway.admin_door import admin
from tests.gateway.front_door import PRICE, configuration, front_door

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@dataclass
class Running:
    """A gateway in a thread of its own, because the tests here wait for its answers without an event loop."""

    url: str
    token: str
    admin_token: str
    client: httpx.Client

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_token}"}

    def kept(self) -> str:
        """The id of a new answer that the gateway remembers."""
        answer = self.client.post("/v1/responses", json={"model": "mock", "input": "a"}, headers=self.headers())
        return str(answer.json()["id"])

    def filled(self, path: str) -> str:
        """The path with names of what there is."""
        return path.format(
            model="mock",
            response_id=self.kept() if "{response_id}" in path else "",
            file_id=self.file() if "{file_id}" in path else "",
            batch_id=self.batch() if "{batch_id}" in path else "",
            message_batch_id=self.message_batch() if "{message_batch_id}" in path else "",
        )

    def file(self) -> str:
        """The id of a new file of requests."""
        line = b'{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{"model":"vectors","input":"a"}}\n'
        form = {"file": ("a.jsonl", line)}
        answer = self.client.post("/v1/files", data={"purpose": "batch"}, files=form, headers=self.headers())
        return str(answer.json()["id"])

    def batch(self) -> str:
        """The id of a new batch."""
        asked = {"input_file_id": self.file(), "endpoint": "/v1/embeddings", "completion_window": "24h"}
        return str(self.client.post("/v1/batches", json=asked, headers=self.headers()).json()["id"])

    def message_batch(self) -> str:
        """The id of a new batch of messages that has ended."""
        message = {"model": "mock", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        asked = {"requests": [{"custom_id": "a", "params": message}]}
        path, headers = "/v1/messages/batches", self.headers()
        batch = self.client.post(path, json=asked, headers=headers).json()
        ends = time.monotonic() + 30
        while batch["processing_status"] != "ended" and time.monotonic() < ends:
            time.sleep(0.02)
            batch = self.client.get(f"{path}/{batch['id']}", headers=headers).json()
        return str(batch["id"])


@contextmanager
def running(root: Path) -> Iterator[Running]:
    """A gateway with its files under `root`, in front of a mock that answers all that it is asked."""
    ready, stop = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        upstream = MockUpstream(AgentWire())
        await upstream.start()
        model = {"tier": "small", "backend": "up", "price": PRICE, "max_output_tokens": 2**31 - 1}
        model["capabilities"] = ["tools", "logprobs", "json_schema", "vision", "audio", "reasoning", "prefill"]
        models = {"mock": model, "vectors": {"kind": "embedding", "backend": "up", "price": PRICE}}
        async with front_door(root, configuration({"up": upstream}, models)) as door:
            someone = await admin(door)
            found.update(url=door.url, token=door.token, admin_token=someone.token, loop=asyncio.get_running_loop())
            ready.set()
            await stop.wait()
        await upstream.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    loop = found.pop("loop")
    with httpx.Client(base_url=found["url"], timeout=30) as client:
        yield Running(**found, client=client)
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)


def check(url: str, headers: dict[str, str], operation: Any, mode: schemathesis.GenerationMode, examples: int) -> None:
    """Send so many requests to one operation; every answer must be as its description says."""

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
        response = case.call(base_url=url, headers=headers, timeout=20)
        case.validate_response(response, checks=CHECKS)
        assert response.headers["x-request-id"]

    send()
