"""Warnings of `tierline policy check` that need the platform file or the ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.ledger.database import Database
from gateway.ledger.rows import LedgerRow, new_id, now_ms
from gateway.policy_advice import DAY_MS, read_traffic, settings_advice, traffic_advice
from gateway.settings import Settings
from gateway.settings import load as load_settings
from policies.load import Policy, load_file
from tests.gateway.commands import tierline
from tests.policies.policy_files import policy

TIERLINE_YAML = """\
version: 1
limits: {max_concurrency: 8}
models:
  own: {tier: small, backend: b, context_length: 1000}
  theirs: {tier: large, backend: b, context_length: 2000, price: {version: t, input_usd_per_million: "1", output_usd_per_million: "2"}}
backends: {b: {engine: own}}
"""  # noqa: E501


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    text = TIERLINE_YAML.replace("{engine: own}", "{base_urls: ['http://127.0.0.1:1/v1']}")
    (tmp_path / "tierline.yaml").write_text(text)
    (tmp_path / "policies").mkdir()
    return load_settings(tmp_path / "tierline.yaml")


def made(tmp_path: Path, body: str) -> Policy:
    path = tmp_path / "p.yaml"
    path.write_text(policy("p", body))
    return load_file(path, ["small", "large"])[0]


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("limits: {parallel: 9}\n", 4, "at most 8 requests at once"),
        ("limits: {requests_per_minute: 10, tokens_per_minute: 20001}\n", 4, "10 requests a minute of at most 2,000"),
        ("default: small\nbudget:\n  monthly_usd: 5\n", 6, "never spent"),
        ("default: small\nroutes: [{tier: small}]\nbudget: {monthly_usd: 5}\n", 6, "never spent"),
    ],
)
def test_what_never_binds(settings: Settings, tmp_path: Path, body: str, line: int, words: str) -> None:
    (found,) = settings_advice([made(tmp_path, body)], settings)
    assert (found.line, found.severity) == (line, "warning")
    assert words in found.message


@pytest.mark.parametrize(
    "body",
    [
        "limits: {parallel: 8}\n",
        "limits: {requests_per_minute: 10, tokens_per_minute: 20000}\n",
        "limits: {tokens_per_minute: 200000000}\n",
        "default: small\nfallback: [large]\nbudget: {monthly_usd: 5}\n",
        "default: medium\nbudget: {monthly_usd: 5}\n",  # it has no model, and falls back to a large one
        "default: small\nroutes: [{tier: auto}]\nbudget: {monthly_usd: 5}\n",
        "default: small\nroutes: [{model: theirs}]\nbudget: {monthly_usd: 5}\n",
    ],
)
def test_no_false_alarm(settings: Settings, tmp_path: Path, body: str) -> None:
    assert settings_advice([made(tmp_path, body)], settings) == []


@pytest.fixture
def reporting(tmp_path: Path, settings: Settings) -> Settings:
    path = tmp_path / "tierline.yaml"
    path.write_text(path.read_text().replace("{tier: small,", "{tier: small, capabilities: [logprobs],"))
    return load_settings(path)


_ASKS = "escalate: {when: [low_confidence], mean_logprob: -1}"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (f"default: small\n{_ASKS}\n", None),
        (f"default: medium\n{_ASKS}\n", None),  # it has no model, and falls back to any
        (f"default: small\nroutes:\n  - tier: auto\n    {_ASKS}\n", None),
        (f"default: small\nroutes:\n  - model: own\n    {_ASKS}\n", None),
        (f"default: large\n{_ASKS}\n", 5),
        (f"default: small\nroutes:\n  - model: theirs\n    {_ASKS}\n", 7),
    ],
)
def test_confidence_that_no_model_tells(
    settings: Settings, reporting: Settings, tmp_path: Path, body: str, line: int | None
) -> None:
    made_of = made(tmp_path, body)
    assert [found.line for found in settings_advice([made_of], reporting)] == ([] if line is None else [line])
    (found,) = settings_advice([made_of], settings)
    assert "'low_confidence' has no effect" in found.message
    assert found.severity == "warning"


async def test_budgets_against_traffic(database: Database, tmp_path: Path) -> None:
    today = now_ms() // DAY_MS * DAY_MS
    rows = [
        LedgerRow(
            attempt_id=new_id(), request_id=new_id(), attempt=1, ts_ms=today - day * DAY_MS + 5, policy="p",
            cost_nanousd=cost,
        )
        for day, cost in ((0, 10**12), (1, 4 * 10**9), (2, 2 * 10**9), (40, 10**12))
    ]  # fmt: skip
    await database.insert_rows(rows)
    traffic = await read_traffic(database)
    assert sorted(cost for _, cost in traffic["p"]) == [2 * 10**9, 4 * 10**9]  # not today, which is not over
    for usd, words in (("3", "lower than a day's traffic"), ("30", "spends it in 10 days: $3.00 a day"), ("91", "")):
        found = traffic_advice([made(tmp_path, f"budget: {{monthly_usd: {usd}}}\n")], traffic)
        assert [words in one.message and one.line == 4 for one in found] == ([True] if words else [])
    assert traffic_advice([made(tmp_path, "")], traffic) == []


def test_a_larger_tier_that_costs_less_is_named_where_auto_would_pass_it_over(tmp_path: Path) -> None:
    prices = {"small": ("1", "2"), "large": ("1", "1.5"), "xlarge": ("3", "3")}
    models = "".join(
        f"  {tier}: {{tier: {tier}, backend: b, price: {{version: t, input_usd_per_million: '{fresh}',"
        f" output_usd_per_million: '{output}'}}}}\n"
        for tier, (fresh, output) in prices.items()
    )
    backend = "backends: {b: {base_urls: ['http://127.0.0.1:1/v1']}}\n"
    (tmp_path / "tierline.yaml").write_text(
        f"version: 1\nmodels:\n{models}  free: {{tier: medium, backend: b}}\n{backend}"
    )
    (tmp_path / "policies").mkdir()
    settings = load_settings(tmp_path / "tierline.yaml")
    (found,) = settings_advice([made(tmp_path, "default: small\nroutes:\n  - tier: auto\n")], settings)
    assert found.severity == "warning"
    assert "'large' costs less here than 'small'" in found.message
    assert settings_advice([made(tmp_path, "default: small\nroutes:\n  - tier: small\n")], settings) == []


async def test_the_check_asks_a_ledger_that_is_at_hand_by_itself(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "policies" / "p.yaml").write_text(policy("p", "budget: {monthly_usd: 3}\n"))
    words = ("policy", "check", "--config", str(tmp_path / "tierline.yaml"))
    file = settings.storage.data_dir / "tierline.db"
    assert "day's traffic" not in (await asyncio.to_thread(tierline, *words)).stdout
    assert not file.exists(), "none is made for it"
    database = await Database.open(settings.database_url())
    yesterday = now_ms() - DAY_MS
    spent = LedgerRow(attempt_id=new_id(), request_id=new_id(), attempt=1, ts_ms=yesterday, policy="p")
    spent.cost_nanousd = 4 * 10**9
    await database.insert_rows([spent])
    await database.close()
    found = await asyncio.to_thread(tierline, *words)
    assert "lower than a day's traffic: the dearest day of the last 28 cost $4.00" in found.stdout
    assert "day's traffic" not in (await asyncio.to_thread(tierline, *words, "--without-traffic")).stdout
    file.write_bytes(b"no database at all" * 1000)
    broken = await asyncio.to_thread(tierline, *words)
    assert broken.stdout.splitlines() == [line for line in found.stdout.splitlines() if "day's traffic" not in line]
    assert broken.returncode == found.returncode
