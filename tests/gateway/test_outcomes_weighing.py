"""What outcomes are worth: good and bad as they stand, faults as a share, others' a quarter and bounded."""

from __future__ import annotations

import pytest

from gateway.outcomes.service import SHIPPED, learned
from gateway.outcomes.weighing import MOST_OF_ANOTHER, SOURCES, Counted, Source, evidence, of_policy
from tiers.success import default_table

KIND, TIER = "exam_question", "small"
CELL = (KIND, TIER)
WEIGHT = default_table().cells[KIND][TIER].weight
STRENGTH = {CELL: WEIGHT}


def counted(wins: float, losses: float, source: Source = "feedback", policy: str = "mine") -> Counted:
    return Counted(source, policy, KIND, TIER, wins, losses)


def test_own_outcomes_count_whole_and_others_a_quarter() -> None:
    seen = of_policy([counted(8, 2), counted(4, 8, policy="theirs")], "mine")
    assert evidence(seen, STRENGTH) == {CELL: (9.0, 4.0)}
    assert evidence(of_policy([counted(8, 2)], "theirs"), STRENGTH) == {CELL: (2.0, 0.5)}


def test_ratings_of_another_policy_are_not_hidden_by_its_passes() -> None:
    seen = of_policy([counted(0, 1e6, policy="theirs"), counted(1e6, 0, "validation", "theirs")], "mine")
    assert evidence(seen, STRENGTH) == {CELL: (0.0, MOST_OF_ANOTHER / 2)}


@pytest.mark.parametrize("sources", [(source,) for source in SOURCES] + [SOURCES, ("feedback", "validation")])
def test_no_other_policy_outweighs_the_weakest_beginning(sources: tuple[Source, ...]) -> None:
    weakest = min(cell.weight for row in default_table().cells.values() for cell in row.values())
    seen = of_policy([counted(0, 1e6, source, "loud") for source in sources], "mine")
    wins, losses = evidence(seen, {CELL: weakest})[CELL]
    assert wins == 0
    assert losses < weakest / 2


def test_no_other_policy_adds_more_than_its_bound() -> None:
    seen = of_policy([counted(0, 1e6, policy="loud"), counted(0, 8, policy="quiet")], "mine")
    assert evidence(seen, STRENGTH) == {CELL: (0.0, MOST_OF_ANOTHER + 2)}


def test_a_judgement_counts_half() -> None:
    assert evidence(of_policy([counted(8, 2, "audit")], "mine"), STRENGTH) == {CELL: (4.0, 1.0)}


@pytest.mark.parametrize("source", ["validation", "escalation", "retry"])
def test_answers_without_a_fault_teach_nothing(source: Source) -> None:
    assert evidence(of_policy([counted(1e6, 0, source)], "mine"), STRENGTH) == {}


def test_faults_lower_the_mean_by_their_share() -> None:
    """A tenth of the answers do not parse: P(success) falls to nine tenths, whatever it was, and is no surer."""
    for good in (0.0, 60.0):
        added = evidence(of_policy([counted(9e6, 1e6, "validation"), counted(good, 0)], "mine"), STRENGTH)
        before = default_table().cells[KIND][TIER].updated(good, 0)
        after = default_table().cells[KIND][TIER].updated(*added[CELL])
        assert after.p == pytest.approx(0.9 * before.p, rel=1e-3)
        assert after.weight == pytest.approx(before.weight / 0.9, rel=1e-3)


def test_the_first_fault_is_no_share_of_one() -> None:
    wins, losses = evidence(of_policy([counted(0, 1, "validation")], "mine"), STRENGTH)[CELL]
    assert (wins, losses) == (0, pytest.approx(WEIGHT / 10))
    all_fail = evidence(of_policy([counted(0, 1e9, "validation")], "mine"), STRENGTH)[CELL]
    assert all_fail[1] == 20 * WEIGHT


def test_asking_again_is_a_weak_sign() -> None:
    (_, weak) = evidence(of_policy([counted(1e6, 1e6, "retry")], "mine"), STRENGTH)[CELL]
    (_, strong) = evidence(of_policy([counted(1e6, 1e6, "validation")], "mine"), STRENGTH)[CELL]
    assert weak == pytest.approx(WEIGHT * 0.1 / 0.9, rel=1e-3)
    assert strong == pytest.approx(WEIGHT, rel=1e-3)


def test_a_table_learns_by_policy_and_has_a_name() -> None:
    outcomes = [counted(0, 30), counted(5, 0, policy="theirs")]
    table, version = learned(outcomes, "mine")
    assert table.kind(KIND, TIER).mean < default_table().kind(KIND, TIER).mean
    assert table.kind("small_talk", TIER) == default_table().kind("small_talk", TIER)
    assert learned(outcomes, "mine")[1] == version != learned(outcomes, "theirs")[1]
    assert learned([], "mine") == (default_table(), SHIPPED)


def test_kinds_of_an_earlier_version_are_passed_over() -> None:
    assert learned([Counted("feedback", "mine", "a kind that is no more", TIER, 5, 0)], "mine")[1] == SHIPPED
