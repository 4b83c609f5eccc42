"""The store of kept answers by itself, on SQLite and on PostgreSQL: conversations, their end, and what it bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from sqlalchemy import func, select

from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import responses
from gateway.responses.store import Body, ConversationGone, Kept, ResponseStore, StoreUnavailable
from gateway.settings import ResponsesSettings

DAY_MS = 86_400_000


@pytest_asyncio.fixture
async def store(database: Database) -> AsyncIterator[ResponseStore]:
    made = ResponseStore(database, ResponsesSettings(keep_days=30, max_bytes=1 << 20))
    made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def untidied(database: Database) -> AsyncIterator[ResponseStore]:
    """A store that deletes nothing by itself."""
    made = ResponseStore(database, ResponsesSettings(keep_days=30, max_bytes=1 << 20))
    writing = asyncio.create_task(made._write())
    yield made
    writing.cancel()


def answer(id: str, previous: Kept | None = None, *, age_days: float = 0, project: str = "p", size: int = 100) -> Kept:
    body = msgspec.json.encode(Body({"id": id, "output": [], "pad": "x" * size}, [{"text": f"to {id}\x00"}]))
    return Kept(
        id=id, conversation_id=previous.conversation_id if previous else id, previous_id=previous and previous.id,
        project_id=project, created_ms=int(now_ms() - age_days * DAY_MS), body_bytes=len(body),
        total_bytes=len(body) + (previous.total_bytes if previous else 0), total_items=1, body=body,
    )  # fmt: skip


async def put(store: ResponseStore, id: str, previous: Kept | None = None, **options: Any) -> Kept:
    kept = answer(id, previous, **options)
    await store.put(kept)
    return kept


async def ids(store: ResponseStore) -> set[str]:
    async with store._database.read() as connection:
        return set((await connection.execute(select(responses.c.id))).scalars())


async def test_it_comes_back_as_it_went_in(store: ResponseStore) -> None:
    kept = await put(store, "a")
    assert await store.get("p", "a") == kept
    assert kept.read().input == [{"text": "to a\x00"}]
    assert await store.get("q", "a") is None
    assert await store.get("p", "b") is None


async def test_a_conversation_is_the_way_to_an_answer(store: ResponseStore) -> None:
    a = await put(store, "a")
    b = await put(store, "b", a)
    await put(store, "other", a)
    c = await put(store, "c", b)
    await put(store, "later", c)
    assert [body.response["id"] for body in await store.conversation(c)] == ["a", "b", "c"]
    assert [body.response["id"] for body in await store.conversation(a)] == ["a"]


async def test_a_hole_is_named(store: ResponseStore) -> None:
    a = await put(store, "a")
    b = await put(store, "b", a)
    c = await put(store, "c", b)
    assert not await store.remove("q", "a")
    assert await store.remove("p", "a")
    assert not await store.remove("p", "a")
    with pytest.raises(ConversationGone) as gone:
        await store.conversation(c)
    assert gone.value.id == "a"
    await store.remove("p", "c")
    with pytest.raises(ConversationGone) as gone:
        await store.conversation(c)
    assert gone.value.id == "c"


async def test_a_conversation_lives_as_long_as_its_last_turn(untidied: ResponseStore) -> None:
    store = untidied
    old = await put(store, "old", age_days=31)
    await put(store, "old-2", old, age_days=30.5)
    lively = await put(store, "lively", age_days=40)
    await put(store, "lively-2", lively, age_days=29)
    await put(store, "fork", lively, age_days=35)
    assert await store.purge() == 2
    assert await ids(store) == {"lively", "lively-2", "fork"}
    assert await store.purge() == 0


async def test_more_conversations_than_one_transaction_takes_expire(untidied: ResponseStore) -> None:
    store = untidied
    await asyncio.gather(*(put(store, f"old-{i}", age_days=31) for i in range(250)), put(store, "new"))
    assert await store.purge() == 250
    assert await ids(store) == {"new"}


async def test_those_that_have_rested_longest_make_room(untidied: ResponseStore) -> None:
    store = untidied
    quarter = 1 << 18
    first = await put(store, "first", age_days=9, size=quarter)
    await put(store, "second", age_days=8, size=quarter)
    await put(store, "third", age_days=7, size=quarter)
    await put(store, "first-2", first, age_days=1, size=quarter)  # so its conversation is the youngest
    await put(store, "small", age_days=6)
    assert await store.purge() == 1
    assert await ids(store) == {"first", "first-2", "third", "small"}
    await put(store, "huge", size=5 * quarter)  # alone too much: even the youngest goes
    assert await store.purge() == 5
    assert await ids(store) == set()


async def test_it_makes_room_by_itself_when_much_came_in(database: Database) -> None:
    store = ResponseStore(database, ResponsesSettings(max_bytes=1 << 20))
    store.start()
    await asyncio.sleep(0)
    for i in range(12):
        await put(store, f"a{i}", size=1 << 17)
    total = select(func.sum(responses.c.body_bytes))
    async with asyncio.timeout(20):
        while True:
            async with database.read() as connection:
                if int(await connection.scalar(total) or 0) <= 1 << 20:
                    break
            await asyncio.sleep(0.02)
    await store.stop()


async def test_many_at_once_share_transactions(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = 0
    insert = store._insert

    async def counted(rows: Any) -> None:
        nonlocal transactions
        transactions += 1
        await insert(rows)

    monkeypatch.setattr(store, "_insert", counted)
    await asyncio.gather(*(put(store, f"a{i}") for i in range(100)))
    assert len(await ids(store)) == 100
    assert transactions < 50


async def test_who_gives_up_waiting_leaves_nothing(store: ResponseStore) -> None:
    """A client that left before its answer was written: it is not written later."""
    waiting = asyncio.create_task(put(store, "left"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await put(store, "next")
    assert await ids(store) == {"next"}


async def test_a_refusal_reaches_everybody_who_waits_and_nobody_after(store: ResponseStore) -> None:
    await put(store, "a")
    results = await asyncio.gather(put(store, "a"), put(store, "b"), return_exceptions=True)  # the id is taken
    assert all(isinstance(result, StoreUnavailable) for result in results)
    assert "to a" not in str(results[0])
    await put(store, "c")
    assert await ids(store) == {"a", "c"}


async def test_nothing_is_kept_for_no_days(database: Database) -> None:
    store = ResponseStore(database, ResponsesSettings(keep_days=0))
    assert not store.enabled
    store.start()
    await put(store, "a")
    await store.purge()
    assert await ids(store) == set()
    await store.stop()
