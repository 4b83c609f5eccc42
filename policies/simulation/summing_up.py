"""From a finished simulation to its report: figures with intervals, mixes, rules, and what must be said about them."""

from __future__ import annotations

import numpy as np

from policies.load import PolicySet
from policies.simulation.report import Compared, Mix, Report, RuleUse, Spent, Stopped, Stretch, Undecidable
from policies.simulation.simulate import SIDES, Simulation
from policies.simulation.sums import Vector, nothing, of_the_next, of_the_sample, quantile, ratio
from tiers import TIERS

_LEAST_JUDGED = 30
_MOST_UNTOLD = 0.02  # share of the requests without which a quantile of all is still told


def report(done: Simulation) -> Report:
    """Everything that the simulation found."""
    count = done.count
    figures, notes = _figures(done)
    rules = _rules(done)
    return Report(
        requests=count["requests"],
        first_ms=done.first_ms,
        last_ms=done.last_ms,
        compared=count["compared"],
        changed=count["changed"],
        failed=count["failed"],
        refused_otherwise=count["refused_otherwise"],
        reproduced=count["reproduced"] / count["checked"] if count["checked"] else None,
        recorded_cost_nanousd=done.recorded_cost_nanousd,
        undecided=[
            Undecidable(set=side, policy=policy, rule=rule, requests=number)
            for (side, policy, rule), number in done.undecided.most_common()
        ],
        undecided_requests=count["undecided"],
        figures=figures,
        tiers=_mix(done, 0, [*TIERS]),
        models=_mix(done, 1, []),
        rules=rules,
        never_matched=[rule for rule in rules if rule.in_new and rule.new == 0],
        stopped=_stopped(done),
        refused_old=count["refused_old"],
        refused_new=count["refused_new"],
        budgets=_budgets(done),
        hits=count["hits"],
        hits_lost=count["hits_lost"],
        stretched=[
            Stretch(answered=pair[0], instead=pair[1], requests=requests, factor=factor)
            for pair, (requests, factor) in sorted(done.costing.ratios("new").items())
        ],
        most_changed=done.most_changed(),
        notes=notes + _notes(done),
    )


def _figures(done: Simulation) -> tuple[dict[str, Compared], list[str]]:
    figures: dict[str, Compared] = {}
    notes: list[str] = []
    if not done.count["compared"]:
        return figures, ["no request could be compared."]
    costs = [done.costing.total(side) + done.climbs.total(side) for side in SIDES]
    figures["cost"] = _relative("nano-dollars", *costs)
    each = [ratio(cost, _all(done, side)) for cost, side in zip(costs, SIDES, strict=True)]
    figures["cost_per_request"] = _relative("nano-dollars", *each)
    for name, times in (("latency", done.whole), ("ttft", done.first)):
        found = [times.distribution(side) for side in SIDES]
        untold = max(number for _, number in found)
        if untold:
            what = "to the end" if name == "latency" else "to the first token"
            notes.append(f"the time {what} of {untold:,} requests cannot be told: too few answers of their new model.")
        if untold > _MOST_UNTOLD * done.count["compared"] or not all(steps for steps, _ in found):
            continue
        for share in (0.5, 0.95):
            figures[f"{name}_p{share * 100:.0f}"] = _relative("ms", *(quantile(steps, share) for steps, _ in found))
    judged = min(done.quality.judged(side) for side in SIDES)
    if judged >= _LEAST_JUDGED:
        means = [done.quality.mean(side) for side in SIDES]
        figures["quality"] = Compared(
            unit="share",
            old=of_the_next(means[0]),
            new=of_the_next(means[1]),
            change=of_the_sample(means[1] - means[0]),
        )
    if judged < done.count["compared"]:
        notes.append(
            f"quality is predicted for {judged:,} of {done.count['compared']:,} requests: of the others the record does"
            " not say what they are about, or they are unlike anything known."
        )
    return figures, notes


def _relative(unit: str, old: Vector, new: Vector) -> Compared:
    change = np.where(old > 0, new / np.where(old > 0, old, 1.0) - 1, 0.0)
    return Compared(unit=unit, old=of_the_next(old), new=of_the_next(new), change=of_the_sample(change))


def _all(done: Simulation, side: str) -> Vector:
    return sum(done.served(side).values(), start=nothing())


