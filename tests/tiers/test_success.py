"""Success as Beta posteriors: bounds near the true quantile, learning that moves and adds up, rows that never fall."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from tiers import TIERS
from tiers.beta import LEVEL, lower_bound, pool
from tiers.choose import choose
from tiers.success import PRIOR_WEIGHT, SuccessTable, default_table
from tiers.task import KINDS, TASKS, TaskProfile

COUNTS = st.floats(0, 60)
OUTCOMES = st.dictionaries(
    st.tuples(st.sampled_from(list(KINDS)), st.sampled_from(TIERS)), st.tuples(COUNTS, COUNTS), max_size=12
)


def profile(kind: str) -> TaskProfile:
    return TaskProfile(
        task=KINDS[kind],
        confidence=1.0,
        complexity=default_table().complexity[kind],
        in_distribution=True,
        features={},
        probabilities={task: float(task == KINDS[kind]) for task in TASKS},
        kinds={name: float(name == kind) for name in KINDS},
    )


def after(kind: str, tier: str, wins: float, losses: float) -> SuccessTable:
    return default_table().learned({(kind, tier): (wins, losses)})


@given(st.floats(0.02, 0.98), st.floats(6, 500))
def test_the_bound_is_near_the_quantile(mean: float, weight: float) -> None:
    true = beta.ppf(LEVEL, mean * weight, (1 - mean) * weight)
    assert lower_bound(mean, weight) == pytest.approx(min(mean, true), abs=0.012)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 50)), min_size=1, max_size=6))
def test_pooling_keeps_the_order_and_the_sum(cells: list[tuple[float, float]]) -> None:
    means, weights = [mean for mean, _ in cells], [weight for _, weight in cells]
    pooled = pool(means, weights)
    assert all(right >= left - 1e-9 for left, right in itertools.pairwise(pooled))
    assert sum(p * w for p, w in zip(pooled, weights, strict=True)) == pytest.approx(
        sum(m * w for m, w in zip(means, weights, strict=True)), abs=1e-6
    )
    if means == sorted(means):
        assert pooled == means


def test_neighbours_that_contradict_the_order_meet_in_the_middle() -> None:
    assert pool([0.9, 0.5, 0.8], [1, 3, 10]) == pytest.approx([0.6, 0.6, 0.8])
    assert pool([0.9, 0.8, 0.1], [1, 1, 1]) == pytest.approx([0.6, 0.6, 0.6])


@pytest.mark.parametrize(("labels", "least", "most"), [(5, 0.2, 0.35), (20, 0.5, 0.7), (50, 0.75, 0.9)])
def test_judgement_gives_way_to_outcomes(labels: int, least: float, most: float) -> None:
    """How much of the way from the prior to what is observed (40 %) the mean goes."""
    before = default_table().kind("label_text", "small").mean
    now = after("label_text", "small", 0.4 * labels, 0.6 * labels).kind("label_text", "small").mean
    assert least < (before - now) / (before - 0.4) < most


def test_outcomes_change_the_choice() -> None:
    """Few bad outcomes suffice to leave the smallest tier, many good ones bring its neighbour's work to it."""
    assert choose(profile("label_text")).tier == "small"
    assert choose(profile("label_text"), table=after("label_text", "small", 2, 3)).tier == "medium"
    assert choose(profile("label_text"), table=after("label_text", "small", 19, 1)).tier == "small"
    assert choose(profile("summarise_text")).tier == "medium"
    assert choose(profile("summarise_text"), table=after("summarise_text", "small", 5, 0)).tier == "small"
    assert choose(profile("summarise_text"), table=after("summarise_text", "small", 33, 17)).tier == "medium"
    assert choose(profile("software_work"), table=after("software_work", "medium", 47, 3)).tier == "medium"


def test_more_outcomes_of_the_same_rate_make_it_surer() -> None:
    width = []
    for count in (0, 5, 20, 50, 500):
        found = after("list_ideas", "medium", 0.91 * count, 0.09 * count).kind("list_ideas", "medium")
        width.append(found.mean - found.lower)
    assert width == sorted(width, reverse=True)
    assert width[-1] < 0.02


def test_learning_leaves_the_other_kinds_and_the_table_itself_alone() -> None:
    before = default_table()
    table = after("label_text", "small", 0, 50)
    assert all(table.kind(k, t) == before.kind(k, t) for k in KINDS if k != "label_text" for t in TIERS)
    assert default_table().cells["label_text"]["small"].learned == 0
    assert table.cells["label_text"]["small"].learned == 50


@settings(deadline=None)
@given(OUTCOMES, OUTCOMES)
def test_learning_adds_up(
    one: dict[tuple[str, str], tuple[float, float]], other: dict[tuple[str, str], tuple[float, float]]
) -> None:
    both = dict.fromkeys((*one, *other), (0.0, 0.0))
    for part in (one, other):
        for cell, (wins, losses) in part.items():
            both[cell] = (both[cell][0] + wins, both[cell][1] + losses)
    in_turn, at_once = default_table().learned(one).learned(other), default_table().learned(both)
    for kind in KINDS:
        for tier in TIERS:
            assert in_turn.kind(kind, tier).mean == pytest.approx(at_once.kind(kind, tier).mean)
            assert in_turn.kind(kind, tier).lower == pytest.approx(at_once.kind(kind, tier).lower)


@settings(deadline=None)
@given(OUTCOMES)
def test_whatever_is_learned_success_never_falls_with_size(
    outcomes: dict[tuple[str, str], tuple[float, float]],
) -> None:
    table = default_table().learned(outcomes)
    for kind in KINDS:
        row = [table.p_success(profile(kind), tier) for tier in TIERS]
        assert [e.mean for e in row] == sorted(e.mean for e in row)
        assert [e.lower for e in row] == sorted(e.lower for e in row)
        assert all(0 < e.lower <= e.mean < 1 for e in row)


def test_judgement_says_what_it_was_asked() -> None:
    """The numbers of the priors are bounds, so that asking for certainty does not send everything to the top."""
    for kind, row in default_table().cells.items():
        if row["small"].source == "prior":
            assert choose(profile(kind)).tier != "xlarge", kind
    assert PRIOR_WEIGHT["prior"] < PRIOR_WEIGHT["interpolated"] < PRIOR_WEIGHT["measured"]


@pytest.mark.parametrize(
    ("cell", "counts", "words"),
    [
        (("poetry", "small"), (1, 0), "no kind 'poetry'"),
        (("label_text", "huge"), (1, 0), "tier 'huge'"),
        (("label_text", "small"), (-1, 0), "0 or more"),
        (("label_text", "small"), (1, float("nan")), "0 or more"),
    ],
)
def test_bad_outcomes(cell: tuple[str, str], counts: tuple[float, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        default_table().learned({cell: counts})
