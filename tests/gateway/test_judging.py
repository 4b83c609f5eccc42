"""A model that compares answers for a promise: off the path, in the ledger, under the budgets, strictly understood."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.judging import Allowance, verdict_of
from tests.cache.conftest import Process
from tests.gateway.promised import WAYS, Promised, promised
from tests.gateway.several import until

BY_MODEL = "judge: model, judge_tier: large"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("cache") / "s")
    process.start()
    yield process
    assert process.end() == 0


async def judgements(found: Promised) -> list[dict[str, Any]]:
    """Ledger rows of judgements."""
    return [row for row in await found.door.rows() if "tierline-judge" in row["tags"]]


async def test_a_judgement_has_its_own_row_and_makes_one_answer_of_two(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, BY_MODEL, process=cache) as found:
        found.wire.judge = lambda case: "Same."
        found.wire.answer_to = lambda question: f"{question} Paris!"
        first = await found.ask(WAYS[0].format("France"), headers={"x-tierline-tags": "team=a"})
        second = await found.ask(WAYS[1].format("France"), headers={"x-tierline-tags": "team=b"})
        await found.compared(1)
        (material,) = found.wire.judged
        assert material == {
            "asked": WAYS[1].format("France"),
            "fresh": f"{WAYS[1].format('France')} Paris!",
            "earlier_question": WAYS[0].format("France"),
            "earlier": f"{WAYS[0].format('France')} Paris!",
        }
        (row,) = await judgements(found)
        assert (row["model"], row["tier"], row["outcome"], row["cache"]) == ("judge", "large", "success", "bypass")
        assert row["cost_nanousd"] > 0
        assert row["tags"] == f'{{"team":"b","tierline-judge":"{second.headers["x-request-id"]}"}}'
        asked = next(row for row in await found.door.rows() if row["request_id"] == second.headers["x-request-id"])
        assert (row["key_id"], row["team_id"], row["policy"]) == (asked["key_id"], asked["team_id"], asked["policy"])

        # Judged the same, the second question has the first one's answer from now on.
        again = await found.ask(WAYS[1].format("France"))
        assert again.headers["x-tierline-cache-entry"] == first.headers["x-request-id"]
        assert again.json()["choices"] == first.json()["choices"]
        page = (await found.door.client.get("/metrics")).text
        assert 'tierline_cache_judgements_total{verdict="same"} 1.0' in page


async def test_equal_answers_need_no_judge(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, BY_MODEL, process=cache) as found:
        await found.ask_all(["France"], WAYS[:2])
        await found.compared(1)
        assert not found.wire.judged


async def test_nobody_waits_for_a_judge(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, BY_MODEL, process=cache, judge_model="hang") as found:
        found.wire.answer_to = lambda question: question
        await found.ask(WAYS[0].format("France"))
        await found.ask(WAYS[1].format("France"))
        await found.upstream.until(lambda: found.upstream.requests == 3)  # the third is the judgement
        assert await found.ask_all(["France"], WAYS[:2]) == ["exact", "exact"]
        before = await found.stats()
    assert "no_verdict" not in before.unjudged


@pytest.mark.parametrize("said", ["I think they are the SAME.", "", "SAME DIFFERENT", "same\ndifferent", "nan"])
async def test_what_is_not_one_of_the_two_words_is_no_verdict(tmp_path: Path, cache: Process, said: str) -> None:
    assert verdict_of(said) is None
    if said:
        return
    async with promised(tmp_path, BY_MODEL, process=cache) as found:
        found.wire.judge = lambda case: said
        found.wire.answer_to = lambda question: question
        before = await found.stats()
        await found.ask_all(["France"], WAYS[:2])
        await found.came_to_nothing("unclear", before)
        assert len(await judgements(found)) == 1, "it has cost what it has cost"


@pytest.mark.parametrize("said", ["SAME", "same.", " **Same** ", '"SAME"'])
def test_marks_around_the_word_change_nothing(said: str) -> None:
    assert verdict_of(said) is True
    assert verdict_of(said.lower().replace("same", "different")) is False


async def test_a_spent_budget_stops_judgements_and_no_client(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, BY_MODEL, process=cache) as found:
        found.wire.answer_to = lambda question: question
        # Enough for two answers, not for the material of a judgement as well.
        token = await found.door.key(budget_nanousd=600_000)
        before = await found.stats()
        for way in WAYS[:2]:
            await found.ask(way.format("France"), token=token, max_tokens=60)
        await found.came_to_nothing("failed", before)
        assert not await judgements(found)


async def test_judgements_are_not_the_clients_requests(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, BY_MODEL, process=cache) as found:
        found.wire.answer_to = lambda question: question
        token = await found.door.key(requests_per_minute=3, parallel=1)
        for way in WAYS[:3]:
            await found.ask(way.format("France"), token=token)
        await found.compared(2)


async def test_a_tier_that_nobody_serves_judges_nothing(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, "judge: model, judge_tier: xlarge", process=cache) as found:
        found.wire.answer_to = lambda question: question
        assert [str(warning) for warning in found.door.services.policies.current.warnings if "judge" in str(warning)]
        before = await found.stats()
        await found.ask_all(["France"], WAYS[:2])
        await found.came_to_nothing("failed", before)


async def test_an_allowance_bounds_judgements(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, BY_MODEL, process=cache, judge_per_minute=1) as found:
        found.wire.answer_to = lambda question: question
        before = await found.stats()
        await found.ask_all(["France"], WAYS[:2])
        await found.compared(1)
        await found.ask_all(["France"], WAYS[2:3])
        await found.came_to_nothing("busy", before)


def test_what_only_teaches_is_left_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gateway.judging.time.monotonic", lambda: now)
    allowance = Allowance(10)
    assert [allowance.take(spare=True) for _ in range(8)] == [True] * 6 + [False] * 2
    assert [allowance.take(spare=False) for _ in range(5)] == [True] * 4 + [False]
    now = 30.0
    assert [allowance.take(spare=True) for _ in range(2)] == [True, False]
    now = 600.0
    assert sum(allowance.take(spare=False) for _ in range(20)) == 10


async def test_an_embedder_that_judges(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, "judge: embedding", process=cache) as found:
        answers = iter(
            (
                "The capital of France is Paris.",
                "The capital of France is the city of Paris.",
                "The capital of France is Lyon.",
                "It is Paris. " * 300,
            )
        )
        found.wire.answer_to = lambda question: next(answers)
        before = await found.stats()
        first = await found.ask(WAYS[0].format("France"))
        await found.ask(WAYS[1].format("France"))
        await found.compared(1)

        async def aliased() -> bool:
            return (await found.stats()).aliases_made == before.aliases_made + 1

        await until(aliased, "the question to become one of the first answer's")
        again = await found.ask(WAYS[1].format("France"))
        assert again.headers["x-tierline-cache-entry"] == first.headers["x-request-id"]
        await found.ask(WAYS[2].format("France"))
        await found.compared(2)
        judged = (await found.stats()).judged
        assert judged["embedding same"] - before.judged.get("embedding same", 0) == 1
        assert judged["embedding different"] - before.judged.get("embedding different", 0) == 1
        await found.ask(WAYS[3].format("France"))
        await found.came_to_nothing("too_long", before)
