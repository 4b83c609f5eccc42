"""Which requests share an answer, through a real gateway and a real cache process; the upstream counts its calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.mock_upstream import MockUpstream
from gateway.ledger.reports import explain
from tests.cache.conftest import Process
from tests.gateway.exact_upstream import key, settled_and_held
from tests.gateway.front_door import PRICE, FrontDoor, configuration, events, front_door

POLICY = """\
version: 1
name: default
owner: tests
routes: [{tier: small}]
cache: {mode: exact}
"""

Open = Callable[..., AbstractAsyncContextManager[FrontDoor]]


@pytest.fixture(scope="module")
def cache_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache process for all tests here: each has a team of its own, so they share nothing."""
    process = Process(tmp_path_factory.mktemp("cache") / "s")
    process.start()
    yield process.socket
    assert process.end() == 0


@pytest.fixture
def open_door(tmp_path: Path, upstream: MockUpstream, cache_socket: Path) -> Open:
    """A gateway with a cache, whose model `mock` may write 50 tokens.

    With `sampling`, its backend is the bundled engine (by name only, the mock serves), whose defaults are known.
    """

    @asynccontextmanager
    async def opened(sampling: dict[str, float] | None = None, policy: str = POLICY) -> AsyncIterator[FrontDoor]:
        models = {"mock": {"tier": "small", "backend": "up", "max_output_tokens": 50, "price": PRICE}}
        document = configuration({"up": upstream}, models)
        document["cache"] = {"lookup_timeout_ms": 30_000.0}
        if sampling is not None:
            document["backends"]["up"] = {"engine": "mock"}
            document["engines"] = {"mock": {"model": "mock", "port": upstream.port, "sampling": sampling}}
        (tmp_path / "var" / "run").mkdir(parents=True)
        (tmp_path / "var" / "run" / "cache.sock").symlink_to(cache_socket)
        async with front_door(tmp_path, document, policy=policy) as door:
            assert door.services.cache is not None
            assert await door.services.cache.wait_connected(60)
            yield door

    return opened


async def outcome(door: FrontDoor, model: str = "mock", **body: Any) -> str:
    response = await door.chat(model, **body)
    assert response.status_code == 200, response.text
    return response.headers["x-tierline-cache"]


