"""Whether a policy that is tried is worse than the old one by more than its guard allows, and how sure that is.

Everything measured is a ratio of two sums over the groups of a side (`tallies.py`): faults per request, cost per
answer, slow answers per answer, good ones per judged one. Its variance is taken from how the groups differ (the delta
method for ratios of clusters); what is counted in ones and zeros is at least as uncertain as so many tosses of a coin.
The 95 % quantile is compared by shares as well: of the new answers no more than 5 % may take longer than the old
quantile stretched by the margin. `sequential.py` turns an excess and its variance into evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.rollouts.sequential import e_value, least_evidence
from gateway.rollouts.tallies import Group, Tally, latency_of, steps_in
from policies.schema.rollout import Guard

# Fewer keys (or teams) than fall into so many groups say nothing of others: cost and latency are then not compared.
LEAST_GROUPS: Final = 8
LEAST_JUDGED: Final = 20  # answers of each side that were found good or bad
_SLOW: Final = 0.05
_SPREAD: Final = 0.05  # excesses of a share that are worth finding


class Verdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One guard's comparison. `old` and `new` are what was measured (shares, milliseconds, dollars), `bound` the worst
    that is allowed. It is a breach once `evidence` has reached `needed`. `waits`: why nothing is judged yet.
    """

    guard: str
    old: float | None = None
    new: float | None = None
    bound: float | None = None
    evidence: float = 0.0
    needed: float = 0.0
    breach: bool = False
    waits: str = ""


class _Mean(msgspec.Struct, frozen=True):
    """A ratio and the variance that its groups show; None where there are too few."""

    value: float
    variance: float | None


def judge(guard: Guard, old: Tally, new: Tally, window: int) -> list[Verdict]:
    """Compare the sides as far as they were counted in the window of this number; one verdict per guard."""
    judges: list[tuple[str, Callable[[Guard, Tally, Tally], Verdict]]] = [
        ("error_rate", _errors),
        ("p95_latency", _latency),
        ("cost_per_request", _cost),
        ("quality", _quality),
    ]
    verdicts = []
    for name, compare in judges:
        if getattr(guard, name) is None:
            continue
        verdict = _too_few(guard, name, old, new) or compare(guard, old, new)
        if not verdict.waits:
            verdict.needed = least_evidence(window)
            verdict.breach = verdict.evidence >= verdict.needed
        verdicts.append(verdict)
    return verdicts


def _too_few(guard: Guard, name: str, old: Tally, new: Tally) -> Verdict | None:
    for side, tally in (("new", new), ("old", old)):
        found = tally.total("requests")
        if found < guard.min_requests:
            return Verdict(guard=name, waits=f"{found} of {guard.min_requests} requests on the {side} side")
    return None


def _errors(guard: Guard, old: Tally, new: Tally) -> Verdict:
    assert guard.error_rate is not None
    return _shares("error_rate", guard.error_rate, old, new, "faults", "requests")


def _quality(guard: Guard, old: Tally, new: Tally) -> Verdict:
    assert guard.quality is not None
    for side, tally in (("new", new), ("old", old)):
        if (found := tally.total("judged")) < LEAST_JUDGED:
            return Verdict(guard="quality", waits=f"{found} of {LEAST_JUDGED} judged answers on the {side} side")
    return _shares("quality", guard.quality, old, new, "good", "judged", less_is_worse=True)


def _shares(
    name: str, margin: float, old: Tally, new: Tally, part: str, whole: str, less_is_worse: bool = False
) -> Verdict:
    """Compare how large a part is of a whole."""
    sign = -1 if less_is_worse else 1
    means = []
    variance = 0.0
    for tally in (old, new):
        mean = _ratio(tally, lambda group: getattr(group, part), lambda group: getattr(group, whole))
        coin = _coin(tally.total(part), tally.total(whole))
        variance += max(coin, mean.variance or 0.0)
        means.append(mean.value)
    bound = means[0] + sign * margin
    excess = sign * (means[1] - bound)
    evidence = e_value(excess, variance, max(margin, _SPREAD))
    return Verdict(guard=name, old=means[0], new=means[1], bound=min(max(bound, 0.0), 1.0), evidence=evidence)


