"""A promise through real processes: shadow, certificate, hits, audits, restarts, a breach, and what the ledger says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.cache import app
from tests.cache.conftest import Process
from tests.gateway.admin_door import admin
from tests.gateway.front_door import events
from tests.gateway.promised import COUNTRIES, WAYS, Promised, promised
from tests.gateway.several import until

NEW_WAYS = ("What's the capital of {}?", "Name the capital of {}.", "What is {}'s capital?", "Which is {}'s capital?")
FLUSHED_S = 2.5  # what is older has been written to disk


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A cache process for tests that need no other: each has a team and a policy of its own."""
    process = Process(tmp_path_factory.mktemp("cache") / "s")
    process.start()
    yield process
    assert process.end() == 0


async def test_the_life_of_a_promise(tmp_path: Path) -> None:
    async with promised(tmp_path) as found:
        await nothing_is_given_before_the_bound_is_proved(found)
        await hits_and_audits_say_what_they_are(found)
        await who_wants_no_fresh_answer_is_not_audited(found)
        await what_was_learned_survives_a_kill(found)
        await a_model_that_says_something_else_breaks_the_promise(found)
        await a_cache_that_dies_between_look_up_and_answer_costs_the_comparison_only(found)


async def nothing_is_given_before_the_bound_is_proved(found: Promised) -> None:
    assert set(await found.ask_all(COUNTRIES[:2])) == {"miss"}
    assert found.upstream.requests == 2 * len(WAYS)
    before = await found.certify(COUNTRIES[2:])
    assert "semantic" not in before
    assert "shadow" in before
    proved = await found.standing()
    assert proved.certificate is not None
    assert proved.certificate.upper <= 0.3


async def hits_and_audits_say_what_they_are(found: Promised) -> None:
    asked = found.upstream.requests
    seen: dict[str, tuple[str, ...]] = {}
    hits = total = 0
    for way in NEW_WAYS:
        for country in COUNTRIES[:10]:
            headers = (await found.ask(way.format(country))).headers
            total += 1
            outcome = headers["x-tierline-cache"]
            hits += outcome == "semantic"
            if outcome in ("semantic", "audit"):
                assert 0 < float(headers["x-tierline-cache-p"]) <= 1
                assert 0 < float(headers["x-tierline-cache-score"]) <= 1
                assert int(headers["x-tierline-cache-age"]) >= 0
                assert headers["x-tierline-cache-entry"].startswith("req-")
                seen[outcome] = (headers["x-request-id"],)
    assert seen.keys() == {"semantic", "audit"}
    assert hits + found.upstream.requests - asked == total, "an audit asks the model, a hit does not"
    rows = {row["request_id"]: row for row in await found.door.rows()}
    hit, audit = rows[seen["semantic"][0]], rows[seen["audit"][0]]
    assert (hit["cache"], hit["outcome"], hit["cost_nanousd"]) == ("semantic", "cache_hit", 0)
    assert hit["saved_nanousd"] > 0
    assert (audit["cache"], audit["outcome"], audit["saved_nanousd"]) == ("audit", "success", 0)
    assert audit["cost_nanousd"] > 0
    assert [row["cache"] for row in rows.values()] == found.outcomes
    page = (await found.door.client.get("/metrics")).text
    assert f'tierline_cache_requests_total{{outcome="semantic"}} {float(found.outcomes.count("semantic"))}' in page


async def who_wants_no_fresh_answer_is_not_audited(found: Promised) -> None:
    statuses = set()
    for country in COUNTRIES[:8]:
        for directive in ("only-if-cached", "no-store"):
            response = await found.door.chat(
                "auto",
                messages=[{"role": "user", "content": f"Please tell me the capital of {country}"}],
                temperature=0,
                headers={"x-tierline-cache": directive},
            )
            outcome = response.headers["x-tierline-cache"]
            assert outcome in ("semantic", "miss")
            statuses.add((directive, outcome, response.status_code))
    assert ("only-if-cached", "semantic", 200) in statuses
    assert ("no-store", "semantic", 200) in statuses
    assert ("only-if-cached", "miss", 200) not in statuses


async def what_was_learned_survives_a_kill(found: Promised) -> None:
    await asyncio.sleep(FLUSHED_S)
    known = await found.standing()
    assert known.state == "certified"
    await found.kill_cache()
    await found.start_cache()
    assert await found.standing() == known
    # And so does who got which answer.
    request_id = (await found.door.rows())[0]["request_id"]
    body = {"request_id": request_id, "rating": "bad"}
    taken = await found.door.client.post("/v1/feedback", json=body, headers=found.door.headers())
    assert taken.json()["evicted"] == 1
    assert "semantic" in await found.ask_all(COUNTRIES[:6], ("Do you know the capital of {}?",))


