"""When a tried policy counts as worse: never by chance, however often one looks, and soon where it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gateway.rollouts.judging import LEAST_GROUPS, judge
from gateway.rollouts.sequential import ALPHA, e_value, least_evidence
from gateway.rollouts.tallies import GROUPS, Tally, latency_of, merged, step_of
from policies.schema.rollout import Guard

GUARD = Guard.model_validate(
    {"error_rate": "+2%", "p95_latency": "+30%", "cost_per_request": "+20%", "quality": "-5%", "min_requests": 50}
)


class Traffic:
    """Requests of two sides by a seeded generator, looked at after every twenty of the new side."""

    def __init__(self, seed: int, *, keys: int | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.old, self.new = Tally(), Tally()
        self.keys = keys
        # Keys differ: some ask long questions of dear models, and some ask most of the questions.
        self.dear = np.exp(self.random.normal(0, 0.5, keys or 1))
        self.busy = self.random.dirichlet(np.full(keys or 1, 0.5))
        self.ranges = np.cumsum(self.busy)[:-1]
        self.tried = self.random.random(keys or 1) < 0.3

    def run(self, requests: int, *, errors: float = 0.0, slower: float = 1.0, dearer: float = 1.0) -> set[str]:
        """The guards that were breached at any look."""
        breached: set[str] = set()
        random = self.random
        for number in range(requests):
            key = int(np.searchsorted(self.ranges, random.random())) if self.keys else number
            tried = bool(self.tried[key]) if self.keys else number % 5 == 0
            side = self.new if tried else self.old
            factor = self.dear[key] if self.keys else 1.0
            fault = random.random() < 0.01 + (errors if tried else 0)
            latency = math.exp(random.normal(6, 0.8)) * (slower if tried else 1) * factor
            cost = math.exp(random.normal(12, 1)) * (dearer if tried else 1) * factor
            side.finished(str(key), fault, latency, int(cost))
            if random.random() < 0.1:
                side.judged(str(key), random.random() < 0.9)
            if number % 100 == 99:
                breached |= {verdict.guard for verdict in judge(GUARD, self.old, self.new, 0) if verdict.breach}
        return breached


def test_what_is_no_worse_than_allowed_is_not_taken_back() -> None:
    """At the very edge of what is allowed, with twenty looks each: 1 % of them may be ended per guard, and no more."""
    ended = [Traffic(seed).run(2000, errors=0.02, slower=1.3, dearer=1.2) for seed in range(40)]
    assert sum(map(bool, ended)) <= 2


def test_keys_that_differ_are_no_breach() -> None:
    """Thirty of a hundred keys are on the new side, and cost something else because they are other keys."""
    ended = [Traffic(seed, keys=100).run(1500) for seed in range(20)]
    assert sum(map(bool, ended)) <= 1


@pytest.mark.parametrize(
    ("worse", "guard"),
    [({"errors": 0.15}, "error_rate"), ({"slower": 3.0}, "p95_latency"), ({"dearer": 2.5}, "cost_per_request")],
)
def test_what_is_much_worse_is_found(worse: dict[str, Any], guard: str) -> None:
    found = [Traffic(seed).run(3000, **worse) for seed in range(8)]
    assert all(breached == {guard} for breached in found)


def test_a_server_that_always_fails_is_found_at_once() -> None:
    old, new = Tally(), Tally()
    for number in range(50):
        old.finished(str(number), False, 10, 0)
        new.finished("one key", True, 10, 0)
    (verdict,) = judge(Guard.model_validate({"error_rate": "+2%"}), old, new, 0)
    assert verdict.breach
    assert (verdict.old, verdict.new, verdict.bound) == (0, 1, 0.02)


def test_faults_that_both_sides_have_are_no_breach() -> None:
    old, new = Tally(), Tally()
    for number in range(500):
        old.finished(f"o{number}", True, 10, 0)
        new.finished(f"n{number}", True, 10, 0)
    (verdict,) = judge(Guard.model_validate({"error_rate": "+2%"}), old, new, 0)
    assert not verdict.breach


def test_nothing_is_judged_before_there_is_enough() -> None:
    old, new = Tally(), Tally()
    for number in range(200):
        old.finished(str(number), False, 10, 100)
    for _ in range(49):
        new.finished("one key", True, 10, 100)
    assert all("49 of 50 requests on the new side" in verdict.waits for verdict in judge(GUARD, old, new, 0))
    for _ in range(51):
        new.finished("one key", False, 9999, 10_000)
    waits = {verdict.guard: verdict.waits for verdict in judge(GUARD, old, new, 0)}
    assert waits["error_rate"] == ""
    assert (
        f"too few keys (teams) on the new side to tell it from chance: 1, where {LEAST_GROUPS}" in waits["p95_latency"]
    )
    assert "too few keys" in waits["cost_per_request"]
    assert waits["quality"] == "0 of 20 judged answers on the new side"


def test_what_costs_something_where_it_cost_nothing_is_a_breach() -> None:
    old, new = Tally(), Tally()
    for number in range(100):
        old.finished(f"o{number}", False, 10, 0)
        new.finished(f"n{number}", False, 10, 5)
    (verdict,) = judge(Guard.model_validate({"cost_per_request": "+20%"}), old, new, 0)
    assert verdict.breach
    (verdict,) = judge(Guard.model_validate({"cost_per_request": "+20%"}), new, old, 0)
    assert not verdict.breach


@pytest.mark.parametrize("variance", [1e-4, 0.01, 1.0])
def test_the_evidence_is_a_fair_bet(variance: float) -> None:
    """Where there is no excess an e-value is worth 1 on average, and less where there is less than none."""
    deviation = math.sqrt(variance)
    places = np.linspace(-12 * deviation, 60 * deviation, 40_001)
    values = np.array([e_value(x, variance, 0.05) for x in places])

    def worth(true: float) -> float:
        weights = np.exp(-((places - true) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
        return float(np.sum(values * weights) * (places[1] - places[0]))

    assert worth(0) == pytest.approx(1, abs=1e-3)
    assert worth(-deviation) < 1


def test_looking_often_raises_no_more_alarms() -> None:
    random = np.random.default_rng(5)
    walks = np.cumsum(random.normal(0, 1, (2000, 200)), axis=1)
    most = [max(e_value(walk[n - 1] / n, 1 / n, 0.3) for n in range(5, 201, 15)) for walk in walks]
    assert 0 < np.mean(np.array(most) >= 1 / 0.05) <= 0.05


def test_all_comparisons_together_keep_to_the_whole() -> None:
    assert sum(1 / least_evidence(number) for number in range(100_000)) == pytest.approx(ALPHA, rel=1e-3)


@pytest.mark.parametrize("x", [-50.0, -1.0, 0.0, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize("variance", [0.0, 1e-18, 1.0, 1e12])
def test_the_evidence_is_a_number(x: float, variance: float) -> None:
    assert 0 <= e_value(x, variance, 0.05) < math.inf


def test_tallies_add_up_and_survive_the_database() -> None:
    import msgspec

    parts = [Tally(), Tally()]
    for number in range(300):
        parts[number % 2].finished(f"key-{number}", number % 10 == 0, number + 0.5, number)
        parts[number % 2].judged(f"key-{number}", number % 3 == 0)
    whole = merged(msgspec.json.decode(msgspec.json.encode(part), type=Tally) for part in parts)
    assert whole.total("requests") == 300
    assert whole.total("faults") == 30
    assert whole.total("cost_nanousd") == sum(n for n in range(300) if n % 10)
    assert (whole.total("judged"), whole.total("good")) == (300, 100)
    assert len(whole.groups) <= GROUPS
    step = whole.latency_step(0.95)
    assert step is not None
    assert latency_of(step) == pytest.approx(285, rel=0.03)
    assert step_of(0) == 0
