"""The routing benchmark's own parts: its baseline is a fair one, and its published figures are there."""

from __future__ import annotations

import json
from pathlib import Path

import bench.routing as routing
from bench.report import RESULTS


def test_the_baseline_is_not_a_straw_man() -> None:
    words = routing.Keywords()
    assert words.task("Translate this to French") == "translation"
    assert words.task("Fix the bug in my Python function") == "coding"
    assert words.tier("hi") == "small"
    assert words.tier("Prove the theorem step by step and analyze the complex algorithm") == "xlarge"


def test_published_figures_are_those_of_the_handbook() -> None:
    """`docs/routing.md` quotes the result file; the two must not drift apart."""
    rows = json.loads((RESULTS / "routing.json").read_text())
    page = (Path(routing.__file__).parents[1] / "docs/routing.md").read_text()
    for metric, system, setting in (
        ("apgr", "tierline", "llmrouter mix, 5 folds"),
        ("apgr", "tierline", "llmrouter mix, each benchmark left out"),
        ("apgr", "keyword heuristic", "llmrouter mix"),
    ):
        (row,) = [r for r in rows if (r["metric"], r["system"], r["setting"]) == (metric, system, setting)]
        assert f"{row['median']:.3f}".lstrip("0") in page, row
