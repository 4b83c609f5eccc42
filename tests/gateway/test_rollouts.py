"""Policies that are tried: who gets them, when they are taken back by themselves, and what a shadow puts on record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.cli.policy_rollout import show
from gateway.ledger.reports import explain
from gateway.ledger.schema import audit, notes, rollouts
from gateway.policy_news import PolicyNews
from gateway.rollouts import state
from gateway.rollouts.report import report
from tests.gateway.cached_door import EXACT, cached_door
from tests.gateway.front_door import PRICE, FrontDoor, configuration, eventually, front_door

OLD = """\
version: 1
name: default
owner: tests
default: small
cache: {mode: "off"}
"""
NEW = """\
version: 1
name: next
owner: tests
default: large
cache: {mode: "off"}
"""
CANARY = "rollout: {instead_of: default, by: request, percent: 50, guard: {error_rate: +2%, min_requests: 10}}\n"
DEAR = {**PRICE, "output_usd_per_million": "6"}


@pytest_asyncio.fixture
async def tried(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    """A gateway with a good small model, and a large one that fails at its server."""
    models: dict[str, Any] = {
        "mock": {"tier": "small", "backend": "up", "price": PRICE},
        "bad": {"tier": "large", "backend": "down", "upstream_model": "status,status=500", "price": PRICE},
        "dear": {"tier": "xlarge", "backend": "up", "upstream_model": "mock", "price": DEAR},
        "slow": {"tier": "medium", "backend": "up", "upstream_model": "mock,delay_ms=4000", "price": PRICE},
    }
    document = configuration({"up": upstream, "down": upstream}, models)
    document["backends"]["down"]["attempts"] = 1
    for backend in document["backends"].values():  # ninety requests at once, on a machine that does other things, too
        backend["timeouts"] = {"connect_s": 30, "first_token_s": 30, "between_tokens_s": 30, "total_s": 60}
    async with front_door(tmp_path, document, policy=OLD) as running:
        await running.services.rollouts.stop()  # the tests look when they want to
        running.services.rollouts.interval_s = 0
        yield running


async def edit(door: FrontDoor, text: str | None) -> None:
    """Write the new policy, or take it away, and have it in force."""
    path = door.root / "policies" / "next.yaml"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    door.services.policies.reload()
    assert not door.services.policies.problems
    await door.services.rollouts.look()


async def ask(door: FrontDoor, count: int) -> dict[str, int]:
    """Ask so often; how many answers came under each policy."""
    found: dict[str, int] = {}
    for response in await asyncio.gather(*(door.chat("auto") for _ in range(count))):
        name = response.headers["x-tierline-policy"].partition("@")[0]
        found[name] = found.get(name, 0) + 1
    return found


async def rolled_back(door: FrontDoor) -> bool:
    await eventually(lambda: door.services.metrics.in_flight.value == 0)
    await door.services.rollouts.look()
    (found,) = await report(door.services.database, door.services.policies.current)
    print(found)  # shown where a test fails
    return bool(door.services.rollouts.rolled_back())


async def an_hour_later(door: FrontDoor) -> None:
    async with door.services.database.write() as connection:
        await connection.execute(rollouts.update().values(step_ms=rollouts.c.step_ms - 3_600_000))


async def test_a_canary_that_fails_is_taken_back_and_stays_so(
    tried: FrontDoor, caplog: pytest.LogCaptureFixture
) -> None:
    await edit(tried, NEW + CANARY)
    sides = await ask(tried, 40)
    assert set(sides) == {"default", "next"}
    assert await rolled_back(tried)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tierline.rollouts"]
    assert PolicyNews()(f"now error   {line}") == line, "the terminal of `tierline up` hears of it"
    assert set(await ask(tried, 40)) == {"default"}

    page = (await tried.client.get("/metrics")).text
    assert 'tierline_rollout_rolled_back{policy="next"} 1.0' in page
    assert 'tierline_rollout_percent{policy="next"} 0.0' in page
    ready = (await tried.client.get("/health/ready")).json()
    (told,) = ready["policies"]["rolled_back"]
    assert told["policy"] == "next"
    assert "error_rate: 100.00 %" in told["reason"]
    async with tried.services.database.read() as connection:
        (row,) = (await connection.execute(audit.select().where(audit.c.action == "rollout.roll_back"))).mappings()
    assert (row["actor"], row["object"]) == ("gateway", "policy:next")

    await edit(tried, None)
    await edit(tried, NEW + CANARY)  # the same text is the same rollout
    assert set(await ask(tried, 20)) == {"default"}
    await edit(tried, NEW + CANARY + "# edited\n")
    assert set(await ask(tried, 40)) == {"default", "next"}


async def test_a_rollout_is_resumed(tried: FrontDoor) -> None:
    await edit(tried, NEW + CANARY)
    await ask(tried, 40)
    assert await rolled_back(tried)
    (row,) = tried.services.rollouts.rolled_back()
    await state.resume(tried.services.database, row)
    await tried.services.rollouts.look()
    assert not tried.services.rollouts.rolled_back()
    assert set(await ask(tried, 40)) == {"default", "next"}
    assert await rolled_back(tried), "it is as bad as before"


async def test_a_canary_that_is_fine_goes_on(tried: FrontDoor) -> None:
    text = NEW.replace("default: large", "default: xlarge")
    await edit(tried, text + CANARY.replace("guard: {", "guard: {cost_per_request: +300%, "))
    await ask(tried, 90)
    assert not await rolled_back(tried)
    (found,) = await report(tried.services.database, tried.services.policies.current)
    assert [verdict.breach for verdict in found.verdicts] == [False, False]
    assert found.requests["new"] + found.requests["old"] == 90
    cost = found.verdicts[1]
    assert cost.new is not None
    assert cost.old is not None
    assert cost.new > 1.5 * cost.old


async def test_what_costs_more_than_allowed_is_taken_back(tried: FrontDoor) -> None:
    guard = "guard: {cost_per_request: +20%, min_requests: 10}"
    text = NEW.replace("default: large", "default: xlarge")
    await edit(tried, text + f"rollout: {{instead_of: default, by: request, percent: 50, {guard}}}\n")
    await ask(tried, 90)
    assert await rolled_back(tried)
    assert "cost_per_request" in tried.services.rollouts.rolled_back()[0].reason


async def test_what_takes_longer_than_allowed_is_taken_back(tried: FrontDoor) -> None:
    text = NEW.replace("default: large", "default: medium")
    guard = "guard: {p95_latency: +30%, min_requests: 10}"
    await edit(tried, text + f"rollout: {{instead_of: default, by: request, percent: 50, {guard}}}\n")
    await ask(tried, 80)
    assert await rolled_back(tried)
    (found,) = await report(tried.services.database, tried.services.policies.current)
    assert found.reason.startswith("p95_latency: ")


async def test_a_clock_that_was_set_back_does_not_let_a_bad_policy_live(tried: FrontDoor) -> None:
    await edit(tried, NEW + CANARY)
    await ask(tried, 40)
    async with tried.services.database.write() as connection:
        await connection.execute(rollouts.update().values(checked_ms=rollouts.c.checked_ms + 4 * 3_600_000))
    assert await rolled_back(tried)


async def test_ratings_take_back_what_people_like_less(tried: FrontDoor) -> None:
    guard = "guard: {quality: -5%, min_requests: 10}"
    text = NEW.replace("default: large", "default: xlarge")
    await edit(tried, text + f"rollout: {{instead_of: default, by: request, percent: 50, {guard}}}\n")
    for response in await asyncio.gather(*(tried.chat("auto") for _ in range(90))):
        assert response.status_code == 200, response.text
        rating = "bad" if response.headers["x-tierline-policy"].startswith("next@") else "good"
        body = {"request_id": response.headers["x-request-id"], "rating": rating}
        for _ in range(2):  # the second time counts for nothing
            given = await tried.client.post("/v1/feedback", json=body, headers=tried.headers())
            assert given.status_code == 200, given.text
    assert await rolled_back(tried)
    (found,) = await report(tried.services.database, tried.services.policies.current)
    assert "quality: 0.00 %, where the old policy has 100.00 %" in found.reason


async def test_a_raise_holds_until_its_moment_and_is_on_record(tried: FrontDoor) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    raised = f"limits: {{requests_per_minute: 1}}\nraises: [{{until: '{until.isoformat(timespec='seconds')}', "
    raised += "reason: launch day, limits: {requests_per_minute: 60}}]\n"
    tried.write_policy(OLD + raised)
    tried.services.policies.reload()
    answers = [await tried.chat("auto") for _ in range(3)]
    assert [answer.headers["x-ratelimit-limit-requests"] for answer in answers] == ["60"] * 3
    await tried.services.writer.flush()
    explained = await explain(tried.services.database, answers[0].headers["x-request-id"])
    assert explained is not None
    assert explained.decision is not None
    assert explained.decision["features"]["raised"].startswith("launch day (until ")

    tried.services.policies._clock = lambda: until
    tried.services.policies.turn()
    codes = [(await tried.chat("auto")).status_code for _ in range(3)]
    assert 429 in codes


async def test_faults_of_clients_do_not_count(tried: FrontDoor) -> None:
    text = NEW.replace("default: large", "default: xlarge")
    await edit(tried, text + CANARY)
    for _ in range(60):
        assert (await tried.chat("auto", logit_bias="nonsense")).status_code == 400
    assert not await rolled_back(tried)
    (found,) = await report(tried.services.database, tried.services.policies.current)
    assert found.requests == {"old": 0, "new": 0}


async def test_steps_follow_each_other_while_all_is_quiet(tried: FrontDoor) -> None:
    text = NEW.replace("default: large", "default: xlarge")
    guard = "guard: {error_rate: +2%, min_requests: 10}"
    steps = f"rollout: {{instead_of: default, by: request, steps: [20%, 60, 100%], every: 1h, {guard}}}\n"
    await edit(tried, text + steps)

    def share() -> float:
        return tried.services.policies.current.canaries["default"].share

    assert share() == 20
    assert not await rolled_back(tried)
    assert share() == 20, "nobody has asked yet, so nothing is known to be well"
    await ask(tried, 90)
    assert not await rolled_back(tried)
    assert share() == 20, "the hour is not over"
    await an_hour_later(tried)
    await rolled_back(tried)
    assert share() == 60
    await ask(tried, 40)
    await an_hour_later(tried)
    await rolled_back(tried)
    assert share() == 100
    assert set(await ask(tried, 10)) == {"next"}


async def test_named_teams_and_keys_get_it(tried: FrontDoor) -> None:
    other = await tried.key(name="other", team="early")
    await edit(tried, NEW.replace("large", "xlarge") + "rollout: {instead_of: default, teams: [early]}\n")
    mine, theirs = await tried.chat("auto"), await tried.chat("auto", token=other)
    assert mine.headers["x-tierline-policy"].startswith("default@")
    assert theirs.headers["x-tierline-policy"].startswith("next@")


async def test_a_new_canary_waits_until_its_standing_is_known(tried: FrontDoor) -> None:
    (tried.root / "policies" / "next.yaml").write_text(NEW + "rollout: {instead_of: default, percent: 100}\n")
    tried.services.policies.reload()
    assert set(await ask(tried, 5)) == {"default"}
    await tried.services.rollouts.look()
    assert set(await ask(tried, 5)) == {"next"}


async def test_a_shadow_notes_the_difference_and_serves_nobody(
    tried: FrontDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    shadow = """\
