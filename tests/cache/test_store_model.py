"""The store beside a plain model of it, through any sequence of changes, restarts and failing disks."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.entry import Entry
from cache.key import CacheKey, build_key
from cache.store.answers import MAX_ALIASES_OF_AUTHOR, Store
from cache.store.changes import Purge, Vector
from cache.store.found import Near

DIMENSION = 8
SCOPES, TEXTS, MODELS, TAGS, POLICIES = ("team:1", "team:2"), range(6), ("m1", "m2"), ("t1", "t2"), ("p1", "p2")
_Result = TypeVar("_Result")

scopes, texts, models, policies = (st.sampled_from(values) for values in (SCOPES, TEXTS, MODELS, POLICIES))
tags = st.lists(st.sampled_from(TAGS), max_size=2, unique=True).map(tuple)


@dataclass
class Answer:
    """What the model knows of an answer: its entry, scope, and the texts it answers, its own first."""

    entry: Entry
    scope: str
    own: int
    aliases: dict[int, str] = field(default_factory=dict)
    fuzzy: set[int] = field(default_factory=set)

    @property
    def texts(self) -> set[int]:
        return {self.own, *self.aliases}


def key_of(scope: str, text: int) -> CacheKey:
    payload = {"messages": [{"role": "user", "content": f"question {text}"}]}
    return build_key(payload, scope=scope, model_group="m")


def vector_of(text: int) -> Vector:
    vector = np.random.default_rng(text).normal(size=DIMENSION).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


class StoreMachine(RuleBasedStateMachine):
    """Nothing is evicted here; every answer must therefore be found, byte for byte, until it is told to go."""

    folder: Path | None = None
    keys: tuple[bytes, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 1_000_000.0
        self.model: dict[int, Answer] = {}
        self.number = 0
        self.holding: sqlite3.Connection | None = None
        self.unsettled: list[tuple[asyncio.Future[int], int]] = []
        self.directory = Path(tempfile.mkdtemp()) if self.folder is not None else None
        self.store = self.opened()

    def opened(self) -> Store:
        return Store(
            self.directory,
            "f",
            max_entries=10_000,
            max_bytes=1 << 26,
            keys=self.keys,
            clock=lambda: self.now,
        )

    def run(self, work: Awaitable[_Result]) -> _Result:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.release()
        self.store.close()
        self.loop.close()
        if self.directory is not None:
            shutil.rmtree(self.directory)

    def holder(self, scope: str, text: int) -> int | None:
        return next((id for id, one in self.model.items() if one.scope == scope and text in one.texts), None)

    def make_way(self, scope: str, text: int) -> None:
        id = self.holder(scope, text)
        if id is None:
            return
        if self.model[id].own == text:
            del self.model[id]
        else:
            del self.model[id].aliases[text]
            self.model[id].fuzzy.discard(text)

    @rule(
        scope=scopes, text=texts, model=models, tags=tags, policy=policies, ttl=st.integers(1, 50), fuzzy=st.booleans()
    )
    def put(self, scope: str, text: int, model: str, tags: tuple[str, ...], policy: str, ttl: int, fuzzy: bool) -> None:
        self.number += 1
        entry = Entry(
            f"request {self.number}", b"%d" % self.number * 50, model, "small", 1, 1, self.number, self.now,
            self.now + ttl, f"question {text}", tags, policy,
        )  # fmt: skip
        kept = self.store.put(key_of(scope, text), entry, vector_of(text) if fuzzy else None, "author")
        assert kept.answer_id is not None
        self.make_way(scope, text)
        self.model[kept.answer_id] = Answer(entry, scope, text, fuzzy={text} if fuzzy else set())

    @precondition(lambda self: self.model)
    @rule(data=st.data(), scope=scopes, text=texts, author=st.sampled_from("ab"), fuzzy=st.booleans())
    def add_alias(self, data: st.DataObject, scope: str, text: int, author: str, fuzzy: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.model)))
        answer = self.model[id]
        reason = self.store.add_alias(key_of(scope, text), id, vector_of(text) if fuzzy else None, author)
        if scope != answer.scope or answer.entry.expires_at <= self.now:
            assert reason == "unknown_answer"
        elif text in answer.texts:
            assert reason is None
        elif list(answer.aliases.values()).count(author) >= MAX_ALIASES_OF_AUTHOR:
            assert reason == "too_many_questions"
        else:
            assert reason is None
            self.make_way(scope, text)
            answer.aliases[text] = author
            if fuzzy:
                answer.fuzzy.add(text)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from([0, *sorted(self.model)]))
        assert self.store.forget(id) == (self.model.pop(id, None) is not None)

    @rule(scope=scopes, text=texts)
    def forget_question(self, scope: str, text: int) -> None:
        found = self.store.get_exact(key_of(scope, text))
        if found is not None:
            assert self.store.forget_question(found.question_id)
            assert not self.store.forget_question(found.question_id)
            self.make_way(scope, text)

    @rule(
        scope=st.none() | scopes, model=st.none() | models, tag=st.none() | st.sampled_from(TAGS),
        policy=st.none() | policies, older=st.none() | st.integers(0, 40), text=st.none() | texts,
    )  # fmt: skip
    def purge(
        self, scope: str | None, model: str | None, tag: str | None, policy: str | None, older: int | None,
        text: int | None,
    ) -> None:  # fmt: skip
        exact = None if text is None else key_of("team:1", text)
        purge = Purge(
            scope=scope, model=model, tag=tag, policy=policy, older_than_s=older,
            exact=None if exact is None else exact.exact,
        )  # fmt: skip
        doomed = {
            id
            for id, one in self.model.items()
            if (scope is None or one.scope == scope)
            and (model is None or one.entry.model == model)
            and (tag is None or tag in one.entry.tags)
            and (policy is None or one.entry.policy == policy)
            and (older is None or one.entry.created_at <= self.now - older)
            and (text is None or (one.scope == "team:1" and text in one.texts))
        }
        self.settle(self.store.purge(purge), len(doomed))
        for id in doomed:
            del self.model[id]

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        dead = [id for id, one in self.model.items() if one.entry.expires_at <= self.now]
        self.settle(self.store.expire(), len(dead))
        for id in dead:
            del self.model[id]

    @precondition(lambda self: self.folder is not None and self.holding is None)
    @rule()
    def hold_the_writer(self) -> None:
        """Nothing gets into the file from here on: another program has it locked."""
        assert self.directory is not None
        self.holding = sqlite3.connect(self.directory / "answers.db", isolation_level=None)
        self.holding.execute("BEGIN IMMEDIATE")

    @precondition(lambda self: self.holding is not None)
    @rule()
    def let_the_writer_go(self) -> None:
        self.release()

    def release(self) -> None:
        if self.holding is not None:
            self.holding.execute("ROLLBACK")
            self.holding.close()
            self.holding = None
        for task, removed in self.unsettled:
            assert self.run(task) == removed
        self.unsettled.clear()

    def settle(self, work: Coroutine[Any, Any, int], removed: int) -> None:
        """A change that tells how many answers it removed, now or when the file can be written again."""
        self.unsettled.append((self.loop.create_task(work), removed))
        self.run(asyncio.sleep(0))
        if self.holding is None:
            self.release()

    @rule()
    def flush(self) -> None:
        self.release()
        self.run(self.store.flush())
        size = self.store.size()
        assert size.answers == len(self.model)
        assert size.questions == sum(len(one.texts) for one in self.model.values())

    @precondition(lambda self: self.folder is not None)
    @rule()
    def reopen(self) -> None:
        self.release()
        self.store.close()
        self.store = self.opened()

    @invariant()
    def everything_is_as_it_was_told(self) -> None:
        for scope in SCOPES:
            for text in TEXTS:
                id = self.holder(scope, text)
                found = self.store.get_exact(key_of(scope, text))
                if id is None or self.model[id].entry.expires_at <= self.now:
                    assert found is None
                    continue
                assert found is not None
                assert (found.answer_id, found.entry, found.question) == (id, self.model[id].entry, f"question {text}")
            self.check_nearest(scope)

    def check_nearest(self, scope: str) -> None:
        query = vector_of(99)
        nearest = self.run(self.store.nearest(key_of(scope, 0), query, 2 * len(TEXTS)))
        expected = {
            (id, f"question {text}")
            for id, one in self.model.items()
            if one.scope == scope and one.entry.expires_at > self.now
            for text in one.fuzzy
        }
        # Of what is past its time, vectors may still stand in the way of others: the index was asked for enough.
        assert {(found.answer_id, found.question) for found in nearest} == expected
        assert [found.cosine for found in nearest] == sorted((found.cosine for found in nearest), reverse=True)
        for found in nearest:
            check_cosine(found, query)


def check_cosine(found: Near, query: Vector) -> None:
    text = int(found.question.removeprefix("question "))
    assert abs(found.cosine - float(vector_of(text) @ query)) < 1e-3


class InMemory(StoreMachine):
    pass


class OnDisk(StoreMachine):
    folder = Path("any")


class Encrypted(StoreMachine):
    folder = Path("any")
    keys = (b"k" * 32,)


for machine, examples in ((InMemory, 30), (OnDisk, 30), (Encrypted, 10)):
    machine.TestCase.settings = settings(deadline=None, max_examples=examples, stateful_step_count=30)

TestInMemory = InMemory.TestCase
TestOnDisk = OnDisk.TestCase
TestEncrypted = Encrypted.TestCase
