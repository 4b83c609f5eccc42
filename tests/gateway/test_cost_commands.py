"""`tierline cost report` and `tierline explain`, as a person and as a script uses them."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.main import build
from gateway.ledger.database import Database
from gateway.ledger.rows import Decision, LedgerRow, new_id, now_ms


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tierline.yaml"
    path.write_text("version: 1\nstorage: {data_dir: var}\n")

    async def fill() -> None:
        database = await Database.open(f"sqlite:///{tmp_path}/var/tierline.db")
        rows = [
            LedgerRow(
                attempt_id=new_id(), request_id=f"r{n}", attempt=1, ts_ms=now_ms() - n * 86_400_000, model=f"m{n % 2}",
                tier="small", requested_tier="large", outcome="success", status_code=200, cost_nanousd=10**9 + n,
                input_tokens=1000, cached_input_tokens=10, output_tokens=7, price_version="v@1", ttft_ms=12.5,
                duration_ms=250.0, backend="local", replica="http://127.0.0.1:1/v1", tags={"app": "[red]x[/]"},
            )
            for n in range(4)
        ]  # fmt: skip
        decision = Decision(
            request_id="r0", ts_ms=1, policy="default", policy_version="3", rule="everything else",
            why="no rule matched",
            features={
                "prompt_tokens": 1000, "tags": ["a=b"], "kinds": {"exam": 0.262214200304},
                "quality_target": 0.8, "input_estimate": 900, "output_estimate": 10,
                "p_success": {"small": 0.262214200304, "large": 0.9, "xlarge": 0.93}, "outcomes": {"small": 2.5},
                "p_success_lower": {"small": 0.24, "large": 0.85, "xlarge": 0.9},
            },
            candidates=[{"model": "m0", "tier": "small", "rates": [10**9, 10**8, 10**9, 10**9, 10**9], "price": "v@1"}],
            tier="large", reason="auto_target",
            beside=[{"model": "m9", "tier": "xlarge", "rates": [10**10, 10**9, 10**9, 10**10, 10**10], "price": "v@9"}],
        )  # fmt: skip
        await database.insert_rows(rows, [decision])
        await database.close()

    asyncio.run(fill())
    return path


def run(config: Path, *words: str) -> Result:
    return CliRunner().invoke(build(words[0]), [*words, "--config", str(config)])


def test_the_same_figures_in_every_format(config: Path) -> None:
    table = run(config, "cost", "report", "--by", "model,tier")
    assert table.exit_code == 0
    assert "4.000000006" in table.stdout
    assert "4,000" in table.stdout
    found = json.loads(run(config, "cost", "report", "--by", "model", "--json").stdout)
    assert found["total"]["cost_usd"] == "4.000000006"
    assert {row["model"]: row["cost_nanousd"] for row in found["rows"]} == {"m0": 2 * 10**9 + 2, "m1": 2 * 10**9 + 4}
    lines = list(csv.DictReader(io.StringIO(run(config, "cost", "report", "--format", "csv").stdout)))
    assert sum(int(line["cost_nanousd"]) for line in lines) == 4 * 10**9 + 6


def test_a_span_and_no_grouping(config: Path) -> None:
    words = ("cost", "report", "--by", "", "--since", "36h", "--until", "2100-01-01", "--json")
    found = json.loads(run(config, *words).stdout)
    assert found["total"]["requests"] == 2
    assert len(found["rows"]) == 1


def test_a_report_that_cannot_be_made_is_a_usage_error(config: Path) -> None:
    for words, message in (
        (("--by", "teem"), "choose from"),
        (("--since", "soon"), "neither a date"),
        (
            ("--since", "2026-12-01", "--until", "2026-11-01"),
            "'2026-12-01' (2026-12-01 00:00Z) is not before '2026-11-01'",
        ),
        (("--since", "2026-12-01", "--until", "2026-12-01"), "no time lies between them"),
        (("--since", "24h", "--until", "7d"), "'24h'"),
        (("--since", "2900-01-01"), "is not before now"),
    ):
        refused = run(config, "cost", "report", *words)
        assert refused.exit_code == 2
        assert message in refused.output


def test_a_database_that_cannot_be_read_is_a_failure(config: Path) -> None:
    (config.parent / "var" / "tierline.db").write_bytes(b"no database at all" * 1000)
    for words in (("cost", "report"), ("explain", "r0")):
        refused = run(config, *words)
        assert refused.exit_code == 1
        assert "not a database" in refused.output


def test_explain_tells_the_decision_and_the_attempts(config: Path) -> None:
    told = run(config, "explain", "r0").stdout
    for part in (
        "default@3",
        "everything else",
        "no rule matched",
        "m0 on local: success (200)",
        "small (asked for large)",
        "time       250 ms, first token after 12 ms",
        "  features\n    prompt_tokens    1000\n    tags             a=b\n    kinds            exam 0.262\n",
        "  candidate 1\n    model  m0\n    tier   small\n",
        "  tiers\n"
        "    tier    model     P  at least  outcomes    cost $\n"
        "    small   m0     0.26      0.24       2.5  0.000998  answered: may fail: at least 0.24 is below the target"
        " 0.80\n"
        "    large   -      0.90      0.85         -         -  the smallest that is good enough, but no model of it"
        " could serve\n"
        "    xlarge  m9     0.93      0.90         -   0.00998  good enough, and larger than it takes\n",
        "1000 in (10 cached), 7 out",
        "$1.00 at v@1",
        "app=[red]x[/]",
    ):
        assert part in told, part
    found = json.loads(run(config, "explain", "r0", "--json").stdout)
    assert found["decision"]["rule"] == "everything else"
    assert found["attempts"][0]["cost_nanousd"] == 10**9
    assert "no routing decision" in run(config, "explain", "r1").stdout


def test_explain_does_not_invent_the_time_of_an_attempt_that_was_cut_short(config: Path) -> None:
    async def add() -> None:
        database = await Database.open(f"sqlite:///{config.parent}/var/tierline.db")
        died = LedgerRow(attempt_id=new_id(), request_id="died", attempt=1, ts_ms=now_ms(), outcome="interrupted")
        await database.insert_rows([died])
        await database.close()

    asyncio.run(add())
    told = run(config, "explain", "died").stdout
    assert "time       unknown" in told
    assert "0 ms" not in told


def test_explain_of_nothing_fails(config: Path) -> None:
    nothing = run(config, "explain", "nope")
    assert nothing.exit_code == 1
    assert "nothing is on record" in nothing.output
