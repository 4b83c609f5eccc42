"""Outcomes in the database: summed, bounded by key and day, weighed by age, counted once. On SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.ledger.database import Database
from gateway.ledger.rows import Note
from gateway.outcomes import store
from gateway.outcomes.store import Outcome
from gateway.outcomes.weighing import MOST_OF_A_KEY, Counted

TODAY = 20_000


def outcome(good: bool = True, **fields: Any) -> Outcome:
    known = {"source": "feedback", "policy": "p", "team": "a", "key_id": "k", "tier": "small", "model": "m"}
    return Outcome(good=good, **{"kinds": {"exam": 1.0}, **known, **fields})


async def test_outcomes_add_up_whoever_brings_them(database: Database) -> None:
    found = [outcome(), outcome(False, kinds={"exam": 0.75, "chat": 0.25}), outcome(model="other", key_id="l")]
    assert await store.add(database, found, TODAY) == 3
    assert await store.add(database, [outcome(), outcome(team="b")], TODAY) == 2
    assert await store.read(database, TODAY) == [
        Counted("feedback", "p", "a", "chat", "small", 0, 0.25),
        Counted("feedback", "p", "a", "exam", "small", 3, 0.75),
        Counted("feedback", "p", "b", "exam", "small", 1, 0),
    ]


async def test_a_key_has_a_share_of_a_day_however_many_bring_its_outcomes(database: Database) -> None:
    flood = [outcome(False)] * 70
    added = await asyncio.gather(*(store.add(database, flood, TODAY) for _ in range(4)))
    assert sum(added) == MOST_OF_A_KEY
    assert await store.add(database, [outcome(False)], TODAY) == 0
    assert await store.add(database, [outcome(False, key_id="other"), outcome(False, source="audit")], TODAY) == 2
    assert await store.add(database, [outcome(False)], TODAY + 1) == 1
    assert [(item.source, item.losses) for item in await store.read(database, TODAY + 1)] == [
        ("audit", 1),
        ("feedback", MOST_OF_A_KEY + 2),
    ]


async def test_age_takes_weight_and_then_the_row(database: Database) -> None:
    await store.add(database, [outcome()] * 8, TODAY)
    weights = [(await store.read(database, TODAY + age)) for age in (0, 6, 7, 29, 30, 89)]
    assert [found[0].wins for found in weights] == [8, 8, 4, 4, 2, 2]
    assert await store.read(database, TODAY + 90) == []
    await store.purge(database, TODAY + 90)
    async with database.read() as connection:
        assert (await connection.execute(store.outcomes.select())).all() == []
        assert (await connection.execute(store.outcome_shares.select())).all() == []


async def test_what_is_noted_counts_once(database: Database) -> None:
    note = Note(id="feedback-r", request_id="r", ts_ms=1, kind="feedback", data={"rating": "good"})
    tries = await asyncio.gather(*(store.add_once(database, note, outcome(), TODAY) for _ in range(5)))
    assert sorted(tries) == [(False, False)] * 4 + [(True, True)]
    (counted,) = await store.read(database, TODAY)
    assert counted.wins == 1


@pytest.mark.parametrize("count", [1, 49, 50, 51, 120])
async def test_many_cells_at_once(database: Database, count: int) -> None:
    found = [outcome(key_id=f"k{i}", kinds={f"kind{i}": 1.0}) for i in range(count)]
    assert await store.add(database, found, TODAY) == count
    assert len(await store.read(database, TODAY)) == count
