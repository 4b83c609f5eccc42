"""What is learnt without anybody's word: answers that are no JSON, are asked for again, or are bettered elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record, http_answer
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import notes
from gateway.outcomes import store
from gateway.outcomes.retries import MOST_ASKERS, MOST_OF_A_PERSON, Retries, end_user
from gateway.outcomes.store import DAY_MS
from gateway.outcomes.weighing import Counted
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tests.gateway.several import until

POLICY = """\
version: 1
name: default
owner: tests
routes: [{tier: auto, quality_target: 0.6}]
cache: {mode: "off"}
"""
QUESTION = "Classify the sentiment of this review as positive or negative: I loved it."
SCHEMA = {"type": "object", "properties": {"label": {"type": "string"}}, "required": ["label"]}
JSON_OBJECT = {"type": "json_object"}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


class Saying(OpenAIWire):
    """Answers each model as the test says; a judge is asked with a system message of its own."""

    def __init__(self) -> None:
        self.say: Callable[[str, dict[str, Any]], str] = lambda model, body: "positive"
        self.finish = "stop"

    def answer(self, record: Record) -> bytes:
        body = json.loads(record.body)
        message = {"role": "assistant", "content": self.say(body["model"], body)}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        usage = {"prompt_tokens": 12, "completion_tokens": 34, "total_tokens": 46}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return http_answer(200, msgspec.json.encode({**answer, "choices": [choice], "usage": usage}))


@dataclass
class Watched:
    door: FrontDoor
    wire: Saying

    async def ask(self, text: str = QUESTION, **more: Any) -> str:
        response = await self.door.chat("auto", messages=[{"role": "user", "content": text}], **more)
        assert response.status_code == 200, response.text
        return str(response.headers["x-request-id"])

    async def counted(self, source: str) -> list[Counted]:
        await self.door.services.outcomes.refresh()
        found = await store.read(self.door.services.database, now_ms() // DAY_MS)
        return [item for item in found if item.source == source]

    async def sums(self, source: str) -> tuple[float, float]:
        found = await self.counted(source)
        return sum(item.wins for item in found), sum(item.losses for item in found)

    async def come_to(self, source: str, outcomes: int) -> tuple[float, float]:
        """Wait until so many outcomes have been counted. A request that is one kind for sure counts nearly whole."""

        async def enough() -> bool:
            return round(sum(await self.sums(source))) >= outcomes

        await until(enough, f"{outcomes} outcomes from {source}")
        return await self.sums(source)

    async def notes(self, kind: str) -> list[dict[str, Any]]:
        await self.door.rows()
        async with self.door.services.database.read() as connection:
            rows = await connection.execute(notes.select().where(notes.c.kind == kind).order_by(notes.c.ts_ms))
            return [json.loads(row.json) for row in rows]


@asynccontextmanager
async def watched(root: Path, more: str = "") -> AsyncIterator[Watched]:
    wire = Saying()
    upstream = MockUpstream(wire)
    await upstream.start()
    models = {
        tier: {"tier": tier, "backend": "up", "price": PRICE, "capabilities": ["json_schema", "tools"]}
        for tier in ("small", "medium", "large")
    }
    try:
        async with front_door(root, configuration({"up": upstream}, models), policy=POLICY + more) as door:
            yield Watched(door, wire)
    finally:
        await upstream.stop()


async def test_answers_that_are_no_json_count_against_the_tier(tmp_path: Path) -> None:
    async with watched(tmp_path) as found:
        for said, form, sound in (
            ('{"label": "positive"}', JSON_OBJECT, True),
            ('{"label": "positive"}', JSON_SCHEMA, True),
            ("positive", JSON_OBJECT, False),
            ('["positive"]', JSON_OBJECT, False),
            ('{"label": 1}', JSON_SCHEMA, False),
        ):
            found.wire.say = lambda model, body, said=said: said
            wins, losses = await found.sums("validation")
            await found.ask(response_format=form)
            after = await found.come_to("validation", round(wins + losses) + 1)
            assert (round(after[0] - wins), round(after[1] - losses)) == (int(sound), int(not sound)), (said, form)
        assert [note["fault"] for note in await found.notes("validation")] == ["invalid_json"] * 3
        assert {item.tier for item in await found.counted("validation")} == {"small"}


async def test_what_is_not_learnt_from(tmp_path: Path) -> None:
    async with watched(tmp_path) as found:
        found.wire.say = lambda model, body: "no JSON"
        await found.ask()  # nobody wanted JSON
        for finish in ("length", "content_filter"):  # the client's own limit cut it, or somebody who looks after it
            found.wire.finish = finish
            await found.ask(response_format=JSON_OBJECT)
        await found.ask("zxqv wkjh qqpl mnbvc drtzu", response_format=JSON_OBJECT)  # who knows what it is
        found.wire.finish = "stop"
        await found.ask(response_format=JSON_OBJECT)
        assert (await found.come_to("validation", 1))[1] > 0.9
        assert len(await found.notes("validation")) == 1


async def test_a_stream_is_put_together_to_be_checked(tmp_path: Path, upstream: MockUpstream) -> None:
    models = {"small": {"tier": "small", "backend": "up", "price": PRICE, "capabilities": ["json_schema"]}}
    async with front_door(tmp_path, configuration({"up": upstream}, models), policy=POLICY) as door:
        found = Watched(door, Saying())
        await found.ask(stream=True, response_format=JSON_OBJECT)
        assert (await found.come_to("validation", 1))[1] > 0.9


async def test_a_busy_key_does_not_use_up_its_day_at_once(tmp_path: Path) -> None:
    async with watched(tmp_path) as found:
        for _ in range(40):
            await found.ask(response_format=JSON_OBJECT)
        await found.come_to("validation", 20)
        assert round(sum(await found.sums("validation"))) <= 21
        other = await found.door.key()
        await found.ask(response_format=JSON_OBJECT, token=other)
        await found.come_to("validation", 21)


AUDIT = "audit: {rate: 1, against: large, judge_tier: medium}\n"


@pytest.mark.parametrize("better", ["small", "large", "equal", "nonsense"])
async def test_an_audit_asks_a_larger_tier_and_a_judge(tmp_path: Path, better: str) -> None:
    seen: list[dict[str, Any]] = []

    def say(model: str, body: dict[str, Any]) -> str:
        if model != "medium":
            return f"the answer of {model}"
        material = json.loads(body["messages"][1]["content"])
        seen.append(material)
        first = material["first"] == f"the answer of {better}"
        return {"equal": "Equal.", "nonsense": "both are fine"}.get(better, "FIRST" if first else "second")

    async with watched(tmp_path, AUDIT) as found:
        found.wire.say = say
        ids = [await found.ask() for _ in range(8)]
        if better == "nonsense":
            await until_async(lambda: len(seen) == 8)
            assert await found.counted("audit") == []
        else:
            wins, losses = await found.come_to("audit", 7)
            assert (wins > 6) == (better != "large")
            assert (losses > 6) == (better == "large")
            verdicts = {note["verdict"] for note in await found.notes("audit")}
            assert verdicts == {"worse" if better == "large" else "as good"}
        assert {material["first"] for material in seen} == {"the answer of small", "the answer of large"}, "by lot"
        assert seen[0]["asked"] == [{"role": "user", "content": QUESTION}]
        rows = [row for row in await found.door.rows() if "tierline-audit" in row["tags"]]
        assert {row["tier"] for row in rows} == {"large", "medium"}
        assert {json.loads(row["tags"])["tierline-audit"] for row in rows} <= set(ids)
        assert all(row["cost_nanousd"] > 0 for row in rows)


async def until_async(true: Callable[[], bool]) -> None:
    async def said() -> bool:
        return true()

    await until(said, "it")


async def test_the_largest_tier_and_tools_are_not_audited(tmp_path: Path) -> None:
    async with watched(tmp_path, AUDIT) as found:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        await found.ask(headers={"x-tierline-tier": "large"})
        await found.ask(tools=[tool])
        await found.ask(n=1)
        await found.come_to("audit", 1)
        assert sum("tierline-audit" in row["tags"] for row in await found.door.rows()) in (1, 2)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(answers: list[tuple[str, float]], turns: int = 1, user: str = "ann") -> list[bool]:
    """What is told of answers to these texts, each arriving so many seconds after the one before was answered."""
    clock = Clock()
    retries, found = Retries(clock), []
    for text, gap in answers:
        clock.now += gap
        retries.seen(("key", user), text, turns, clock.now, found.append)
    clock.now += 121
    retries.sweep()
    return found


AGAIN = "please summarise the report for me in short"


def test_asking_again_in_time_is_a_sign() -> None:
    assert told([(QUESTION, 0), (QUESTION, 20)]) == [False, True]
    assert told([(QUESTION, 0), (QUESTION + " Please.", 20)]) == [False, True]
    assert told([(QUESTION, 0), (AGAIN, 20)]) == [True, True]
    assert told([(QUESTION, 0), (QUESTION, 130)]) == [True, True]


def test_programs_and_short_words_are_none() -> None:
    assert told([(QUESTION, 0), (QUESTION, 0.5)]) == [True, True], "nobody reads so fast"
    assert told([("and then?", 0), ("and then?", 20)]) == [True, True]
    often = told([(QUESTION, 3)] * 20)
    assert len(often) <= MOST_OF_A_PERSON
    assert end_user({"user": 5}) is None
    assert end_user({}) is None
    assert end_user({"safety_identifier": "x" * 1000}) == "x" * 256


def test_askers_are_bounded_and_apart() -> None:
    clock = Clock()
    retries, found = Retries(clock), []
    for number in range(MOST_ASKERS + 5):
        retries.seen(("key", str(number)), QUESTION, 1, clock.now, found.append)
    assert found == [True] * 5
    clock.now += 200
    retries.sweep()
    assert found == [True] * (MOST_ASKERS + 5)


async def test_a_person_who_asks_again_counts_against_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(tmp_path) as found:
        monkeypatch.setattr("gateway.outcomes.retries.LEAST_S", 0.0)
        await found.ask(user="ann")
        await found.ask("Hi, how are you today my friend?", user="bob")
        await found.ask()
        assert await found.counted("retry") == []
        await found.ask(user="ann")
        wins, losses = await found.come_to("retry", 1)
        assert (wins, losses > 0.9) == (0, True)
