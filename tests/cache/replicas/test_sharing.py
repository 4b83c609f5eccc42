"""What one cache process keeps or forgets, every other one does: on a real Redis, between stores of this process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from bench.redis_server import RedisServer
from cache.replicas.notes import Notes
from cache.replicas.pending import Pending
from cache.replicas.records import Retraction, unpack_retraction
from cache.store.changes import Purge
from tests.cache.replicas.conftest import Group, entry, key, until, vector

pytestmark = pytest.mark.redis


async def test_an_answer_is_on_every_replica_within_a_second_with_its_vector_and_questions(group: Group) -> None:
    one, other = await group.member(), await group.member()
    kept = one.put("What is the capital of France?", "Paris", seed=1, tags=("geo",), policy="support")
    started = time.monotonic()
    await until(lambda: other.answer("What is the capital of France?") == "Paris", "the answer to arrive", 1)
    assert time.monotonic() - started < 1
    answer_id = one.store.answer_of(kept.id)
    assert answer_id is not None
    assert one.store.add_alias(key("Which city is France's capital?"), answer_id, vector(2), "ann") is None
    await until(lambda: other.answer("Which city is France's capital?") == "Paris", "the alias to arrive", 1)
    found = other.store.get_exact(key("What is the capital of France?"))
    assert found is not None
    assert found.entry == kept
    near = await other.store.nearest(key("any"), vector(2), 2)
    assert next(one.question for one in near) == "Which city is France's capital?"
    assert near[0].cosine == pytest.approx(1, abs=1e-6)
    assert len(other.store) == 1


async def test_what_is_forgotten_is_forgotten_everywhere(group: Group) -> None:
    one, other = await group.member(), await group.member()
    kept, second = one.put("a", "1"), one.put("b", "2")
    await until(lambda: other.answer("b") == "2", "the answers to arrive")
    answer_id = other.store.answer_of(kept.id)
    assert answer_id is not None
    assert other.store.forget(answer_id)
    await until(lambda: one.answer("a") is None, "one to forget it", 1)
    assert (one.answer("b"), other.answer("b")) == ("2", "2")
    own = one.store.answer_of(second.id)
    assert own is not None
    one.store.add_alias(key("c"), own, None, "ann")
    await until(lambda: other.answer("c") == "2", "the alias to arrive")
    found = other.store.get_exact(key("c"))
    assert found is not None
    assert other.store.forget_question(found.question_id)
    await until(lambda: one.answer("c") is None, "one to forget the question", 1)
    assert (one.answer("b"), other.answer("b")) == ("2", "2")
    third = await group.member()
    await until(lambda: third.answer("b") == "2", "a new member to take what is there")
    assert (third.answer("a"), third.answer("c")) == (None, None)


@pytest.mark.parametrize(
    "purge",
    [
        Purge(scope="team:a"),
        Purge(model="bad"),
        Purge(tag="old"),
        Purge(policy="p"),
        Purge(older_than_s=100),
        Purge(exact=key("gone").exact),
        Purge(entry="req-gone"),
        Purge(scope="team:a", entry="req-gone"),
        Purge(model="bad", tag="old"),
    ],
    ids=lambda purge: "+".join(name for name in purge.__struct_fields__ if getattr(purge, name) is not None),
)
async def test_a_purge_holds_on_every_replica_when_it_returns_and_for_one_that_joins_later(
    group: Group, purge: Purge
) -> None:
    one, other = await group.member(), await group.member()
    now = time.time()
    one.put("gone", "1", id="req-gone", model="bad", tags=("x", "old"), policy="p", created_at=now - 200)
    assert other.store.put(key("stays", scope="team:b"), entry("stays", "2"), None).reason is None
    await until(lambda: other.answer("gone") is not None, "the answers to arrive")
    await until(lambda: one.store.get_exact(key("stays", scope="team:b")) is not None, "the answers to arrive")
    done = await other.replica.purge(purge)
    assert (done.removed, done.confirmed, done.unconfirmed) == (1, 2, [])
    assert (one.answer("gone"), other.answer("gone")) == (None, None)
    later = await group.member()
    await until(lambda: later.store.get_exact(key("stays", scope="team:b")) is not None, "the later one to take it")
    assert later.answer("gone") is None
    # What is kept after it stays, though the purge would have meant it.
    other.put("gone", "new", model="bad", tags=("old",), policy="p", created_at=now - 200)
    await until(lambda: one.answer("gone") == later.answer("gone") == "new", "the new answer to arrive")


@pytest.mark.parametrize("condition", Purge.__struct_fields__)
def test_no_condition_of_a_purge_is_lost_on_its_way(condition: str) -> None:
    """One that is not passed on would forget everything at the others."""
    value: Any = 100.0 if condition == "older_than_s" else "a"
    arrived = unpack_retraction(Retraction.of_purge(Purge(**{condition: value})).packed()).purge()
    assert getattr(arrived, condition) == (pytest.approx(value, abs=10) if condition == "older_than_s" else value)
    assert [name for name in Purge.__struct_fields__ if getattr(arrived, name) is not None] == [condition]


async def test_a_purged_answer_leaves_redis(group: Group) -> None:
    one = await group.member()
    for number in range(100):
        one.put(f"q{number}", model="bad" if number % 2 else "good")
    await until(lambda: one.replica.stats().published == 100, "all to be published")
    await one.replica.purge(Purge(model="bad"))
    async with redis.asyncio.Redis.from_url(group.url) as client:
        deadline = time.monotonic() + 10
        while await client.zcard(f"{group.prefix}:ends") > 50:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert len(await client.keys(f"{group.prefix}:answer:*")) == 50
        assert len(await client.keys(f"{group.prefix}:exact:*")) == 50
        sizes = await client.hvals(f"{group.prefix}:sizes")
        assert sum(map(int, sizes)) == int(await client.get(f"{group.prefix}:bytes"))


async def test_an_answer_given_before_a_purge_and_published_after_it_is_dead_everywhere(group: Group) -> None:
    one, other = await group.member(), await group.member()
    # Nothing is awaited in between: the other does not know of the purge when it keeps its answer.
    purging = asyncio.create_task(one.replica.purge(Purge()))
    await asyncio.sleep(0)
    late = other.put("late", "old")
    assert (await purging).unconfirmed == []
    await until(lambda: other.replica.stats().waiting == 0, "everything to be told")
    await asyncio.sleep(0.05)
    for member in (one, other):
        found = member.answer("late")
        # Whoever has it kept it after it had followed the purge; never one alone without Redis knowing of it.
        assert found in (None, "old")
    third = await group.member()
    await asyncio.sleep(0.2)
    if one.store.answer_of(late.id) is None:
        assert third.store.answer_of(late.id) is None


async def test_of_two_answers_to_one_question_one_wins_on_all(group: Group) -> None:
    one, other = await group.member(), await group.member()
    one.put("same", "1")
    other.put("same", "2")
    await until(lambda: one.replica.stats().waiting + other.replica.stats().waiting == 0, "both to be told")
    await until(lambda: one.answer("same") == other.answer("same"), "them to agree")
    async with redis.asyncio.Redis.from_url(group.url) as client:
        assert await client.zcard(f"{group.prefix}:ends") == 1


async def test_redis_keeps_to_its_bytes_and_to_the_time_of_each_answer(group: Group) -> None:
    one = await group.member(most_bytes=100_000)
    for number in range(200):
        one.put(f"q{number}", "x" * 1000, expires_at=time.time() + 3600 + number)
    await until(lambda: one.replica.stats().waiting == 0, "all to be published")
    one.put("short", "x", expires_at=time.time() + 0.6)
    one.put("large", "x" * 50_000)
    await until(lambda: one.replica.stats().refused == 1, "the large one to be refused")
    async with redis.asyncio.Redis.from_url(group.url) as client:
        assert int(await client.get(f"{group.prefix}:bytes")) <= 100_000
        assert 20 < await client.zcard(f"{group.prefix}:ends") < 100
        ids = await client.zrange(f"{group.prefix}:ends", 0, -1)
        newest = one.store.get_exact(key("q199"))
        assert newest is not None
        assert newest.entry.id.encode() in ids, "what was put first goes first"
        short = one.store.get_exact(key("short"))
        assert short is not None
        ttl_ms = await client.pttl(f"{group.prefix}:answer:{short.entry.id}")
        assert 0 < ttl_ms <= 600
    assert one.answer("large") is not None, "it stays where it was kept"


async def test_answers_sealed_by_another_key_are_not_taken_and_vectors_of_another_embedder_neither(
    group: Group,
) -> None:
    class Xor:
        def __init__(self, key: int) -> None:
            self._key = key

        def seal(self, value: bytes, bound_to: bytes) -> bytes:
            return bytes([self._key, *(byte ^ self._key for byte in value)])

        def unseal(self, sealed: bytes, bound_to: bytes) -> bytes:
            if sealed[0] != self._key:
                raise ValueError("another key")
            return bytes(byte ^ self._key for byte in sealed[1:])

    one, same = await group.member(sealing=Xor(7)), await group.member(sealing=Xor(7))
    other = await group.member(sealing=Xor(9))
    foreign = await group.member(sealing=Xor(7), embedder="another model")
    one.put("secret words", "secret answer", seed=1)
    await until(lambda: same.answer("secret words") is not None, "the answer to arrive")
    await until(lambda: other.replica.stats().unreadable == 1, "the other one to see it")
    await asyncio.sleep(0.05)
    assert other.answer("secret words") is None
    assert foreign.answer("secret words") == "secret answer"
    assert (same.store.size().vectors, foreign.store.size().vectors) == (1, 0)
    async with redis.asyncio.Redis.from_url(group.url) as client:
        for name in await client.keys(f"{group.prefix}:answer:*"):
            assert b"secret" not in b"".join((await client.hgetall(name)).values())
    assert (await other.replica.purge(Purge())).unconfirmed == []
    assert one.answer("secret words") is None


async def test_a_member_that_starts_takes_what_is_there_but_fills_no_more_than_its_room(group: Group) -> None:
    one = await group.member()
    for number in range(500):
        one.put(f"q{number}")
    await until(lambda: one.replica.stats().waiting == 0, "all to be published")
    large, small = await group.member(), await group.member(max_entries=100)
    await until(lambda: len(large.store) == 500, "it to take all")
    await until(lambda: len(small.store) > 90, "it to fill up")
    await asyncio.sleep(0.05)
    assert small.store.size().evictions == 0


async def test_answers_that_wait_are_bounded(group: Group) -> None:
    one = await group.member(start=False, pending=Pending(most=10))
    for number in range(30):
        one.put(f"q{number}")
    assert (one.replica.stats().waiting, one.replica.stats().dropped) == (10, 20)
    other = await group.member()
    one.start()
    await until(lambda: other.answer("q29") is not None, "the latest to arrive")
    assert len(other.store) == 10


async def test_a_stop_tells_what_is_left_and_says_goodbye(group: Group) -> None:
    one, other = await group.member(), await group.member()
    await until(lambda: other.replica.stats().replicas == 2, "both to be known")
    one.put("last words", "bye")
    await one.stop()
    await until(lambda: other.answer("last words") == "bye", "the answer to arrive")
    done = await other.replica.purge(Purge())
    assert (done.confirmed, done.unconfirmed) == (1, [])


async def test_retractions_survive_the_end_of_the_process(group: Group, tmp_path: Path) -> None:
    """Redis is away when it forgets, and it is killed before Redis is back."""
    other = await group.member()
    kept = other.put("a", "1")
    other.put("b", "2", model="bad")
    await until(lambda: other.replica.stats().waiting == 0, "it to be published")
    one = await group.member(tmp_path, start=False)
    one.store.put(key("a"), kept, None)
    answer_id = one.store.answer_of(kept.id)
    assert answer_id is not None
    one.store.forget(answer_id)
    await one.replica.purge(Purge(model="bad"))
    one.notes.close()
    again = await group.member(tmp_path)
    assert again.notes.name == one.notes.name
    await until(lambda: other.answer("a") is other.answer("b") is None, "the other to follow", 2)


def test_a_damaged_file_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "replicas.db").write_bytes(b"not a database at all, " * 100)
    notes = Notes(tmp_path)
    assert notes.known == 0
    assert len(list(tmp_path.glob("replicas.damaged-*"))) == 1
    notes.close()
    assert (tmp_path / "replicas.db").stat().st_mode & 0o077 == 0


async def test_a_url_that_makes_no_sense_is_refused_at_once() -> None:
    from cache.replicas.link import Link

    with pytest.raises(ValueError):
        Link("http://localhost")


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url
