"""What a bundled engine is told of a request: whose it is, how urgent, how long it matters. Others are told nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import POLICY, PRICE, FrontDoor, configuration, front_door

Open = Callable[..., AbstractAsyncContextManager[FrontDoor]]


@pytest.fixture
def open_door(tmp_path: Path, upstream: MockUpstream) -> Open:
    @asynccontextmanager
    async def opened(policy: str = POLICY, *, bundled: bool = True) -> AsyncIterator[FrontDoor]:
        models = {
            "mock": {"tier": "small", "backend": "up", "price": PRICE},
            "vectors": {"kind": "embedding", "backend": "up", "price": PRICE},
            "order": {"kind": "rerank", "backend": "up", "price": PRICE},
        }
        document = configuration({"up": upstream}, models)
        if bundled:
            document["backends"]["up"] = {"engine": "mock"}
            document["engines"] = {"mock": {"model": "mock", "port": upstream.port}}
        async with front_door(tmp_path, document, policy=policy) as door:
            yield door

    return opened


async def told(door: FrontDoor, upstream: MockUpstream, **asked: Any) -> dict[str, Any]:
    answer = await door.chat(**asked)
    assert answer.status_code == 200, answer.text
    body = json.loads(upstream.records[-1].body)
    return {name: body[name] for name in ("tenant", "priority", "deadline_ms") if name in body}


async def test_team_and_priority(open_door: Open, upstream: MockUpstream) -> None:
    async with open_door() as door:
        first = await told(door, upstream)
        assert first["priority"] == 0
        assert "deadline_ms" not in first
        same = await told(door, upstream, token=await door.key(project="another"))
        assert same["tenant"] == first["tenant"]
        other = await told(door, upstream, token=await door.key(team="other"), tenant="forged")
        assert other["tenant"] not in (first["tenant"], "forged")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "mock", "prompt": "x"}),
        ("/v1/embeddings", {"model": "vectors", "input": "x"}),
        ("/v1/rerank", {"model": "order", "query": "x", "documents": ["y"]}),
    ],
)
async def test_whatever_is_asked_of_it(
    open_door: Open, upstream: MockUpstream, path: str, body: dict[str, Any]
) -> None:
    async with open_door() as door:
        headers = {**door.headers(), "x-tierline-deadline-ms": "20000"}
        await door.client.post(path, json={"priority": 7, **body}, headers=headers)
        sent = json.loads(upstream.records[-1].body)
        assert sent["priority"] == 7
        assert sent["tenant"]
        assert 0 < sent["deadline_ms"] <= 20_000


async def test_what_is_left_of_the_deadline(open_door: Open, upstream: MockUpstream) -> None:
    async with open_door() as door:
        found = await told(door, upstream, headers={"x-tierline-deadline-ms": "20000"})
        assert 0 < found["deadline_ms"] <= 20_000


@pytest.mark.parametrize(
    ("asked", "priority"),
    [
        ({}, -5),
        ({"priority": 3}, -2),
        ({"priority": -50}, -5),
        ({"priority": -50.0}, -5),
        ({"priority": 3.0}, -2),
        ({"service_tier": "flex"}, 5),
        ({"service_tier": "flex", "priority": 99}, 100),
    ],
)
async def test_policies_push_and_clients_step_back(
    open_door: Open, upstream: MockUpstream, asked: dict[str, Any], priority: int
) -> None:
    async with open_door(POLICY + "priority: -5\n") as door:
        assert (await told(door, upstream, **asked))["priority"] == priority


async def test_other_servers_are_told_nothing(open_door: Open, upstream: MockUpstream) -> None:
    async with open_door(POLICY + "priority: -5\n", bundled=False) as door:
        assert await told(door, upstream, headers={"x-tierline-deadline-ms": "20000"}) == {}