async def a_model_that_says_something_else_breaks_the_promise(found: Promised) -> None:
    """Wrong audits set off the alarm, or what is learned from wrong answers puts the chances below the bar first."""
    number = iter(range(10**6))
    found.wire.answer_to = lambda question: f"It has changed, for the {next(number)}th time."
    before, outcomes = await found.standing(), []
    openings = ("Hello", "Hi", "Hey", "OK", "Well", "So", "Now", "Say", "Good morning", "Please", "Alright", "Oh")
    for opening in openings:
        asked = await found.ask_all(COUNTRIES[:10], (opening + ", what is the capital of {}?",))
        outcomes += asked
        if not {"semantic", "audit"} & set(asked):
            break
    assert not {"semantic", "audit"} & set(outcomes[-10:]), "it goes on giving wrong answers"
    assert 0 < outcomes.count("audit") <= 25, "audits that it may take to find a promise of 30 % broken"
    standing = await found.standing()
    if standing.breaches > before.breaches:
        assert (standing.state, standing.certificate) == ("learning", None)


async def a_cache_that_dies_between_look_up_and_answer_costs_the_comparison_only(found: Promised) -> None:
    found.upstream.override = "mock,delay_ms=500"
    asked = found.upstream.requests
    asking = asyncio.create_task(found.ask("What is the highest mountain of France?"))
    await found.upstream.until(lambda: found.upstream.requests == asked + 1)
    await found.kill_cache()
    assert (await asking).status_code == 200
    found.upstream.override = None
    headers = (await found.ask(WAYS[2].format("France"))).headers
    assert (headers["x-tierline-cache"], headers["x-tierline-cache-reason"]) == ("miss", "unavailable")
    await found.start_cache()
    assert await found.ask_all(COUNTRIES[1:2], WAYS[:1]) == ["exact"]


async def test_a_client_that_leaves_loses_its_comparison_and_nothing_else(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        await found.ask(WAYS[0].format("France"))
        before = await found.stats()
        found.upstream.override = "hang"
        asking = asyncio.create_task(found.ask(WAYS[1].format("France")))
        await found.upstream.until(lambda: found.upstream.requests == 2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await found.came_to_nothing("lost", before)
        found.upstream.override = None
        assert await found.ask_all(["France"], WAYS[1:2]) == ["miss"]
        await found.compared(1)
        assert found.door.services.queue.running == 0


async def test_an_answer_that_is_not_kept_is_not_compared(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        await found.ask(WAYS[0].format("France"))
        before = await found.stats()
        found.wire.answer_to = lambda question: "   "
        await found.ask(WAYS[1].format("France"))
        await found.came_to_nothing("lost", before)


async def test_a_stream_is_compared_as_well(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        await found.ask(WAYS[0].format("France"))
        response = await found.ask(WAYS[1].format("France"), stream=True)
        assert events(response.text)[-1] == "[DONE]"
        await found.compared(1)


async def test_stats_in_words_in_metrics_and_by_the_admin_api(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        await found.ask_all(COUNTRIES[:4])
        await found.compared(10)
        someone = await admin(found.door)
        headers = {"authorization": f"Bearer {someone.token}"}
        promises = (await found.door.client.get("/admin/v1/cache", headers=headers)).json()["stats"]["promises"]
        (standing,) = [one for one in promises if one["policy"] == found.policy]
        assert (standing["max_false_hit_rate"], standing["state"]) == (0.3, "learning")
        command = ["stats", "--config", str(found.door.root / "tierline.yaml")]
        printed = (await asyncio.to_thread(CliRunner().invoke, app, command)).stdout
        assert f"promise of policy {found.policy}: at most 30.00 % of the hits in other words are wrong" in printed
        assert "none is given" in printed
        printed = (await asyncio.to_thread(CliRunner().invoke, app, [*command, "--json"])).stdout
        assert standing in json.loads(printed)["promises"]

        async def shown() -> bool:
            page = (await found.door.client.get("/metrics")).text
            return f'tierline_cache_promised_false_hit_rate{{policy="{found.policy}"}} 0.3' in page

        found.door.services.metrics.promises.take(await found.stats())
        await until(shown, "the promise among the metrics")


@pytest.mark.parametrize("mode", ["shadow", "serve"])
async def test_the_other_modes(tmp_path: Path, cache: Process, mode: str) -> None:
    async with promised(tmp_path, f"judge: exact, promise: {mode}", process=cache) as found:
        await found.ask_until({"shadow": "shadow", "serve": "semantic"}[mode])
        standing = await found.standing()
        assert standing.state in ({"shadow"} if mode == "shadow" else {"serving", "certified"})
        assert (standing.served > 0) == (mode == "serve")
        assert ("semantic" in found.outcomes) == (mode == "serve")


async def test_many_at_once(tmp_path: Path, cache: Process) -> None:
    async with promised(tmp_path, process=cache) as found:
        await found.ask_all(COUNTRIES[:10], WAYS[:1])
        before = await found.stats()
        questions = [way.format(country) for country in COUNTRIES[:10] for way in WAYS[1:]] * 2
        responses = await asyncio.gather(*(found.ask(question) for question in questions))
        # Each question went to the model once at most: its second asker waited for it, or found it.
        assert found.upstream.requests <= 10 + len(questions) / 2
        assert len({response.headers["x-request-id"] for response in responses}) == len(questions)
        assert len(await found.door.rows()) == 10 + len(questions)
        await found.compared(len(questions) // 2)
        after = await found.stats()
        assert after.unjudged == before.unjudged
        assert found.door.services.queue.running == 0
