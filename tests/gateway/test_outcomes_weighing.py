"""What outcomes are worth: good and bad as they stand, faults as a share, of others what two teams saw."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gateway.outcomes.service import SHIPPED, learned
from gateway.outcomes.weighing import (
    MOST_OF_A_TEAM,
    MOST_OF_OTHERS,
    OTHERS_WEIGHT,
    SOURCES,
    Cell,
    Counted,
    Source,
    evidence,
    of_policy,
)
from tiers import TIERS
from tiers.choose import choose
from tiers.success import default_table
from tiers.task import KINDS, TaskProfile

KIND, TIER = "exam_question", "small"
CELL = (KIND, TIER)
WEIGHT = default_table().cells[KIND][TIER].weight
STRENGTH = {CELL: WEIGHT}
CELLS = [(kind, tier) for kind in KINDS for tier in TIERS]
TARGETS = [step / 50 for step in range(1, 51)]


def counted(
    wins: float, losses: float, source: Source = "feedback", policy: str = "mine", team: str = "", at: Cell = CELL
) -> Counted:
    return Counted(source, policy, team or f"of {policy}", *at, wins, losses)


def campaign(team: str, side: int, policies: Sequence[str] = ("theirs",), size: float = 1e6) -> list[Counted]:
    """All that one team can bring: every source, kind and tier."""
    sums = (0.0, size) if side else (size, 0.0)
    return [counted(*sums, source, policy, team, cell) for policy in policies for source in SOURCES for cell in CELLS]


def test_own_outcomes_count_whole_and_what_two_other_teams_saw_a_quarter() -> None:
    given = [counted(8, 2), counted(4, 8, policy="theirs"), counted(8, 4, policy="else")]
    assert evidence(of_policy(given, "mine"), STRENGTH) == {CELL: (9.0, 3.0)}
    assert evidence(of_policy([*given, counted(0, 4, policy="more")], "mine"), STRENGTH) == {CELL: (9.0, 4.0)}
    assert evidence(of_policy(given[:2], "mine"), STRENGTH) == {CELL: (8.0, 2.0)}


def test_a_team_with_several_policies_is_one_team_and_a_policy_of_several_teams_several() -> None:
    one = [counted(0, 8, policy=name, team="loud") for name in ("theirs", "else")]
    assert evidence(of_policy(one, "mine"), STRENGTH) == {}
    two = [counted(0, 8, policy="theirs", team=name) for name in ("a", "b")]
    assert evidence(of_policy(two, "mine"), STRENGTH) == {CELL: (0.0, 2.0)}


def test_ratings_of_another_policy_are_not_hidden_by_its_passes() -> None:
    given = [counted(1e6, 0, "validation", "theirs"), counted(0, 1e6, policy="theirs")]
    seen = of_policy([*given, counted(0, 1e6, policy="else")], "mine")
    assert evidence(seen, STRENGTH) == {CELL: (0.0, MOST_OF_A_TEAM / 2)}


@pytest.mark.parametrize("side", [0, 1])
def test_one_team_alone_changes_no_choice_of_another_policy(side: int) -> None:
    """At no kind and quality target, with the shipped table and with one that learnt from the policy's own outcomes."""
    own = [counted(5, 9, at=cell) for cell in CELLS[::3]]
    attack = campaign("loud", side, ("theirs", "second", "third"))
    for before in ([], own):
        calm, attacked = learned(before, "mine"), learned([*before, *attack], "mine")
        for kind in KINDS:
            profile = TaskProfile(KINDS[kind], 1.0, 0.5, True, {}, {KINDS[kind]: 1.0}, {kind: 1.0})
            for target in TARGETS:
                chosen = [choose(profile, quality_target=target, table=table).tier for table, _ in (calm, attacked)]
                assert chosen[0] == chosen[1], (kind, target)
        assert calm == attacked


@pytest.mark.parametrize("side", [0, 1])
def test_one_team_makes_of_wins_and_losses_no_more_than_the_others_saw(side: int) -> None:
    rng = random.Random(7)
    for _ in range(30):
        honest = [
            counted(rng.uniform(0, 30), rng.uniform(0, 30), rng.choice(SOURCES), f"p{team}", f"t{team}", cell)
            for team in range(rng.randint(1, 6))
            for cell in rng.sample(CELLS, 20)
        ]
        saw: dict[tuple[str, str, str], list[float]] = {}
        for item in honest:
            sums = saw.setdefault((item.source, item.kind, item.tier), [0.0, 0.0])
            sums[0] += OTHERS_WEIGHT * item.wins
            sums[1] += OTHERS_WEIGHT * item.losses
        for at, found in of_policy([*honest, *campaign("loud", side)], "mine").items():
            most = saw.get(at, [0.0, 0.0])
            assert all(count <= bound + 1e-9 for count, bound in zip(found, most, strict=True)), at


def test_all_others_together_weigh_no_more_than_the_weakest_beginning() -> None:
    weakest = min(cell.weight for row in default_table().cells.values() for cell in row.values())
    assert weakest == MOST_OF_OTHERS
    crowd = [item for team in range(50) for item in campaign(f"t{team}", 1)]
    seen = of_policy(crowd, "mine")
    for cell in CELLS:
        assert sum(sum(sums) for at, sums in seen.items() if at[1:] == cell) == pytest.approx(weakest)


def test_no_team_adds_more_than_its_bound() -> None:
    loud = [counted(0, 1e6, source, name) for name in ("loud", "as loud") for source in SOURCES]
    seen = of_policy(loud, "mine")
    assert sum(sum(sums) for sums in seen.values()) == pytest.approx(MOST_OF_A_TEAM)


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
    outcomes = [counted(0, 30), counted(5, 0, policy="theirs"), counted(5, 0, policy="else")]
    table, version = learned(outcomes, "mine")
    assert table.kind(KIND, TIER).mean < default_table().kind(KIND, TIER).mean
    assert table.kind("small_talk", TIER) == default_table().kind("small_talk", TIER)
    assert learned(outcomes, "mine")[1] == version != learned(outcomes, "theirs")[1]
    assert learned([], "mine") == (default_table(), SHIPPED)


def test_kinds_of_an_earlier_version_are_passed_over() -> None:
    assert learned([counted(5, 0, at=("a kind that is no more", TIER))], "mine")[1] == SHIPPED


def test_few_own_ratings_do_much() -> None:
    """As docs/routing.md says: one bad rating of the tier that was chosen moves 15 of the 20 kinds."""
    moved = 0
    for kind in KINDS:
        complexity = default_table().complexity[kind]
        profile = TaskProfile(KINDS[kind], 1.0, complexity, True, {}, {KINDS[kind]: 1.0}, {kind: 1.0})
        tier = choose(profile).tier
        table, _ = learned([counted(0, 1, at=(kind, tier))], "mine")
        moved += choose(profile, table=table).tier != tier
    assert (moved, len(KINDS)) == (15, 20)
    assert sum(row["small"].source == "prior" for row in default_table().cells.values()) == 11