async def test_auto_and_the_model_that_it_chose_share_answers(open_door: Open, upstream: MockUpstream) -> None:
    async with open_door() as door:
        fresh = await door.chat("auto")
        assert fresh.headers["x-tierline-cache"] == "miss"
        again = await door.chat("mock")
        assert again.headers["x-tierline-cache"] == "exact"
        assert upstream.requests == 1
        # Both say who answered, not what was asked for, as an answer that is not from the cache does.
        assert again.json()["model"] == fresh.json()["model"] == "mock"
        assert again.headers["x-tierline-model"] == fresh.headers["x-tierline-model"] == "mock"
        assert [row["requested_model"] for row in await door.rows()] == ["auto", "mock"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_from_the_cache_has_an_id_of_its_own_that_leads_to_its_request(
    open_door: Open, stream: bool
) -> None:
    async with open_door() as door:
        fresh = await door.chat()
        again = await door.chat(stream=stream)
        assert again.headers["x-tierline-cache"] == "exact"
        parts = [again.json()] if not stream else [part for part in events(again.text) if part != "[DONE]"]
        (answer_id,) = {part["id"] for part in parts}
        assert answer_id != fresh.json()["id"]
        await door.rows()
        found = await explain(door.services.database, answer_id)
        assert found is not None
        assert (found.request_id, found.rows[0]["outcome"]) == (again.headers["x-request-id"], "cache_hit")


async def test_spelling_out_what_counts_anyway_is_the_same_request(open_door: Open, upstream: MockUpstream) -> None:
    async with open_door({"temperature": 0.0}) as door:
        assert await outcome(door) == "miss"
        for body in (
            {"temperature": 0},
            {"temperature": 0.0, "seed": 7, "top_p": 0.3, "top_k": 5},
            {"max_tokens": 50},
            {"max_completion_tokens": 50},
            {"n": 1, "presence_penalty": 0, "tools": [], "repetition_penalty": 1.0, "ignore_eos": False},
            {"user": "ann", "metadata": {"a": "b"}, "store": False},
            {"stream": True, "stream_options": {"include_usage": True}},
        ):
            assert await outcome(door, **body) == "exact", body
        assert upstream.requests == 1
        for body in ({"max_tokens": 49}, {"repetition_penalty": 1.1}, {"stop": "x"}, {"presence_penalty": 0.1}):
            assert await outcome(door, **body) == "miss", body


async def test_of_another_server_only_the_limit_is_known(open_door: Open) -> None:
    async with open_door() as door:
        assert await outcome(door) == "miss"
        assert await outcome(door, max_tokens=50) == "exact"
        for body in ({"temperature": 0}, {"top_p": 1}, {"top_k": 0}, {"repetition_penalty": 1}):
            assert await outcome(door, **body) == "miss", body


async def test_an_unnamed_temperature_is_the_engines(open_door: Open) -> None:
    """By default the bundled engine draws at temperature 1: its answers differ, so none may stand for the others."""
    async with open_door({}) as door:
        for _ in range(2):
            response = await door.chat()
            headers = response.headers
            assert (headers["x-tierline-cache"], headers["x-tierline-cache-reason"]) == ("bypass", "temperature")
        assert await outcome(door, temperature=0) == "miss"
        assert await outcome(door, temperature=0) == "exact"


async def test_a_policy_may_allow_what_the_engine_draws(open_door: Open) -> None:
    policy = POLICY.replace("mode: exact", "mode: exact, allow_temperature: 1")
    async with open_door({}, policy) as door:
        assert await outcome(door) == "miss"
        assert await outcome(door, temperature=1.0, top_p=1) == "exact"
        assert await outcome(door, temperature=0) == "miss"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hit_costs_what_the_policy_charges(open_door: Open, upstream: MockUpstream, stream: bool) -> None:
    async with open_door(policy=POLICY.replace("mode: exact", "mode: exact, charge: 0.3")) as door:
        token = await key(door, budget_nanousd=10**12)
        fresh, again = [await door.chat(stream=stream, token=token) for _ in range(2)]
        assert [one.headers["x-tierline-cache"] for one in (fresh, again)] == ["miss", "exact"]
        paid, hit = await door.rows()
        assert hit["cost_nanousd"] == paid["cost_nanousd"] * 3 // 10 > 0
        assert hit["cost_nanousd"] + hit["saved_nanousd"] == paid["cost_nanousd"]
        assert again.headers.get("x-tierline-cost-usd") == (None if stream else f"{hit['cost_nanousd'] / 1e9:.9f}")
        assert await settled_and_held(door, token) == (paid["cost_nanousd"] + hit["cost_nanousd"], 0)
        assert upstream.requests == 1


async def test_a_salt_keeps_answers_and_prefix_pages_apart(open_door: Open, upstream: MockUpstream) -> None:
    async with open_door({"temperature": 0.0}) as door:
        assert await outcome(door) == "miss"
        assert await outcome(door, cache_salt="a") == "miss"
        assert await outcome(door, cache_salt="b" * 128) == "miss"
        assert await outcome(door, cache_salt="a") == "exact"
        assert await outcome(door) == "exact"
        sent = [record.body for record in upstream.records]
        salts = [salt_of(body) for body in sent]
        assert len(set(salts)) == 3
        assert all(1 <= len(salt) <= 128 for salt in salts), "the engine takes no longer one"
        assert "a" not in salts, "a client's own salt could be another team's"


async def test_who_waits_for_the_same_question_waits_no_longer_than_its_deadline(
    open_door: Open, upstream: MockUpstream
) -> None:
    async with open_door() as door:
        upstream.override = "hang"
        first = asyncio.create_task(door.chat())
        await upstream.until(lambda: upstream.requests == 1)
        second = await door.chat(headers={"x-tierline-deadline-ms": "200"})
        assert not first.done(), "it waited until the other one had its answer"
        assert (second.status_code, second.json()["error"]["code"]) == (504, "backend_deadline")
        assert upstream.requests == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


def salt_of(body: bytes) -> str:
    salt = json.loads(body)["cache_salt"]
    assert isinstance(salt, str)
    return salt
