"""How many drafts pay: against trying every division, and with a machine that is told what its steps take."""

import itertools
import random

import pytest

from engine.scheduling.request import Request
from engine.spec.pace import PRIOR_RATE, StepCost, after_checking, after_pausing, allot
from engine.spec.speculator import Speculator
from engine.types import SamplingParams
from tests.engine.fakes import Clairvoyant


def division(rates, offers, seconds, *, num_tokens=None, most=100, per_depth=0.0):
    return allot(
        rates,
        offers,
        num_tokens=len(offers) if num_tokens is None else num_tokens,
        most=most,
        step_seconds=seconds,
        seconds_per_depth=per_depth,
    )


def tokens_per_second(rates, counts, seconds, num_tokens, per_depth=0.0):
    expected = sum(sum(rate**j for j in range(count + 1)) for rate, count in zip(rates, counts, strict=True))
    return expected / (seconds(num_tokens + sum(counts)) + max(counts) * per_depth)


def test_the_division_is_the_best_of_all():
    dice = random.Random(3)
    for _ in range(150):
        rates = [dice.uniform(0, 0.95) for _ in range(3)]
        offers = [dice.randint(0, 3) for _ in range(3)]
        base, slope, step = dice.uniform(0.5, 3), dice.uniform(0, 0.5), dice.choice([0, 1.0])
        num_tokens, most = 3 + dice.choice([0, 20]), dice.randint(1, 9)

        def seconds(n, base=base, slope=slope, step=step, limit=num_tokens + 4):
            return base + slope * n + step * (n > limit)  # some machines take a leap at some size

        counts = division(rates, offers, seconds, num_tokens=num_tokens, most=most)
        assert all(0 <= count <= offer for count, offer in zip(counts, offers, strict=True))
        assert sum(counts) <= most
        every = itertools.product(*(range(offer + 1) for offer in offers))
        best = max(tokens_per_second(rates, c, seconds, num_tokens) for c in every if sum(c) <= most)
        without = tokens_per_second(rates, [0, 0, 0], seconds, num_tokens)
        got = tokens_per_second(rates, counts, seconds, num_tokens)
        assert got == pytest.approx(best if best > 1.05 * without else without)


def test_drafts_are_free_in_a_small_batch_and_useless_in_a_large_one():
    assert division([0.6], [8], lambda n: 1.0) == [8]
    assert division([0.6] * 64, [8] * 64, lambda n: 0.1 + n) == [0] * 64
    assert division([0.1, 0.9], [4, 4], lambda n: 1 + 0.3 * n) == [0, 4]
    assert division([], [], lambda n: 1.0) == []


def test_a_draft_model_must_earn_its_own_passes():
    assert division([0.8], [4], lambda n: 1.0, per_depth=0.1) == [4]
    assert division([0.8], [4], lambda n: 1.0, per_depth=0.9) == [0]


def test_a_step_is_known_by_its_size_in_between_in_proportion_and_beyond_as_little_as_can_be():
    cost = StepCost()
    assert cost.seconds(5) == cost.seconds(50)
    for _ in range(50):
        cost.add(2, 1.0)
        cost.add(10, 3.0)
    assert cost.seconds(2) == pytest.approx(1.0)
    assert cost.seconds(1) == pytest.approx(0.5)
    assert cost.seconds(6) == pytest.approx(2.0)
    assert cost.seconds(10) == cost.seconds(400) == pytest.approx(3.0)
    cost.add(2, 1000.0)  # one hiccup of the machine
    assert cost.seconds(2) < 1.5


def test_a_figure_that_nothing_renews_is_forgotten_and_tried_again():
    cost = StepCost()
    cost.add(1, 1.0)
    cost.add(5, 100.0)
    assert division([0.6], [4], cost.seconds, num_tokens=1) == [0]
    for _ in range(1100):
        cost.add(1, 1.0)
    assert division([0.6], [4], cost.seconds, num_tokens=1) == [4]


def test_a_rate_learns_from_what_was_checked_and_recovers_slowly():
    good = bad = PRIOR_RATE
    for _ in range(40):
        good, bad = after_checking(good, 4, 4), after_checking(bad, 4, 0)
    assert good > 0.95
    assert bad < 0.05
    mixed = PRIOR_RATE
    for _ in range(400):
        mixed = after_checking(mixed, 4, 1)  # of two that were checked, one held
    assert mixed == pytest.approx(0.5, abs=0.06)
    paused = bad
    for _ in range(100):
        paused = after_pausing(paused)
    assert bad + 0.03 < paused < PRIOR_RATE / 2


def test_speculation_stops_where_it_does_not_pay_and_starts_where_it_does():
    def drafts(step_seconds, accepted, batch):
        """Drafts per step, of the last 100 of 200 steps, on a machine and with answers of this kind."""
        requests = [Request(i, i, [1], 1, SamplingParams(), 1000, b"") for i in range(batch)]
        speculator = Speculator(Clairvoyant(), 4)
        drafted = []
        for _ in range(200):
            counts = speculator.counts(requests, num_tokens=batch, most=256)
            for request, count in counts.items():
                speculator.checked(request, count, min(count, accepted))
            drafted.append(sum(counts.values()))
            speculator.timed(batch + drafted[-1], step_seconds(batch + drafted[-1]))
        return sum(drafted[-100:]) / 100

    def bound_by_weights(n):
        return 1 + 0.01 * n

    def bound_by_products(n):
        return 0.1 + n

    assert drafts(bound_by_weights, accepted=4, batch=2) == 8
    assert drafts(bound_by_weights, accepted=0, batch=2) < 0.5
    assert drafts(bound_by_products, accepted=4, batch=32) < 0.5


def test_a_run_never_goes_past_what_the_request_may_hold():
    speculator = Speculator(Clairvoyant(), 4, adaptive=False)
    requests = [Request(i, i, [1] * 10, 10, SamplingParams(), 10 + left, b"") for i, left in enumerate([1, 2, 3, 99])]
    counts = speculator.counts(requests, num_tokens=4, most=99)
    assert [counts.get(r, 0) for r in requests] == [0, 1, 2, 4]
    assert sum(speculator.counts(requests, num_tokens=4, most=5).values()) == 5
    assert speculator.counts(requests, num_tokens=4, most=0) == {}
    with pytest.raises(ValueError, match="at least 1"):
        Speculator(Clairvoyant(), 0)
