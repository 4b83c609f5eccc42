"""What tiers cost a month: by what was paid, by today's prices for all, by the hour; and what was learnt, shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gateway.access.audit import audit_rows
from gateway.cli.main import build
from gateway.ledger.database import Database
from gateway.ledger.rows import LedgerRow, new_id, now_ms
from gateway.outcomes import store
from gateway.outcomes.store import DAY_MS
from tests.gateway.test_outcomes_store import outcome

SETTINGS = """\
version: 1
storage: {data_dir: var}
backends:
  up: {base_urls: ["http://127.0.0.1:1/v1"]}
  own: {base_urls: ["http://127.0.0.1:2/v1", "http://127.0.0.1:3/v1"]}
models:
  little: {tier: small, backend: up, price: {input_usd_per_million: 1, output_usd_per_million: 2}}
  middle: {tier: medium, backend: own}
  middle-2: {tier: medium, backend: own}
  big:
    tier: large
    backend: up
    price: {input_usd_per_million: 10, output_usd_per_million: 20, cached_input_usd_per_million: 1}
"""
DAYS = 10


def row(tier: str, cost: int, **fields: Any) -> LedgerRow:
    known = {
        "attempt_id": new_id(), "request_id": new_id(), "attempt": 1, "policy": "p", "tier": tier, "outcome": "success",
        "ts_ms": now_ms() - DAYS * DAY_MS, "input_tokens": 1_000_000, "output_tokens": 100_000, "cost_nanousd": cost,
    }  # fmt: skip
    return LedgerRow(**{**known, **fields})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tierline.yaml"
    path.write_text(SETTINGS)

    async def fill() -> None:
        database = await Database.open(f"sqlite:///{tmp_path}/var/tierline.db")
        rows = [
            row("small", 1_200_000_000),
            row("large", 3_000_000_000, cached_input_tokens=900_000, policy="q"),
            row("small", 500, outcome="escalated", input_tokens=7, output_tokens=7),
            row("small", 0, outcome="cache_hit"),
            row("embedding", 77),
            row("small", 0, outcome="error", input_tokens=0, output_tokens=0, attempt=2),
            row("small", 10**12, ts_ms=now_ms() - 200 * DAY_MS),
        ]
        await database.insert_rows(rows)
        found = [outcome(kinds={"label_text": 0.75}, policy="p")] * 20
        await store.add(database, found, now_ms() // DAY_MS)
        await database.close()

    asyncio.run(fill())
    return path


def run(config: Path, *words: str) -> Result:
    return CliRunner().invoke(build(words[0]), [*words, "--config", str(config)])


def estimated(config: Path, *words: str) -> dict[str, Any]:
    found = run(config, "tiers", "estimate", "--json", *words)
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    return {**document, "tiers": {tier["tier"]: tier for tier in document["tiers"]}}


def test_a_month_by_what_was_paid_and_by_todays_prices(config: Path) -> None:
    found = estimated(config)
    assert found["requests"] == 3
    assert found["seconds"] == pytest.approx(DAYS * 86_400, rel=1e-3)
    tiers = found["tiers"]
    assert (tiers["small"]["requests"], tiers["small"]["cost_nanousd"]) == (2, 1_200_000_500)
    assert tiers["small"]["month_nanousd"] == pytest.approx(3 * 1_200_000_500, rel=1e-3)
    # Two million tokens in, of which 900,000 cached, and 200,000 out; not what was escalated, which had been in vain.
    assert tiers["small"]["all_month_nanousd"] == pytest.approx(3 * (2.0 + 0.4) * 1e9, rel=1e-3)
    assert tiers["large"]["all_month_nanousd"] == pytest.approx(3 * (11.0 + 0.9 + 4.0) * 1e9, rel=1e-3)
    assert (tiers["medium"]["month_nanousd"], tiers["medium"]["all_month_nanousd"]) == (None, None)
    assert (tiers["xlarge"]["model"], tiers["xlarge"]["all_month_nanousd"]) == (None, None)
    assert tiers["medium"]["claimed_yuan"] == [2000, 8000]


def test_one_policy(config: Path) -> None:
    tiers = estimated(config, "--policy", "q")["tiers"]
    assert (tiers["small"]["requests"], tiers["large"]["requests"]) == (0, 1)
    assert tiers["small"]["all_month_nanousd"] == pytest.approx(3 * 1.2e9, rel=1e-3)
    nothing = run(config, "tiers", "estimate", "--policy", "nobody's")
    assert nothing.exit_code == 1
    assert "no request of policy 'nobody's' reached a model" in nothing.output


def test_machines_by_the_hour(config: Path) -> None:
    medium = estimated(config, "--machine-usd-per-hour", "1.5")["tiers"]["medium"]
    assert medium["machines"] == 2
    assert medium["month_nanousd"] == medium["all_month_nanousd"] == 2 * 730 * 1_500_000_000
    for price in ("-1", "much", "1e99"):
        refused = run(config, "tiers", "estimate", "--machine-usd-per-hour", price)
        assert refused.exit_code == 2, price
        assert "--machine-usd-per-hour" in refused.output


def test_a_table_for_people(config: Path) -> None:
    told = run(config, "tiers", "estimate").stdout
    for part in (
        "all here, month $", "3.60", "47.70", "\u00a52,000-8,000", "from \u00a520,000",
        "A month is 30 days at the rate of 3 requests in 10.0 days.",
        "medium: 'middle' has no price; give it one, or --machine-usd-per-hour.",
    ):  # fmt: skip
        assert part in told, part
    assert run(config, "tiers", "estimate", "--since", "soon").exit_code == 2


def test_what_was_learnt_is_shown(config: Path) -> None:
    own = run(config, "tiers", "show", "--policy", "p").stdout
    assert "policy p; table " in own
    assert "shipped" not in own
    assert "p       a     feedback  label_text  small  15.0  0.0" in own
    found = json.loads(run(config, "tiers", "show", "--json").stdout)
    assert found["kinds"]["label_text"]["small"]["outcomes"] == 0  # of one team only
    assert found["kinds"]["label_text"]["small"]["mean"] > found["kinds"]["label_text"]["small"]["lower"]
    assert found["outcomes"] == [
        {
            "source": "feedback",
            "policy": "p",
            "team": "a",
            "kind": "label_text",
            "tier": "small",
            "wins": 15.0,
            "losses": 0.0,
        }
    ]
    other = run(config, "tiers", "show", "--policy", "q")
    assert other.exit_code == 0
    assert "no outcomes yet" in other.stdout


def test_what_was_learnt_is_forgotten_by_what_is_asked_and_written_down(config: Path) -> None:
    url = f"sqlite:///{config.parent}/var/tierline.db"
    today = now_ms() // DAY_MS

    async def work() -> None:
        database = await Database.open(url)
        await store.add(database, [outcome(False, kinds={"write_function": 1.0}, policy="p", team="b")] * 2, today)
        await store.add(database, [outcome(kinds={"label_text": 1.0}, policy="q", team="b")], today - 3)
        await database.close()

    async def left() -> tuple[list[tuple[str, str]], list[Any]]:
        database = await Database.open(url)
        found = [(item.policy, item.kind) for item in await store.read(database, today)]
        rows = await audit_rows(database, action="outcomes.forget")
        await database.close()
        return found, rows

    asyncio.run(work())
    assert "forgotten: 0 good, 0 bad" in run(config, "tiers", "forget", "--task", "translation").stdout
    assert "forgotten: 0 good, 0 bad" in run(config, "tiers", "forget", "--task", "coding", "--policy", "q").stdout
    done = run(config, "tiers", "forget", "--task", "label_text", "--since", "1d", "--json")
    assert json.loads(done.stdout) == {"good": 15.0, "bad": 0.0}
    found, rows = asyncio.run(left())
    assert found == [("p", "write_function"), ("q", "label_text")]
    assert (rows[0].before, rows[0].after) == (
        {"wins": 15.0, "losses": 0.0}, {"kinds": ["label_text"], "since_day": (now_ms() - DAY_MS) // DAY_MS}
    )  # fmt: skip
    assert "forgotten: 1 good, 2 bad" in run(config, "tiers", "forget", "--all").stdout
    assert asyncio.run(left())[0] == []
    for wrong in ([], ["--all", "--policy", "p"], ["--task", "juggling"], ["--team", "nobody"], ["--since", "soon"]):
        refused = run(config, "tiers", "forget", *wrong)
        assert refused.exit_code == 2, wrong
