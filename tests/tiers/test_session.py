"""Whether a conversation stays or moves: no going back and forth, whatever is wished, and never late upwards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers import TIERS
from tiers.session import NO_COST, SWITCH_WEIGHT, Pin, Step, SwitchCost, Terms, Wish, answered, step

TERMS = Terms(margin=0.05, downgrade_after=3)


def play(
    wishes: Iterable[Wish], terms: Terms = TERMS, cost: SwitchCost = NO_COST, pin: Pin | None = None
) -> list[Step]:
    """Turns of one conversation, each answered by the model of the tier that it went to."""
    steps = []
    for wish in wishes:
        taken = step(pin, wish, terms, cost)
        pin = taken.pin if taken.outcome == "moved" else answered(taken.pin, taken.tier, f"m-{taken.tier}", 100)
        steps.append(taken)
    return steps


def wants(*tiers: str) -> list[Wish]:
    return [Wish(tier) for tier in tiers]


def odds(small: float, medium: float, large: float = 0.9, xlarge: float = 0.9) -> dict[str, float]:
    return dict(zip(TIERS, (small, medium, large, xlarge), strict=True))


def returns(tiers: list[str]) -> int:
    """A → B → A, at any distance: how often a conversation comes back to the tier before its present one."""
    run = [tier for number, tier in enumerate(tiers) if number == 0 or tiers[number - 1] != tier]
    return sum(run[i] == run[i - 2] for i in range(2, len(run)))


def test_it_begins_where_its_first_turn_wants_to_go() -> None:
    first = step(None, Wish("large", "big"), TERMS)
    assert (first.outcome, first.tier, first.model, first.pin) == ("new", "large", "big", Pin("large", "big"))


def test_the_same_wish_stays_with_its_model() -> None:
    kept = step(Pin("small", "second"), Wish("small", "first"), TERMS)
    assert (kept.outcome, kept.tier, kept.model) == ("kept", "small", "second")


def test_a_gain_beyond_the_margin_moves_up_at_once_and_one_within_does_not() -> None:
    pin = Pin("small", "m")
    enough = step(pin, Wish("large", p_success=odds(0.7, 0.8, 0.76)), TERMS)
    assert (enough.outcome, enough.tier, enough.needed) == ("upgraded", "large", 0.05)
    assert enough.gain == pytest.approx(0.06)
    noise = step(pin, Wish("large", p_success=odds(0.7, 0.8, 0.74)), TERMS)
    assert (noise.outcome, noise.tier, noise.model) == ("kept", "small", "m")


def test_what_a_switch_costs_is_added_to_the_margin() -> None:
    wish = Wish("medium", p_success=odds(0.7, 0.78))
    assert step(Pin("small", "m"), wish, TERMS).outcome == "upgraded"
    half = SwitchCost(lost_nanousd=1000, turn_nanousd=1000)
    assert half.share() == SWITCH_WEIGHT / 2
    assert step(Pin("small", "m"), wish, TERMS, half).outcome == "kept"
    slow = SwitchCost(reread_s=5.0)
    assert slow.share() == SWITCH_WEIGHT / 2
    assert step(Pin("small", "m"), wish, TERMS, slow).outcome == "kept"
    assert SwitchCost(lost_nanousd=10**15, reread_s=1e9).share() <= SWITCH_WEIGHT
    assert NO_COST.share() == 0


def test_a_rule_that_names_a_larger_tier_needs_no_gain() -> None:
    assert step(Pin("small", "m"), Wish("large", "named"), TERMS).model == "named"


def test_a_downgrade_takes_turns_in_a_row_and_goes_no_lower_than_any_of_them() -> None:
    steps = play(wants("xlarge", "small", "small", "xlarge", "small", "medium", "small", "small"))
    assert [taken.tier for taken in steps] == ["xlarge"] * 6 + ["medium"] * 2
    assert [taken.outcome for taken in steps[-2:]] == ["downgraded", "kept"]


def test_a_turn_that_nobody_can_judge_wants_nothing_less_and_may_want_more() -> None:
    unknown = Wish("medium", known=False, p_success={})
    steps = play([Wish("large"), *[unknown] * 10])
    assert {taken.tier for taken in steps} == {"large"}
    assert step(Pin("small", "m"), unknown, TERMS).tier == "medium"


def test_one_that_is_not_sticky_goes_and_the_conversation_comes_back() -> None:
    steps = play([Wish("large"), Wish("small", sticky=False), Wish("large")])
    assert [taken.outcome for taken in steps] == ["new", "moved", "kept"]
    assert [taken.tier for taken in steps] == ["large", "small", "large"]
    assert steps[1].pin.model == "m-large"


def test_the_pin_follows_to_where_the_answer_came_from() -> None:
    assert answered(Pin("large", "a", fewer=2, largest="small"), "medium", "b", 7) == Pin("medium", "b", 7)
    assert answered(Pin("large", "a", fewer=2, largest="small"), "large", "b", 7).fewer == 2


def test_each_return_doubles_the_patience() -> None:
    turns = [Wish("large")]
    for _ in range(200):
        turns += wants("small", "small", "small", "large")
    steps = play(turns)
    assert returns([taken.tier for taken in steps]) == 1, "three in a row come no more once it takes six"


def test_without_downgrades_it_stays_up_until_its_pin_ends() -> None:
    steps = play(wants("large", *["small"] * 100), Terms(0.05, None))
    assert {taken.tier for taken in steps} == {"large"}


wishes = st.builds(
    Wish,
    tier=st.sampled_from(TIERS),
    known=st.booleans(),
    p_success=st.none() | st.fixed_dictionaries({tier: st.floats(0, 1) for tier in TIERS}),
)


@given(st.lists(wishes, min_size=1, max_size=200), st.integers(1, 5))
def test_no_wishes_whatever_make_it_go_back_and_forth(turns: list[Wish], downgrade_after: int) -> None:
    steps = play(turns, Terms(0.05, downgrade_after))
    ups = sum(taken.outcome == "upgraded" for taken in steps)
    downs = sum(taken.outcome == "downgraded" for taken in steps)
    # Without a return there are at most three steps to go down; each return doubles the patience.
    assert returns([taken.tier for taken in steps]) <= 2 * (math.log2(len(turns) / downgrade_after + 1) + 1)
    assert ups + downs <= 6 * (math.log2(len(turns) / downgrade_after + 1) + 2)


@given(st.lists(wishes, min_size=1, max_size=200))
def test_without_downgrades_it_never_returns(turns: list[Wish]) -> None:
    assert returns([taken.tier for taken in play(turns, Terms(0.05, None)) if taken.outcome != "moved"]) == 0


noise = st.floats(0.5, 0.55).flatmap(
    lambda low: st.fixed_dictionaries({tier: st.floats(low, low + 0.05) for tier in TIERS})
)


@given(st.lists(st.builds(Wish, tier=st.sampled_from(TIERS), p_success=noise), min_size=1, max_size=100))
def test_wishes_within_noise_never_oscillate(turns: list[Wish]) -> None:
    tiers = [taken.tier for taken in play(turns, Terms(0.051, 3))]
    assert returns(tiers) == 0
    assert [TIERS.index(tier) for tier in tiers] == sorted((TIERS.index(tier) for tier in tiers), reverse=True)


@given(st.lists(wishes, max_size=50), st.sampled_from(TIERS[1:]), st.integers(0, 10**12), st.floats(0, 1e6))
def test_a_need_is_served_in_the_turn_that_has_it(before: list[Wish], tier: str, lost: int, reread_s: float) -> None:
    """The latency of an upgrade is one turn, whatever happened before and whatever the switch costs."""
    need = {name: (0.9 if TIERS.index(name) >= TIERS.index(tier) else 0.7) for name in TIERS}
    steps = play([*before, Wish(tier, p_success=need)], cost=SwitchCost(lost, 1000, reread_s))
    assert TIERS.index(steps[-1].tier) >= TIERS.index(tier)


@given(st.lists(wishes, min_size=1, max_size=50))
def test_the_same_turns_take_the_same_steps(turns: list[Wish]) -> None:
    assert play(turns) == play(turns)
