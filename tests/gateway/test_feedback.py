"""`POST /v1/feedback` through a real gateway and cache: it evicts and teaches, for the team whose request it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from tests.cache.conftest import Process
from tests.gateway.front_door import FrontDoor, configuration, front_door
from tests.gateway.promised import WAYS, promised


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("cache") / "s")
    process.start()
    yield process
    assert process.end() == 0


async def give(door: FrontDoor, request_id: Any, rating: Any, token: str | None = None, **more: Any) -> httpx.Response:
    body = {"request_id": request_id, "rating": rating, **more}
    return await door.client.post("/v1/feedback", json=body, headers=door.headers(token))


def id_of(response: httpx.Response) -> str:
    return response.headers["x-request-id"]


async def test_a_bad_answer_is_forgotten_by_whoever_got_it(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        question = WAYS[0].format("France")
        fresh = await found.ask(question)
        hit = await found.ask(question)
        assert found.outcomes == ["miss", "exact"]
        kept = await give(found.door, id_of(fresh), "good")
        assert (kept.status_code, kept.json()) == (
            200,
            {"request_id": id_of(fresh), "rating": "good", "evicted": 0, "learned": False},
        )
        assert kept.headers["x-request-id"] != id_of(fresh)
        assert (await found.ask(question)).headers["x-tierline-cache"] == "exact"
        gone = await give(found.door, id_of(hit), "bad")
        assert gone.json()["evicted"] == 1
        assert (await found.ask(question)).headers["x-tierline-cache"] == "miss"
        # Said once more, it concerns nothing any more: the answer that is there now is another one.
        assert (await give(found.door, id_of(hit), "bad")).json()["evicted"] == 0
        assert (await found.ask(question)).headers["x-tierline-cache"] == "exact"


async def test_who_made_the_answer_can_take_it_back(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        fresh = await found.ask(WAYS[0].format("France"))
        assert (await give(found.door, id_of(fresh), "bad")).json()["evicted"] == 1
        assert (await found.ask(WAYS[0].format("France"))).headers["x-tierline-cache"] == "miss"


async def test_a_question_that_became_an_alias_names_the_answer_it_shares(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        await found.ask(WAYS[0].format("France"))
        alias = await found.ask(WAYS[1].format("France"))
        await found.compared(1)
        assert (await give(found.door, id_of(alias), "bad")).json()["evicted"] == 1
        assert await found.ask_all(["France"], WAYS[:2]) == ["miss", "miss"]


async def test_a_hit_in_other_words_teaches_its_promise(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, "judge: exact, promise: serve", process=cache) as found:
        response = await found.ask_until("semantic")
        before = await found.standing()
        assert (await give(found.door, id_of(response), "bad")).json()["evicted"] == 1
        assert (await found.standing()).labels == before.labels + 1
        assert (await give(found.door, id_of(response), "bad")).json()["evicted"] == 0
        assert (await found.standing()).labels == before.labels + 1


async def test_those_who_waited_for_one_answer_may_all_speak(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        found.upstream.override = "mock,delay_ms=300"
        responses = await asyncio.gather(*(found.ask(WAYS[0].format("France")) for _ in range(4)))
        assert found.upstream.requests == 1
        found.upstream.override = None
        waiter = next(one for one in responses if one.headers["x-tierline-cache"] == "exact")
        assert (await give(found.door, id_of(waiter), "bad")).json()["evicted"] == 1


async def test_only_the_team_of_a_request_knows_it(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        response = await found.ask(WAYS[0].format("France"))
        other = await found.door.key(team="others")
        mate = await found.door.key()
        for token, request_id in ((other, id_of(response)), (None, "req-unknown"), (None, "x" * 128)):
            refused = await give(found.door, request_id, "bad", token)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        assert (await found.ask(WAYS[0].format("France"))).headers["x-tierline-cache"] == "exact"
        assert (await give(found.door, id_of(response), "bad", mate)).json()["evicted"] == 1


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"request_id": "a", "rating": "good", "comment": "nice"}, "unknown_parameter", "comment"),
        ({"request_id": "a"}, "missing_required_parameter", "rating"),
        ({"request_id": "a", "rating": "great"}, "invalid_type", "rating"),
        ({"request_id": 1, "rating": "good"}, "invalid_type", "request_id"),
        ({"request_id": "", "rating": "good"}, "invalid_value", "request_id"),
        ({"request_id": "x" * 129, "rating": "good"}, "invalid_value", "request_id"),
        ({"request_id": "a\nb", "rating": "good"}, "invalid_value", "request_id"),
        ([], "invalid_type", None),
    ],
)
async def test_what_is_not_understood_is_refused(door: FrontDoor, body: Any, code: str, param: str | None) -> None:
    response = await door.client.post("/v1/feedback", json=body, headers=door.headers())
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (code, param)


async def test_it_counts_as_a_request(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        token = await found.door.key(requests_per_minute=2)
        response = await found.ask(WAYS[0].format("France"), token=token)
        taken = await give(found.door, id_of(response), "good", token)
        assert taken.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await give(found.door, id_of(response), "good", token)).status_code == 429
        assert found.door.services.queue.running == 0


async def test_a_request_without_an_answer_is_not_known(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=400"
    refused = await door.chat()
    upstream.override = None
    assert refused.status_code == 400
    for request_id in ("req-a", id_of(refused), "chatcmpl-nobody's"):
        response = await give(door, request_id, "bad")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
    assert (await door.client.post("/v1/feedback", json={"request_id": "a", "rating": "bad"})).status_code == 401


async def test_a_cache_that_is_away_cannot_take_it(tmp_path: Path, upstream: MockUpstream) -> None:
    document = {**configuration({"up": upstream}), "cache": {"enabled": True}}
    async with front_door(tmp_path, document) as door:
        response = await give(door, "req-a", "bad")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "cache_unavailable")
        assert door.services.queue.running == 0
