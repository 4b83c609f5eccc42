"""Policies simulated on what a database holds: figures against what would happen, limits, hits, and the command."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gateway.ledger.database import Database
from gateway.ledger.rows import Decision, LedgerRow
from gateway.settings import Settings
from gateway.settings import load as load_settings
from gateway.simulating.run import simulate
from policies.load import PolicySet, load
from policies.simulation.report import Report
from policies.simulation.sums import Estimate
from tests.command_line import run
from tests.gateway.recorded_traffic import TIERLINE_YAML, put_on_record, requests_of
from tests.policies.policy_files import policy, write

BEGINS_MS = int(datetime(2026, 3, 10, 12, tzinfo=UTC).timestamp() * 1000)
NOW = datetime(2026, 3, 20, tzinfo=UTC)
RULES = """\
routes:
  - {name: long, when: prompt_tokens > 600, tier: large}
  - {name: labels, when: 'task == "classification"', tier: small}
  - {tier: medium}
"""
Traffic = list[tuple[Decision, LedgerRow]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "tierline.yaml").write_text(TIERLINE_YAML)
    (tmp_path / "policies").mkdir()
    return load_settings(tmp_path / "tierline.yaml")


def folder(tmp_path: Path, name: str, body: str) -> PolicySet:
    return load(write(tmp_path / name, all=policy("all", body)), ["small", "medium", "large", "xlarge"])


async def compare(settings: Settings, database: Database, old: PolicySet, new: PolicySet) -> Report:
    since = datetime.fromtimestamp(BEGINS_MS / 1000, UTC)
    found, unusable = await simulate(settings, database, old, new, since, NOW)
    assert not unusable
    return found


async def test_the_forecast_holds_what_then_happens(settings: Settings, tmp_path: Path) -> None:
    """Other traffic of the same kind, really decided by the new policy, lies in the intervals: 95 % of them, about."""
    old = folder(tmp_path, "old", RULES)
    new = folder(tmp_path, "new", RULES.replace("600", "200").replace('"classification"', '"chat"'))
    inside: list[tuple[str, bool]] = []
    for seed in range(3):
        database = await Database.open(f"sqlite:///{tmp_path}/{seed}.db")
        await put_on_record(database, list(requests_of(old, 900, begins_ms=BEGINS_MS, seed=2 * seed)))
        told = await compare(settings, database, old, new)
        await database.close()
        measured = [row for _, row in requests_of(new, 900, begins_ms=BEGINS_MS, seed=2 * seed + 1)]
        times = sorted(row.duration_ms for row in measured)
        within = {
            "cost": (told.figures["cost"].new, sum(row.cost_nanousd for row in measured)),
            "p50": (told.figures["latency_p50"].new, times[450]),
            "p95": (told.figures["latency_p95"].new, times[855]),
            **{one.name: (one.new, sum(row.tier == one.name for row in measured) / 900) for one in told.tiers},
        }
        inside += [(name, estimate.low <= value <= estimate.high) for name, (estimate, value) in within.items()]
        assert told.figures["cost"].change.low > 0
        assert told.reproduced == 1.0
    assert sum(ok for _, ok in inside) >= 0.9 * len(inside), inside


async def test_the_same_policies_change_nothing(settings: Settings, database: Database, tmp_path: Path) -> None:
    old = folder(tmp_path, "old", RULES + "limits: {requests_per_minute: 30}\n")
    made = list(requests_of(old, 300, begins_ms=BEGINS_MS))
    await put_on_record(database, made)
    found = await compare(settings, database, old, old)
    assert (found.requests, found.compared, found.changed, found.undecided_requests) == (300, 300, 0, 0)
    for figure in found.figures.values():
        assert figure.old == figure.new
        assert figure.change == Estimate(0.0, 0.0, 0.0)
    assert found.figures["cost"].old.value == sum(row.cost_nanousd for _, row in made)
    assert found.most_changed == []
    assert found.refused_new == found.refused_old == 0  # whoever was answered was not refused


async def test_limits_and_budgets_stop_as_they_would(settings: Settings, tmp_path: Path) -> None:
    old = folder(tmp_path, "old", RULES)
    made = list(requests_of(old, 600, begins_ms=BEGINS_MS, every_ms=100))  # 600 a minute, of five keys
    database = await Database.open(f"sqlite:///{tmp_path}/t.db")
    await put_on_record(database, made)
    by_key = {key: sum(row.key_id == key for _, row in made) for key in {row.key_id for _, row in made}}

    tight = folder(tmp_path, "tight", RULES + "limits: {requests_per_minute: 60}\n")
    found = await compare(settings, database, old, tight)
    # In a minute a bucket of 60 lets pass 120: what was in it, and what flows in.
    expected = sum(max(0, count - 120) for count in by_key.values())
    assert found.refused_new == pytest.approx(expected, abs=10)
    assert [(one.limit, one.newly) for one in found.stopped] == [("requests_per_minute", found.refused_new)]
    assert found.figures["cost"].new.value < found.figures["cost"].old.value
    assert found.figures["cost_per_request"].change.value == pytest.approx(0, abs=0.2)

    narrow = folder(tmp_path, "narrow", RULES + "limits: {parallel: 1}\n")
    found = await compare(settings, database, old, narrow)
    assert found.refused_new == 0
    assert found.stopped[0].limit == "parallel"
    assert found.stopped[0].newly > 50

    whole = sum(row.cost_nanousd for _, row in made)
    for what, refused in (("reject", True), ("downgrade", False)):
        half = f"budget: {{monthly_usd: '{whole / 2e9:.9f}', when_exhausted: {what}}}\n"
        found = await compare(settings, database, old, folder(tmp_path, what, RULES + half))
        assert (found.refused_new > 200) is refused
        used = found.budgets[0].new
        assert used is not None
        assert (0.9 < used <= 1.01) if refused else used > 1
        assert next(one for one in found.tiers if one.name == "small").new.value > 0.3
    await database.close()


async def test_hits_that_a_mode_rules_out_become_requests(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    old = folder(tmp_path, "old", RULES)
    made = []
    for number, (decision, row) in enumerate(requests_of(old, 120, begins_ms=BEGINS_MS)):
        if number % 3 == 0:
            cache = "exact" if number % 2 else "semantic"
            row = msgspec.structs.replace(
                row, outcome="cache_hit", cache=cache, saved_nanousd=row.cost_nanousd, cost_nanousd=0, backend="cache"
            )
        made.append((decision, row))
    await put_on_record(database, made)
    for mode, lost in (("semantic", 0), ("exact", 20), ('"off"', 40)):
        found = await compare(settings, database, old, folder(tmp_path, "new", RULES + f"cache: {{mode: {mode}}}\n"))
        assert (found.hits, found.hits_lost, found.changed) == (40, lost, lost)
        saved = sum(row.saved_nanousd for _, row in made if mode != "exact" or row.cache == "semantic")
        more = found.figures["cost"].new.value - found.figures["cost"].old.value
        assert more == pytest.approx(saved if lost else 0, rel=1e-6)
    found = await compare(settings, database, old, folder(tmp_path, "new", RULES + "cache: {charge: 0.25}\n"))
    assert (found.hits, found.hits_lost, found.changed) == (40, 0, 0)
    more = found.figures["cost"].new.value - found.figures["cost"].old.value
    assert more == pytest.approx(sum(row.saved_nanousd for _, row in made) / 4, abs=40)


async def test_texts_are_told_where_the_record_tells(settings: Settings, database: Database, tmp_path: Path) -> None:
    refunds = "  - {name: refunds, when: 'user_text.contains(\"refund\")', tier: large}\n"
    old = folder(tmp_path, "old", f"routes:\n{refunds}" + RULES.partition("\n")[2])

    def said(rng: random.Random) -> str:
        return "a refund, please" if rng.random() < 0.2 else "hello"

    await put_on_record(database, list(requests_of(old, 300, begins_ms=BEGINS_MS, text=said)))
    same = await compare(settings, database, old, folder(tmp_path, "n1", f"routes:\n{refunds}  - {{tier: small}}\n"))
    assert same.undecided_requests == 0
    counted = {(rule.rule): (rule.old, rule.new) for rule in same.rules}
    assert counted["refunds"][0] == counted["refunds"][1] > 30
    other = refunds.replace('contains(\\"refund\\")', "x").replace("refund\\", "money\\").replace('"refund"', '"money"')
    new = folder(tmp_path, "n2", f"routes:\n{other}" + RULES.partition("\n")[2])
    found = await compare(settings, database, old, new)
    assert found.undecided_requests == 300
    assert [(one.set, one.rule, one.requests) for one in found.undecided] == [("new", "refunds", 300)]
    assert found.figures == {}


async def fill(tmp_path: Path, old: PolicySet, extra: Traffic = []) -> None:  # noqa: B006 - it is only read
    database = await Database.open(f"sqlite:///{tmp_path}/var/tierline.db")
    begins = int(datetime.now(UTC).timestamp() * 1000) - 600_000
    await put_on_record(database, [*requests_of(old, 200, begins_ms=begins), *extra])
    await database.close()


async def test_the_command(settings: Settings, tmp_path: Path) -> None:
    old = folder(tmp_path, "policies", RULES)
    await fill(tmp_path, old)
    new = tmp_path / "new.yaml"
    new.write_text(policy("all", RULES.replace("600", "100")))
    found = run(tmp_path, "policy", "simulate", "new.yaml", "--since", "1h")
    assert found.returncode == 0, found.stderr
    assert "200 requests on record" in found.stdout
    assert "replay names the rule of the record for 100.0%" in found.stdout
    held = run(tmp_path, "policy", "simulate", "new.yaml", "--fail-if", "cost>+1%", "--fail-if", "refused>0", "--json")
    assert held.returncode == 3, held.stderr
    report = json.loads(held.stdout)
    assert [one["exceeded"] for one in report["thresholds"]] == [True, False]
    assert report["changed"] > 20
    assert len(report["most_changed"]) == 10
    later = new.read_text().replace("owner:", "valid_from: 2040-01-01T00:00:00Z\nowner:")
    (tmp_path / "later.yaml").write_text(later)
    scheduled = run(tmp_path, "policy", "simulate", "later.yaml", "--json")
    assert json.loads(scheduled.stdout)["changed"] == report["changed"], scheduled.stderr
    write(tmp_path / "same", all=policy("all", RULES))
    nothing = run(tmp_path, "policy", "simulate", "same", "--fail-if", "changed>0")
    assert nothing.returncode == 0, nothing.stdout
    for arguments, code, words in (
        (["none.yaml"], 2, "does not exist"),
        (["policies"], 2, "in force already"),
        (["policies/all.yaml"], 2, "in force already"),
        (["new.yaml", "--fail-if", "costs>1"], 2, "is no threshold"),
        (["new.yaml", "--since", "yesterday"], 2, "yesterday"),
        (["new.yaml", "--since", "2020-01-01", "--until", "2020-01-02"], 1, "no request is on record"),
    ):
        wrong = run(tmp_path, "policy", "simulate", *arguments)
        assert wrong.returncode == code, wrong.stderr
        assert words in wrong.stderr
        assert "Traceback" not in wrong.stderr
    new.write_text("version: 1\nname: all\n")
    wrong = run(tmp_path, "policy", "simulate", "new.yaml")
    assert wrong.returncode == 1
    assert "new.yaml:1:1: 'owner' is missing" in wrong.stderr


async def test_records_of_earlier_versions_are_counted(settings: Settings, database: Database, tmp_path: Path) -> None:
    old = folder(tmp_path, "old", RULES)
    made = list(requests_of(old, 30, begins_ms=BEGINS_MS))
    early = [(msgspec.structs.replace(made[0][0], request_id="req-0", features={"prompt_tokens": 3}), made[0][1])]
    await put_on_record(database, made + early)
    since = datetime.fromtimestamp(BEGINS_MS / 1000, UTC)
    found, unusable = await simulate(settings, database, old, old, since, NOW)
    assert (found.requests, unusable) == (30, 1)
