"""What clients say about the cache, through a whole gateway: never laxer than the policy, and always with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.cached_door import EXACT, cached_door
from tests.gateway.front_door import FrontDoor

CACHE, REASON = "x-tierline-cache", "x-tierline-cache-reason"


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream, answer_cache: Path) -> AsyncIterator[FrontDoor]:
    async with cached_door(tmp_path, upstream, answer_cache) as running:
        yield running


async def ask(door: FrontDoor, text: str = "Hello there", **headers: str) -> httpx.Response:
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    return await door.chat(headers=lines, messages=[{"role": "user", "content": text}])


async def test_a_hit_says_how_old_it_is(door: FrontDoor) -> None:
    fresh, again = await ask(door), await ask(door)
    assert (fresh.headers[CACHE], again.headers[CACHE]) == ("miss", "exact")
    assert "age" not in fresh.headers, "nothing but a cache's answer has one"
    assert int(again.headers["age"]) in range(60)
    assert fresh.headers["cache-control"] == again.headers["cache-control"] == "no-store", "nobody between may keep it"


@pytest.mark.parametrize("header", ["cache_control", "x_tierline_cache"])
async def test_no_cache_asks_anew_and_keeps_the_answer(door: FrontDoor, upstream: MockUpstream, header: str) -> None:
    await ask(door)
    fresh = await ask(door, **{header: "no-cache"})
    assert (fresh.headers[CACHE], fresh.headers[REASON]) == ("bypass", "no-cache")
    assert upstream.requests == 2
    async with asyncio.timeout(20):  # it is kept after its client has it
        while (await ask(door)).headers["x-tierline-cache-entry"] != fresh.headers["x-request-id"]:
            pass


@pytest.mark.parametrize("header", ["cache_control", "x_tierline_cache"])
async def test_no_store_keeps_nothing(door: FrontDoor, upstream: MockUpstream, header: str) -> None:
    assert (await ask(door, **{header: "no-store"})).headers[CACHE] == "miss"
    assert (await ask(door)).headers[CACHE] == "miss"
    assert (await ask(door)).headers[CACHE] == "exact"
    assert (await ask(door, **{header: "no-store"})).headers[CACHE] == "exact", "what is kept already may be read"
    assert upstream.requests == 2


async def test_requests_that_keep_nothing_do_not_wait_for_each_other(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "hang"
    running = [asyncio.create_task(ask(door, cache_control="no-store")) for _ in range(3)]
    await upstream.until(lambda: upstream.requests == 3)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@pytest.mark.parametrize("header", ["cache_control", "x_tierline_cache"])
async def test_max_age_bounds_how_old_an_answer_may_be(door: FrontDoor, header: str) -> None:
    await ask(door)
    assert (await ask(door, **{header: "max-age=3600"})).headers[CACHE] == "exact"
    await asyncio.sleep(1.01)
    old = await ask(door, **{header: "max-age=1"})
    assert old.headers[CACHE] == "miss"
    assert (await ask(door, **{header: "max-age=1"})).headers[CACHE] == "exact", "the fresh one was kept"
    none = await ask(door, **{header: "max-age=0"})
    assert (none.headers[CACHE], none.headers[REASON]) == ("bypass", "max-age")


async def test_max_age_never_lengthens_what_the_policy_allows(
    tmp_path: Path, upstream: MockUpstream, answer_cache: Path
) -> None:
    policy = EXACT.replace("mode: exact", "mode: exact, ttl: 1s")
    async with cached_door(tmp_path, upstream, answer_cache, policy=policy) as door:
        await ask(door)
        assert (await ask(door, cache_control="max-age=3600")).headers[CACHE] == "exact"
        await asyncio.sleep(1.01)
        assert (await ask(door, cache_control="max-age=3600, max-stale=3600")).headers[CACHE] == "miss"


async def test_who_waits_for_another_gets_no_older_answer_than_it_may(door: FrontDoor, upstream: MockUpstream) -> None:
    """The one that others wait for may find an answer that is too old for them."""
    await ask(door)
    await asyncio.sleep(1.01)
    lax, strict = await asyncio.gather(ask(door), ask(door, cache_control="max-age=1"))
    assert lax.headers[CACHE] == "exact"
    assert strict.headers[CACHE] == "miss"
    assert upstream.requests == 2


@pytest.mark.parametrize("header", ["cache_control", "x_tierline_cache"])
async def test_only_if_cached_asks_no_model(door: FrontDoor, upstream: MockUpstream, header: str) -> None:
    refused = await ask(door, **{header: "only-if-cached"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "not_in_cache")
    assert (refused.headers[CACHE], refused.headers[REASON]) == ("miss", "no_entry")
    assert upstream.requests == 0
    await ask(door)
    assert (await ask(door, **{header: "only-if-cached"})).headers[CACHE] == "exact"
    personal = await ask(door, "What is my name?", **{header: "only-if-cached"})
    assert (personal.status_code, personal.headers[REASON]) == (504, "personal")


async def test_words_of_others_mean_nothing_in_cache_control_and_are_refused_in_ours(door: FrontDoor) -> None:
    await ask(door)
    assert (await ask(door, cache_control="no-transform, private, max-stale, x=y")).headers[CACHE] == "exact"
    refused = await ask(door, x_tierline_cache="no-transform")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_cache_directive")


async def test_a_client_cannot_be_laxer_than_the_policy(
    tmp_path: Path, upstream: MockUpstream, answer_cache: Path
) -> None:
    async with cached_door(
        tmp_path, upstream, answer_cache, policy=EXACT.replace("mode: exact", "mode: 'off'")
    ) as door:
        await ask(door)
        again = await ask(door, cache_control="max-age=3600, only-if-cached=0, public")
        assert (again.status_code, again.headers[CACHE], again.headers[REASON]) == (504, "bypass", "policy")


@pytest.mark.parametrize(
    ("route", "body", "kind"),
    [
        ("completions", {"prompt": "Hello"}, "chat"),
        ("embeddings", {"input": "Hello"}, "embedding"),
        ("rerank", {"query": "a", "documents": ["b"]}, "rerank"),
    ],
)
async def test_routes_that_are_not_cached_say_so(
    tmp_path: Path,
    upstream: MockUpstream,
    answer_cache: Path,
    route: str,
    body: dict[str, object],
    kind: str,
) -> None:
    models = {"mock": {"tier": "small"} if kind == "chat" else {"kind": kind}}
    async with cached_door(tmp_path, upstream, answer_cache, models=models) as door:
        for _ in range(2):
            answer = await door.client.post(f"/v1/{route}", json={"model": "mock", **body}, headers=door.headers())
            assert answer.status_code == 200, answer.text
            assert (answer.headers[CACHE], answer.headers[REASON]) == ("bypass", route)
        headers = {**door.headers(), "cache-control": "only-if-cached"}
        refused = await door.client.post(f"/v1/{route}", json={"model": "mock", **body}, headers=headers)
        assert (refused.status_code, refused.headers[REASON]) == (504, route)
        assert upstream.requests == 2