routes:
  - {name: short, when: prompt_tokens < 100, tier: xlarge}
  - tier: small
rollout: {instead_of: default, mode: shadow}
"""
    await edit(tried, NEW + shadow)
    long = [{"role": "user", "content": "word " * 500}]
    assert set(await ask(tried, 3)) == {"default"}
    assert (await tried.chat("auto", messages=long)).status_code == 200
    await tried.services.writer.flush()
    async with tried.services.database.read() as connection:
        found = (await connection.execute(notes.select().where(notes.c.kind == "shadow"))).mappings().all()
    noted = [json.loads(row["json"]) for row in found]
    assert sorted((one["same"], one["tier"], one["shadow_tier"]) for one in noted) == [
        (False, "small", "xlarge"),
        (False, "small", "xlarge"),
        (False, "small", "xlarge"),
        (True, "small", "small"),
    ]
    one = next(one for one in noted if not one["same"])
    assert (one["model"], one["shadow_model"], one["shadow_rule"]) == ("mock", "dear", "short")
    rows = {row["request_id"]: row for row in await tried.rows()}
    served = rows[next(row["request_id"] for row in found if not json.loads(row["json"])["same"])]
    assert one["cost_nanousd"] == served["cost_nanousd"]
    assert one["shadow_cost_nanousd"] == served["input_tokens"] * 1000 + served["output_tokens"] * 6000
    (summed,) = await report(tried.services.database, tried.services.policies.current)
    assert summed.shadow is not None
    assert (summed.shadow.requests, summed.shadow.same) == (4, 1)
    assert summed.shadow.tiers == {"small": {"xlarge": 3, "small": 1}}
    capsys.readouterr()
    show(summed)
    said = capsys.readouterr().out
    assert "shadow: decides 100 % of the keys in silence, serves nobody" in said
    assert "4, decided alike 25.0%" in said
    assert "3 to xlarge, 1 to small" in said
    page = (await tried.client.get("/metrics")).text
    assert 'tierline_shadow_decisions_total{policy="next",same="no",shadow_tier="xlarge",tier="small"} 3.0' in page


async def test_an_answer_from_the_cache_costs_the_shadow_what_it_cost(
    tmp_path: Path, upstream: MockUpstream, answer_cache: Path
) -> None:
    models = {"mock": {"tier": "small"}, "dear": {"tier": "xlarge", "upstream_model": "mock", "price": DEAR}}
    shadow = EXACT.replace("name: default", "name: next") + "rollout: {instead_of: default, mode: shadow}\n"
    async with cached_door(tmp_path, upstream, answer_cache, models=models) as door:
        for tier in ("small", "xlarge"):
            await edit(door, shadow.replace("tier: small", f"tier: {tier}"))
            for cached in ("miss", "exact") if tier == "small" else ("exact",):
                assert (await door.chat("auto")).headers["x-tierline-cache"].startswith(cached)
                await door.services.writer.flush()
        async with door.services.database.read() as connection:
            found = (await connection.execute(notes.select().where(notes.c.kind == "shadow"))).mappings().all()
        rows = {row["request_id"]: row for row in await door.rows()}
        noted = [(json.loads(row["json"]), rows[row["request_id"]]) for row in found]
    noted.sort(key=lambda pair: pair[1]["ts_ms"])
    (asked, row), (alike, _), (other, _) = noted
    assert asked["cost_nanousd"] == asked["shadow_cost_nanousd"] == row["cost_nanousd"] > 0
    assert (alike["cost_nanousd"], alike["shadow_cost_nanousd"]) == (0, 0), "the shadow would have found it as well"
    assert other["cost_nanousd"] == 0
    assert other["shadow_cost_nanousd"] == row["input_tokens"] * 1000 + row["output_tokens"] * 6000


async def test_a_shadow_that_fails_leaves_the_request_alone(tried: FrontDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    await edit(
        tried, NEW + "routes: [{when: task == 'chat', tier: xlarge}]\nrollout: {instead_of: default, mode: shadow}\n"
    )

    def broken(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("the classifier is broken")

    monkeypatch.setattr(tried.services.classifier, "classify", broken)
    assert (await tried.chat("auto")).status_code == 200
    await eventually(lambda: tried.services.metrics.in_flight.value == 0)
    page = (await tried.client.get("/metrics")).text
    assert 'tierline_shadow_decisions_total{policy="next",same="failed",shadow_tier="",tier=""} 1.0' in page
    assert [row["outcome"] for row in await tried.rows()] == ["success"]


async def test_without_the_database_rollouts_stand_as_they_stood(
    tried: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = NEW.replace("large", "xlarge")
    await edit(tried, text + "rollout: {instead_of: default, percent: 100, guard: {error_rate: +2%}}\n")

    async def away(*_args: Any) -> None:
        raise OSError("the database is away")

    monkeypatch.setattr(state, "read", away)
    monkeypatch.setattr(state, "put", away)
    with pytest.raises(OSError, match="away"):
        await tried.services.rollouts.look()
    assert set(await ask(tried, 5)) == {"next"}
    monkeypatch.undo()
    await tried.services.rollouts.look()
    (found,) = await report(tried.services.database, tried.services.policies.current)
    assert found.requests["new"] == 5, "what was counted meanwhile is not lost"


async def test_other_policies_pay_nothing(tried: FrontDoor) -> None:
    """Without a rollout nothing is asked of the database, and nothing is counted."""
    before = tried.services.rollouts
    await before.look()
    async with tried.services.database.read() as connection:
        assert (await connection.execute(rollouts.select())).all() == []
    await ask(tried, 2)
    assert before._sides == {}