def _cost(guard: Guard, old: Tally, new: Tally) -> Verdict:
    assert guard.cost_per_request is not None
    allowed = 1 + guard.cost_per_request
    before, after = (
        _ratio(tally, lambda group: group.cost_nanousd, lambda group: group.answers) for tally in (old, new)
    )
    if before.variance is None or after.variance is None:
        return Verdict(guard="cost_per_request", waits=_few_groups(old, new))
    bound = allowed * before.value
    variance = after.variance + allowed**2 * before.variance
    spread = guard.cost_per_request * max(before.value, after.value)
    if variance == 0:  # every answer cost the same: there is nothing to doubt
        evidence = math.inf if after.value > bound else 0.0
    else:
        evidence = e_value(after.value - bound, variance, spread)
    old_usd, new_usd, bound_usd = (value / 1e9 for value in (before.value, after.value, bound))
    return Verdict(guard="cost_per_request", old=old_usd, new=new_usd, bound=bound_usd, evidence=min(evidence, 1e300))


def _latency(guard: Guard, old: Tally, new: Tally) -> Verdict:
    assert guard.p95_latency is not None
    quantile, reached = old.latency_step(1 - _SLOW), new.latency_step(1 - _SLOW)
    if quantile is None or reached is None:
        return Verdict(guard="p95_latency", waits="no answer on one side")
    limit = quantile + steps_in(1 + guard.p95_latency)

    def slower(than: int) -> Callable[[Group], float]:
        return lambda group: sum(count for step, count in group.latencies.items() if step > than)

    before = _ratio(old, slower(quantile), lambda group: group.answers)
    after = _ratio(new, slower(limit), lambda group: group.answers)
    if before.variance is None or after.variance is None:
        return Verdict(guard="p95_latency", waits=_few_groups(old, new))
    # The old quantile is uncertain, too: by as much as the share of answers beyond it.
    variance = 0.0
    for tally, mean in ((old, before), (new, after)):
        assert mean.variance is not None
        answers = tally.total("answers")
        variance += max(mean.variance, _coin(round(mean.value * answers), answers))
    return Verdict(
        guard="p95_latency",
        old=latency_of(quantile),
        new=latency_of(reached),
        bound=latency_of(quantile) * (1 + guard.p95_latency),
        evidence=e_value(after.value - _SLOW, variance, _SPREAD),
    )


def _ratio(tally: Tally, part: Callable[[Group], float], whole: Callable[[Group], float]) -> _Mean:
    """The ratio of two sums over the groups, and its variance."""
    pairs = [(part(group), whole(group)) for group in tally.groups.values() if whole(group)]
    total = sum(n for _, n in pairs)
    if not total:
        return _Mean(0.0, None)
    value = sum(y for y, _ in pairs) / total
    count = len(pairs)
    if count < LEAST_GROUPS:
        return _Mean(value, None)
    squares = sum((y - value * n) ** 2 for y, n in pairs)
    # By count - 3, not count - 1: that is the variance of Student's t, since with few groups this is uncertain itself.
    return _Mean(value, count * squares / total**2 / (count - 3))


def _coin(hits: int, of: int) -> float:
    """Variance of a share, as if a hit and a miss had been seen besides: nothing is sure after a few requests."""
    share = (hits + 1) / (of + 2)
    return share * (1 - share) / max(of, 1)


def _few_groups(old: Tally, new: Tally) -> str:
    fewest, side = min((len(old.groups), "old"), (len(new.groups), "new"))
    return f"too few keys (teams) on the {side} side to tell it from chance: {fewest}, where {LEAST_GROUPS} are needed"
