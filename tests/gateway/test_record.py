"""Every decision can be made again from its record, which says as well what other tiers would have cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.ledger import reports
from gateway.ledger.rows import Decision, now_ms
from gateway.ledger.schema import decisions
from gateway.outcomes import store
from gateway.outcomes.service import SHIPPED
from gateway.outcomes.store import DAY_MS
from gateway.routing.record import decide_again
from policies.facts import TEXT_VARIABLES
from tests.gateway.front_door import FrontDoor, configuration, front_door
from tests.gateway.test_outcomes_store import outcome

POLICY = """\
version: 1
name: default
owner: tests
routes:
  - {name: long, when: prompt_tokens > 200, tier: large}
  - {name: marked, when: "'vip=yes' in tags", model: medium}
  - {name: sums, when: task == "math" && complexity > 0.3, tier: xlarge}
  - {name: dear, when: "'dear=yes' in tags", tier: auto, quality_target: 0.99}
  - {tier: auto, quality_target: 0.7}
default: large
fallback: [medium, small]
cache: {mode: "off"}
"""
TEXTS = (
    "Classify the sentiment of this review as positive or negative: I loved it.",
    "Hi, how are you today?",
    "A train leaves at noon at 60 km/h and another an hour later at 80 km/h. When do they meet?",
    "Write a Python function that merges two sorted lists.",
    "Translate into French: the house is red.",
    "Which logical fallacy is in this argument? Everybody says so, hence it is true.",
    "zxqv wkjh qqpl mnbvc drtzu",
    "Summarise: " + "the committee met and decided nothing. " * 60,
)
RATES = {"small": (1, 2), "medium": (2, 4), "xlarge": (10, 30)}


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    """A gateway with a model of every tier but large, each with its price."""
    models = {
        tier: {
            "tier": tier, "backend": "up", "capabilities": ["tools", "json_schema"],
            "price": {"version": f"{tier}-1", "input_usd_per_million": rate, "output_usd_per_million": output},
        }
        for tier, (rate, output) in RATES.items()
    }  # fmt: skip
    async with front_door(tmp_path, configuration({"up": upstream}, models), policy=POLICY) as running:
        yield running


async def records(door: FrontDoor) -> list[Decision]:
    await door.rows()
    async with door.services.database.read() as connection:
        found = await connection.execute(decisions.select().order_by(decisions.c.ts_ms))
        return [msgspec.json.decode(row.json, type=Decision) for row in found]


async def ask(door: FrontDoor, text: str, model: str = "auto", headers: Mapping[str, str] = {}, **more: Any) -> str:
    response = await door.chat(model, messages=[{"role": "user", "content": text}], headers=headers, **more)
    assert response.status_code == 200, response.text
    return str(response.headers["x-request-id"])


async def test_decisions_are_made_again_from_their_records(door: FrontDoor) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    async def ask_all() -> None:
        for text in TEXTS:
            await ask(door, text)
            await ask(door, text, max_tokens=5, temperature=0.3)
            await ask(door, text, tools=[tool])
            await ask(door, text, stream=True, response_format={"type": "json_object"})
        await ask(door, TEXTS[0], headers={"x-tierline-tier": "xlarge"})
        await ask(door, TEXTS[0], headers={"x-tierline-tags": "vip=yes"})
        await ask(door, TEXTS[0], headers={"x-tierline-tags": "dear=yes"})
        await ask(door, TEXTS[0], model="medium")

    await ask_all()
    today = now_ms() // DAY_MS
    bad = [outcome(False, kinds={"label_text": 1.0, "write_function": 1.0}), outcome(source="audit", tier="xlarge")]
    await store.add(door.services.database, bad * 40, today)
    await door.services.outcomes.refresh()
    await ask_all()

    policy = door.services.policies.current.named("default")
    assert not policy.variables & TEXT_VARIABLES, "else a record would not be enough"
    found = await records(door)
    assert len(found) == 2 * (4 * len(TEXTS) + 4)
    for record in found:
        again = decide_again(policy, record.features)
        assert (again.requested_tier or "", again.rule, again.reason) == (record.tier, record.rule, record.reason)
        assert again.why == record.why
    reasons = {record.reason for record in found}
    assert reasons == {"auto_target", "auto_best", "auto_unknown", "rule", "pinned", "named_model"}
    tables = [record.features["table"] for record in found if "table" in record.features]
    assert tables[0] == SHIPPED != tables[-1]
    assert len({tuple(record.features["p_success"].items()) for record in found if "table" in record.features}) > 10
    assert any(record.features.get("outcomes", {}).get("small") for record in found)
    assert not any("loved" in msgspec.json.encode(record).decode() for record in found)


async def test_what_other_tiers_would_have_cost(door: FrontDoor) -> None:
    request_id = await ask(door, TEXTS[0])
    (record,) = await records(door)
    tokens = record.features["input_estimate"], record.features["output_estimate"]
    unanswered = msgspec.to_builtins(record)
    before = {entry["tier"]: entry for entry in reports.alternatives(unanswered, [])}
    for tier, (rate, output) in RATES.items():
        assert before[tier]["estimated_nanousd"] == 1000 * (tokens[0] * rate + tokens[1] * output)
        assert before[tier]["cost_nanousd"] is None
    found = await reports.explain(door.services.database, request_id)
    assert found is not None
    (row,) = found.rows
    tiers = {entry["tier"]: entry for entry in found.tiers}
    assert list(tiers) == ["small", "medium", "large", "xlarge"]
    for tier, (rate, output) in RATES.items():
        assert tiers[tier]["cost_nanousd"] == 1000 * (row["input_tokens"] * rate + row["output_tokens"] * output)
        assert tiers[tier]["p"] >= tiers[tier]["lower"]
    assert tiers[row["tier"]]["cost_nanousd"] == row["cost_nanousd"]
    assert (tiers["small"]["role"], tiers["small"]["why"]) == ("answered", "the smallest that is good enough")
    assert tiers["xlarge"]["why"] == "good enough, and larger than it takes"
    assert (tiers["large"]["model"], tiers["large"]["why"]) == (None, "no model of it could serve")


async def test_requests_that_no_tier_is_chosen_for_have_a_record_too(door: FrontDoor) -> None:
    request_id = await ask(door, TEXTS[0], headers={"x-tierline-tier": "medium"})
    found = await reports.explain(door.services.database, request_id) if await door.rows() else None
    assert found is not None
    assert [(entry["tier"], entry["role"], entry["p"]) for entry in found.tiers] == [
        ("small", "fallback", None),
        ("medium", "answered", None),
        ("xlarge", None, None),
    ]


async def test_headers_say_why_in_a_word(door: FrontDoor) -> None:
    messages = [{"role": "user", "content": TEXTS[0]}]
    for headers, reason in (({}, "auto_target"), ({"x-tierline-tier": "xlarge"}, "pinned")):
        answer = await door.chat("auto", messages=messages, headers=headers)
        assert answer.headers["x-tierline-reason"] == reason
        assert answer.headers["x-tierline-task"] == "classification"
        assert ("x-tierline-p" in answer.headers) == (reason == "auto_target")
    named = await door.chat("medium", messages=messages)
    assert named.headers["x-tierline-reason"] == "named_model"
    assert not {"x-tierline-task", "x-tierline-p"} & set(named.headers)
