"""Escalations in `policy simulate`: shares that are on record, against what other traffic then costs."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.ledger.database import Database
from gateway.ledger.rows import Decision, LedgerRow
from gateway.settings import Settings
from gateway.settings import load as load_settings
from gateway.simulating.run import simulate
from policies.load import PolicySet, load
from policies.simulation.report import Report
from tests.gateway.recorded_traffic import PRICES, TIERLINE_YAML, requests_of
from tests.policies.policy_files import policy, write

BEGINS_MS = int(datetime(2026, 3, 10, 12, tzinfo=UTC).timestamp() * 1000)
RULES = """\
routes:
  - {name: labels, when: 'task == "classification"', tier: small}
  - {tier: large}
"""
CHECKED = "escalate: {when: [refusal, invalid_json], to: medium}\n"
FAILING = 0.3
Traffic = list[tuple[Decision, list[LedgerRow]]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "tierline.yaml").write_text(TIERLINE_YAML)
    (tmp_path / "policies").mkdir()
    return load_settings(tmp_path / "tierline.yaml")


def folder(tmp_path: Path, name: str, body: str) -> PolicySet:
    return load(write(tmp_path / name, all=policy("all", body)), list(PRICES))


def checked(policies: PolicySet, count: int, seed: int) -> Traffic:
    """Traffic of which every answer of `small` fails with a probability, and `medium` is asked then; streams are not
    checked."""
    rng, found = random.Random(seed), []
    escalates = policies.policies[0].document.escalate is not None
    for decision, row in requests_of(policies, count, begins_ms=BEGINS_MS, seed=seed):
        rows = [row]
        if escalates and row.model == "small" and not row.stream and rng.random() < FAILING:
            cost = row.input_tokens * PRICES["medium"] // 4 + row.output_tokens * PRICES["medium"]
            then = {"attempt_id": f"{row.request_id}-2", "attempt": 2, "tier": "medium", "model": "medium"}
            rows = [replace(row, outcome="escalated"), replace(row, cost_nanousd=cost, **then)]
        found.append((decision, rows))
    return found


async def compare(settings: Settings, path: Path, made: Traffic, old: PolicySet, new: PolicySet) -> Report:
    database = await Database.open(f"sqlite:///{path}")
    await database.insert_rows([row for _, rows in made for row in rows], [decision for decision, _ in made])
    since = datetime.fromtimestamp(BEGINS_MS / 1000, UTC)
    report, unusable = await simulate(settings, database, old, new, since, datetime(2026, 3, 20, tzinfo=UTC))
    await database.close()
    assert not unusable
    return report


def cost(made: Traffic) -> int:
    return sum(row.cost_nanousd for _, rows in made for row in rows)


async def test_the_cost_of_further_steps_holds_what_then_happens(settings: Settings, tmp_path: Path) -> None:
    """Talk goes to the small model, too, whose answers are checked: other traffic, decided so, costs what is told."""
    old = folder(tmp_path, "old", RULES + CHECKED)
    new = folder(tmp_path, "new", RULES.replace("'task ==", '\'task == "chat" || task ==') + CHECKED)
    inside, steps = [], 0.0
    for seed in range(4):
        made = checked(old, 1500, 2 * seed)
        told = await compare(settings, tmp_path / f"{seed}.db", made, old, new)
        assert told.figures["cost"].old.value == cost(made)
        then = cost(checked(new, 1500, 2 * seed + 1))
        inside.append(told.figures["cost"].new.low <= then <= told.figures["cost"].new.high)
        (note,) = [note for note in told.notes if note.startswith("new: of")]
        asked, fail = (float(word.replace(",", "")) for word in (note.split()[2], note.split(" about ")[1].split()[0]))
        steps += fail / asked / 4
    assert all(inside)
    assert steps == pytest.approx(FAILING, abs=0.05)


async def test_checks_switched_off_give_the_first_answer(settings: Settings, tmp_path: Path) -> None:
    old, new = folder(tmp_path, "old", RULES + CHECKED), folder(tmp_path, "new", RULES)
    made = checked(old, 1500, 1)
    told = await compare(settings, tmp_path / "t.db", made, old, new)
    first = sum(row.cost_nanousd for _, rows in made for row in rows[:1])
    assert told.figures["cost"].old.value == cost(made)
    assert told.figures["cost"].new.low <= first <= told.figures["cost"].new.high
    assert told.figures["cost"].new.value == pytest.approx(first, rel=0.1)


async def test_checks_that_nobody_knows_the_outcome_of_are_counted_and_cost_nothing(
    settings: Settings, tmp_path: Path
) -> None:
    old, new = folder(tmp_path, "old", RULES), folder(tmp_path, "new", RULES + CHECKED)
    made = checked(old, 400, 1)
    told = await compare(settings, tmp_path / "t.db", made, old, new)
    assert told.figures["cost"].new.value == cost(made)
    small = sum(rows[0].model == "small" and not rows[0].stream for _, rows in made)
    assert any(note.startswith(f"new: how many of {small:,} answers would fail") for note in told.notes)


async def test_the_same_checks_change_nothing(settings: Settings, tmp_path: Path) -> None:
    old = folder(tmp_path, "old", RULES + CHECKED)
    made = checked(old, 400, 1)
    told = await compare(settings, tmp_path / "t.db", made, old, old)
    assert told.figures["cost"].old == told.figures["cost"].new
    assert told.figures["cost"].new.value == cost(made)
    assert told.changed == 0
    assert not [note for note in told.notes if note.startswith(("new:", "now:"))]
