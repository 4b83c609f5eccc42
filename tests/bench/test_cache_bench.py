"""The cache benchmark's own parts: its made pairs differ, its bounds hold, its published figures are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.cache_online as online
from bench.cache_swaps import swaps
from bench.report import RESULTS


def test_every_made_pair_differs_in_one_place() -> None:
    pairs = list(swaps(500))
    assert len(pairs) == 500
    for pair in pairs:
        assert not pair.same
        assert pair.text_a != pair.text_b
        assert len(pair.text_a.split()) == len(pair.text_b.split())
    assert list(swaps(20, seed=1)) != list(swaps(20, seed=2))


def test_the_bounds_are_true_in_simulated_deployments() -> None:
    rows = list(online.measure_bounds(deployments=60, audits=400))
    assert len(rows) == 6
    assert all(row.median >= 0.9 for row in rows), rows


def test_what_others_published_is_a_share() -> None:
    rows = list(online.published())
    assert {row.system for row in rows} == {"AWS ElastiCache (Titan v2)", "GPTCache"}
    assert all(0 < row.median < 1 for row in rows)


@pytest.mark.parametrize("promise", ["1%", "2%"])
@pytest.mark.parametrize("name", ["banking77", "clinc150"])
def test_published_figures_are_those_of_the_handbook(name: str, promise: str) -> None:
    """`docs/reference/cache.md` quotes the result file; the two must not drift apart, and the promise is kept."""
    rows = json.loads((RESULTS / "cache_promise.json").read_text())
    page = (Path(online.__file__).parents[1] / "docs/reference/cache.md").read_text()
    setting = f"{name} promise={promise}, every request admitted"
    found = {row["metric"]: row for row in rows if row["setting"] == setting}
    assert f"{found['hit_rate']['median']:.1%}".replace("%", " %") in page
    assert f"{found['false_hit_rate']['median']:.2%}".replace("%", " %") in page
    assert found["false_hit_rate"]["median"] <= float(promise.rstrip("%")) / 100