def _mix(done: Simulation, which: int, order: list[str]) -> list[Mix]:
    """Shares by tier (`which` 0) or by model (1)."""
    shares: dict[str, dict[str, Vector]] = {side: {} for side in SIDES}
    for side in SIDES:
        for names, requests in done.served(side).items():
            shares[side][names[which]] = shares[side].get(names[which], nothing()) + requests
    every = {*shares["old"], *shares["new"]}
    found = []
    for name in [name for name in order if name in every] + sorted(every.difference(order)):
        old, new = (of_the_next(ratio(shares[side].get(name, nothing()), _all(done, side))) for side in SIDES)
        found.append(Mix(name=name, old=old, new=new))
    return found


def _rules(done: Simulation) -> list[RuleUse]:
    known = {side: _named(done.sets[side]) for side in SIDES}
    used = [*done.rules["old"], *done.rules["new"]]
    every = dict.fromkeys([*known["old"], *known["new"], *used])
    return [
        RuleUse(
            policy=policy,
            rule=rule,
            old=done.rules["old"][policy, rule],
            new=done.rules["new"][policy, rule],
            in_old=(policy, rule) in known["old"],
            in_new=(policy, rule) in known["new"],
        )
        for policy, rule in sorted(every, key=lambda pair: pair[0])
    ]


def _named(policies: PolicySet) -> dict[tuple[str, str], None]:
    return dict.fromkeys((policy.name, rule.name) for policy in policies.policies for rule in policy.rules)


def _stopped(done: Simulation) -> list[Stopped]:
    pairs = sorted({(policy, limit) for _, policy, limit in done.stops})
    return [
        Stopped(
            policy=policy,
            limit=limit,
            **{which: done.stops[which, policy, limit] for which in ("old", "new", "newly", "no_more")},
        )
        for policy, limit in pairs
    ]


def _budgets(done: Simulation) -> list[Spent]:
    names = dict.fromkeys(p.name for side in SIDES for p in done.sets[side].policies if p.budget is not None)
    found = []
    for name in names:
        used: dict[str, float | None] = {}
        for side in SIDES:
            policy = next((p for p in done.sets[side].policies if p.name == name), None)
            used[side] = None if policy is None else done.budget_used(side, policy)
        found.append(Spent(policy=name, old=used["old"], new=used["new"]))
    return found


def _notes(done: Simulation) -> list[str]:
    """What the figures take for granted, where it matters here."""
    notes = []
    before = {policy.name: policy for policy in done.sets["old"].policies}
    for policy in done.sets["new"].policies:
        other = before.get(policy.name)
        if other is None or policy.document == other.document:
            continue
        old, new = other.document, policy.document
        if old.cache.mode == "off" and new.cache.mode != "off":
            notes.append(f"'{policy.name}' turns the cache on: what it would save is not on record, and not counted.")
        elif old.cache != new.cache and new.cache.mode != "off":
            notes.append(
                f"'{policy.name}' changes the cache: only the mode is replayed, hits that it rules out become requests."
            )
    notes += [*_of_climbs(done), *_of_conversations(done)]
    if done.count["changed"]:
        notes.append(
            "requests that go elsewhere keep the share of their prompt that a backend had cached, and hits of the cache"
            " stay hits."
        )
    return notes


def _of_climbs(done: Simulation) -> list[str]:
    notes = []
    for side, what in zip(SIDES, ("now", "new"), strict=True):
        steps, known, unknown = done.climbs.counts(side)
        if known:
            notes.append(
                f"{what}: of {known:,} answers that would be checked and are not on record about {steps:,.0f} fail, as"
                " such answers did; one further step of each is in the cost, not in the times."
            )
        if unknown:
            notes.append(
                f"{what}: how many of {unknown:,} answers would fail their checks nobody knows; none is counted."
            )
    return notes


def _of_conversations(done: Simulation) -> list[str]:
    notes = []
    old, new = (done.conversations[side] for side in SIDES)
    if old.turns or new.turns:
        notes.append(
            f"conversations were followed over {new.turns:,} turns (now {old.turns:,}): {new.switches:,} switches of"
            f" tier (now {old.switches:,}). The time to read one anew is not weighed."
        )
    if new.alone:
        notes.append(
            f"{new.alone:,} requests of policies with 'session' are decided alone: what conversation they are of is on"
            " record only where the policy that decided them kept conversations."
        )
    return notes
