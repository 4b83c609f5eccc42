"""The bench of conversations: its accounts are right, and its published figures are those of the handbook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.sessions as bench
from bench.report import RESULTS
from bench.sessions import Turn, alone, first, play
from tiers.session import Wish

PAGE = Path(bench.__file__).parents[1] / "docs/routing.md"
SHOWN = {
    "tierline, session: {}": "`session: {}`",
    "tierline, downgrade_after: 5": "`session: {downgrade_after: 5}`",
    "each turn alone": "each turn alone",
    "its first tier for good": "its first tier for good",
}


def test_what_a_switch_reads_again() -> None:
    """Up and down again: the larger model reads all that was there, the smaller one what it has not seen."""
    turns = [Turn(Wish(tier), asked=100, answer=50) for tier in ("small", "large", "small")]
    tally = play([turns], alone, 400)
    assert (tally.switches, tally.oscillations) == (2, 1)
    assert tally.reread_tokens == (400 + 150) + 150
    stayed = play([turns], first, 400)
    assert (stayed.switches, stayed.reread_tokens) == (0, 0)
    price = bench.INPUT["small"] / 1e6
    fresh, again = 500 + 100 + 100, 550 * 0.1 + 700 * 0.1
    assert stayed.usd == pytest.approx(price * (fresh + again + 3 * 50 * 4))


def test_published_figures_are_those_of_the_handbook() -> None:
    rows = json.loads((RESULTS / "sessions.json").read_text())
    page = PAGE.read_text()
    for tokens in bench.SYSTEM_TOKENS:
        for system, shown in SHOWN.items():
            said = {
                row["metric"]: row["median"]
                for row in rows
                if (row["system"], row["setting"]) == (system, f"kind stays p=0.75, system prompt {tokens}")
            }
            cells = (
                f"| {tokens} | {shown} | {said['switches']:.2f} | {said['oscillations']:.2f} "
                f"| {said['reread_tokens']:,.0f} | {said['late_upgrades']:.1%} | {said['expected_success']:.1%} "
                f"| ${said['cost']:.2f} |"
            )
            assert cells.replace("%", " %") in page, cells


def test_no_conversation_goes_back_and_forth() -> None:
    rows = json.loads((RESULTS / "sessions.json").read_text())
    [*returns] = [
        row["max"] for row in rows if (row["metric"], row["system"]) == ("oscillations", "tierline, session: {}")
    ]
    assert returns
    assert max(returns) == 0
