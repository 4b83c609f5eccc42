"""`tier: auto` learns from what answers came to: ratings teach the table of their policy, in every process, once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from bench.mock_upstream import MockUpstream
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import notes
from gateway.outcomes import service, store
from gateway.outcomes.service import SHIPPED, Outcomes
from gateway.outcomes.store import DAY_MS
from gateway.telemetry import Metrics
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tests.gateway.test_outcomes_store import outcome
from tiers.success import default_table

AUTO = """\
version: 1
name: default
owner: tests
routes: [{tier: auto, quality_target: 0.6}]
cache: {mode: "off"}
"""
QUESTION = "Classify the sentiment of this review as positive or negative: I loved it."


@pytest.fixture
def models(upstream: MockUpstream) -> dict[str, Any]:
    return {tier: {"tier": tier, "backend": "up", "price": PRICE} for tier in ("small", "medium", "large", "xlarge")}


@asynccontextmanager
async def auto(root: Path, upstream: MockUpstream, models: dict[str, Any], more: str = "") -> AsyncIterator[FrontDoor]:
    async with front_door(root, configuration({"up": upstream}, models), policy=AUTO + more) as door:
        yield door


async def ask(door: FrontDoor, text: str = QUESTION, **more: Any) -> httpx.Response:
    response = await door.chat("auto", messages=[{"role": "user", "content": text}], **more)
    assert response.status_code == 200, response.text
    return response


async def rate(door: FrontDoor, named: str, rating: str, token: str | None = None) -> dict[str, Any]:
    body = {"request_id": named, "rating": rating}
    response = await door.client.post("/v1/feedback", json=body, headers=door.headers(token))
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_bad_ratings_send_the_kind_to_a_larger_tier(
    tmp_path: Path, upstream: MockUpstream, models: dict[str, Any]
) -> None:
    async with auto(tmp_path, upstream, models) as door:
        first = await ask(door)
        assert first.headers["x-tierline-tier"] == "small"
        assert (first.headers["x-tierline-task"], first.headers["x-tierline-reason"]) == (
            "classification",
            "auto_target",
        )
        before = float(first.headers["x-tierline-p"])
        for _ in range(60):
            said = await rate(door, (await ask(door)).headers["x-request-id"], "bad")
            assert (said["learned"], said["evicted"]) == (True, 0)
        await door.services.outcomes.refresh()
        after = await ask(door)
        assert after.headers["x-tierline-tier"] != "small"
        table = door.services.outcomes.table("default")
        assert table.kind("label_text", "small").mean < before - 0.2
        other = await ask(door, "Hi, how are you today?")
        assert other.headers["x-tierline-task"] == "chat"
        # What was learnt outlives the process.
    async with auto(tmp_path, upstream, models) as door:
        assert (await ask(door)).headers["x-tierline-tier"] == after.headers["x-tierline-tier"]


LOUD = AUTO.replace("name: default", "name: loud\napplies_to: {teams: [loud]}")


async def test_ratings_of_one_team_leave_the_choice_of_other_policies_alone(
    tmp_path: Path, upstream: MockUpstream, models: dict[str, Any]
) -> None:
    """Two keys of a team send a kind up in their policy; nobody else notices before another team agrees."""
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "loud.yaml").write_text(LOUD)
    async with auto(tmp_path, upstream, models) as door:
        outcomes = door.services.outcomes
        keys = [await door.key(team="loud"), await door.key(team="loud")]
        calm = await door.key(team="calm")
        headers = ("x-tierline-tier", "x-tierline-p", "x-tierline-reason")

        async def seen(token: str) -> list[str]:
            await outcomes.refresh()
            answer = await ask(door, token=token)
            return [answer.headers[name] for name in headers]

        before, tiers = await seen(calm), set()
        for number in range(40):
            answer = await ask(door, token=keys[number % 2])
            assert answer.headers["x-tierline-policy"].startswith("loud@")
            tiers.add(answer.headers["x-tierline-tier"])
            assert (await rate(door, answer.headers["x-request-id"], "bad", keys[0]))["learned"]
            if number % 10 == 9:
                assert await seen(calm) == before
        assert len(tiers) > 1
        small = [outcome(False, policy="loud", team="2", kinds={"label_text": 1.0}, tier="small")] * 16
        await store.add(door.services.database, small, now_ms() // DAY_MS)
        assert float((await seen(calm))[1]) < float(before[1])


async def test_a_rating_counts_once_by_any_name_and_is_on_record(
    tmp_path: Path, upstream: MockUpstream, models: dict[str, Any]
) -> None:
    async with auto(tmp_path, upstream, models) as door:
        answer = await ask(door)
        request_id, answer_id = answer.headers["x-request-id"], answer.json()["id"]
        mate = await door.key()
        assert (await rate(door, answer_id, "good", mate))["learned"]
        for named, rating in ((request_id, "good"), (answer_id, "bad")):
            said = await rate(door, named, rating)
            assert (said["request_id"], said["learned"]) == (request_id, False)
        async with door.services.database.read() as connection:
            found = (await connection.execute(select(notes.c.request_id, notes.c.kind, notes.c.json))).all()
        assert found == [(request_id, "feedback", '{"rating":"good"}')]
        page = (await door.client.get("/metrics")).text
        assert 'tierline_outcomes_total{outcome="good",source="feedback"} 1.0' in page
        (counted,) = await store.read(door.services.database, now_ms() // DAY_MS)
        assert (counted.policy, counted.kind, counted.tier, counted.losses) == ("default", "label_text", "small", 0)
        stranger = await door.key(team="others")
        body = {"request_id": request_id, "rating": "bad"}
        refused = await door.client.post("/v1/feedback", json=body, headers=door.headers(stranger))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")


async def test_where_learning_is_off_a_rating_is_noted_and_teaches_nothing(
    tmp_path: Path, upstream: MockUpstream, models: dict[str, Any]
) -> None:
    async with auto(tmp_path, upstream, models, "learn: off\n") as door:
        for _ in range(30):
            assert not (await rate(door, (await ask(door)).headers["x-request-id"], "bad"))["learned"]
        await store.add(door.services.database, [outcome(False, kinds={"label_text": 1.0})] * 90, now_ms() // DAY_MS)
        await door.services.outcomes.refresh()
        assert (await ask(door)).headers["x-tierline-tier"] == "small"
        policy = door.services.policies.current.named("default")
        assert door.services.outcomes.table_for(policy) == (default_table(), SHIPPED)


async def test_nothing_is_learnt_of_what_nobody_knows(
    tmp_path: Path, upstream: MockUpstream, models: dict[str, Any]
) -> None:
    async with auto(tmp_path, upstream, models) as door:
        answer = await ask(door, "zxqv wkjh qqpl mnbvc drtzu")
        assert answer.headers["x-tierline-reason"] == "auto_unknown"
        assert "x-tierline-p" not in answer.headers
        assert not (await rate(door, answer.headers["x-request-id"], "bad"))["learned"]


async def test_a_database_that_is_away_is_said_and_outcomes_wait(
    tmp_path: Path, upstream: MockUpstream, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with auto(tmp_path, upstream, models) as door:
        outcomes = door.services.outcomes
        answer = await ask(door)

        def away(*_: Any) -> Any:
            raise OperationalError("", {}, OSError("gone"))

        with monkeypatch.context() as broken:
            broken.setattr(door.services.database, "read", away)
            broken.setattr(door.services.database, "write", away)
            body = {"request_id": answer.headers["x-request-id"], "rating": "bad"}
            refused = await door.client.post("/v1/feedback", json=body, headers=door.headers())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
            outcomes.take(outcome(False, kinds={"label_text": 1.0}))
            with pytest.raises(OperationalError):
                await outcomes.refresh()
            assert (await ask(door)).headers["x-tierline-tier"] == "small"
        await outcomes.refresh()
        (counted,) = await store.read(door.services.database, now_ms() // DAY_MS)
        assert counted.losses == 1
        assert (await rate(door, answer.headers["x-request-id"], "bad"))["learned"]


async def test_memory_is_bounded(tmp_path: Path, door: FrontDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST_WAITING", 3)
    metrics = Metrics()
    outcomes = Outcomes(door.services.database, metrics)
    for number in range(5):
        outcomes.take(outcome(key_id=f"k{number}"))
    await outcomes.refresh()
    (counted,) = await store.read(door.services.database, now_ms() // DAY_MS)
    assert counted.wins == 3
