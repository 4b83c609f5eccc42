"""The routing benchmark's own parts: its baseline is a fair one, and its published figures are there."""

from __future__ import annotations

import json
from pathlib import Path

import bench.routing as routing
from bench.report import RESULTS
from bench.routing_judges import Keywords, interval
from bench.routing_strange import gaming_rows
from tiers.task import default_classifier


def test_the_baseline_is_not_a_straw_man() -> None:
    words = Keywords()
    assert words.task("Translate this to French") == "translation"
    assert words.task("Fix the bug in my Python function") == "coding"
    assert words.tier("hi") == "small"
    assert words.tier("Prove the theorem step by step and analyze the complex algorithm") == "xlarge"


def test_an_interval_holds_the_mean() -> None:
    row = interval("tier_accuracy", "x", "y", [True] * 60 + [False] * 40)
    assert row.median == 0.6
    assert 0.48 < row.min < 0.56
    assert 0.64 < row.max < 0.72
    assert row.runs == 100


def test_published_figures_are_those_of_the_handbook() -> None:
    """`docs/routing.md` quotes the result file; the two must not drift apart."""
    rows = json.loads((RESULTS / "routing.json").read_text())
    page = (Path(routing.__file__).parents[1] / "docs/routing.md").read_text()

    def one(metric: str, system: str, setting: str) -> float:
        (row,) = [
            r for r in rows if (r["metric"], r["system"]) == (metric, system) and r["setting"].startswith(setting)
        ]
        return float(row["median"])

    for system, setting in (
        ("tierline", "llmrouter mix, 5 folds"),
        ("tierline", "llmrouter mix, each benchmark left out"),
        ("tierline", "llmrouter mix, each task left out"),
        ("lexical ridge", "llmrouter mix, 5 folds"),
        ("keyword heuristic", "llmrouter mix"),
    ):
        assert f"{one('apgr', system, setting):.3f}" in page, setting
    assert f"{100 * one('tier_accuracy', 'tierline', 'sheet, collection left out, all ('):.1f} %" in page
    assert f"{one('success_calibration_error', 'tierline', '5 folds, all'):.3f}" in page
    for row in rows:
        if row["metric"] == "out_of_distribution":
            assert f"{100 * row['median']:.1f} %" in page, row


def test_begging_never_buys_two_tiers() -> None:
    """Over the whole labelled sheet, whatever is added."""
    for row in gaming_rows(default_classifier()):
        if row.metric == "tier_more_up":
            assert row.median == 0, row
        if row.metric == "tier_unchanged":
            assert row.median > 0.9, row
