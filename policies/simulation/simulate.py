"""Recorded requests under the policies in force and under those that might take their place: one pass, both sides.

`Simulation.take` gets the requests in the order of their time, `report` sums up. A request that is decided as it was
keeps its model, its cost and its time; one that goes elsewhere gets those that the recording shows of the other model.
What cannot be told is left out of both sides and counted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from policies.evaluate import Decision
from policies.load import Policy, PolicySet, Subject
from policies.simulation.climbs import Climbs, checks_of
from policies.simulation.conversations import Conversations
from policies.simulation.costing import Costing
from policies.simulation.deciding import Decider, Undecided
from policies.simulation.latency import Latency
from policies.simulation.quality import Quality
from policies.simulation.recorded import Gate, Recorded, Served, World
from policies.simulation.report import Changed, Side
from policies.simulation.sums import BOTH, Sums, Vector, Weights, nothing, part_of
from tiers.session import Step

SIDES: Final = ("old", "new")
MOST_CHANGED: Final = 10
WAITS: Final = ("parallel", "queue")  # limits at which a request waits for its turn


class _Outcome(msgspec.Struct):
    """What one side makes of a request. `as_recorded`: it is answered as it was; `served`: by whom, or instead."""

    policy: Policy
    decision: Decision
    turn: Step | None
    served: Served | None
    as_recorded: bool
    hit: bool
    stopped: str | None = None
    cost_nanousd: int = 0


class Simulation:
    """Compares two sets of policies over recorded requests. Memory does not grow with their number."""

    def __init__(self, old: PolicySet, new: PolicySet, world: World, gates: Sequence[Gate]) -> None:
        self.sets = dict(zip(SIDES, (old, new), strict=True))
        self._gates = dict(zip(SIDES, gates, strict=True))
        self._world = world
        self._decider = Decider(world)
        self.climbs = Climbs(world)
        self.conversations = {side: Conversations(world) for side in SIDES}
        self._weights = Weights()
        self.costing, self.quality = Costing(world), Quality()
        self.whole, self.first = Latency(self.costing.factor), Latency(self.costing.factor)
        self._served: Sums[tuple[str, str, str]] = Sums()  # side, tier, model
        self.rules: dict[str, Counter[tuple[str, str]]] = {side: Counter() for side in SIDES}
        self.undecided: Counter[tuple[str, str, str]] = Counter()
        self.stops: Counter[tuple[str, str, str]] = Counter()  # old, new, newly or no_more; policy; limit
        self.count: Counter[str] = Counter()
        self.first_ms = self.last_ms = 0
        self.recorded_cost_nanousd = 0
        self._most: list[tuple[int, int, Changed]] = []

    def take(self, request: Recorded) -> None:
        """Take the next request."""
        self.count["requests"] += 1
        self.first_ms = self.first_ms or request.ts_ms
        self.last_ms = max(self.last_ms, request.ts_ms)
        self.recorded_cost_nanousd += request.cost_nanousd
        weights = self._weights.next()
        self._learn(request, weights)
        outcomes: dict[str, _Outcome] = {}
        for side in SIDES:
            try:
                outcomes[side] = self._decide(side, request)
            except Undecided as unknown:
                policy = self._resolve(side, request).name
                self.undecided[side, policy, unknown.rule.name] += 1
        if len(outcomes) < len(SIDES):
            self.count["undecided"] += 1
            return
        self._compare(request, outcomes["old"], outcomes["new"], weights)

    def most_changed(self) -> list[Changed]:
        """The requests whose cost or tier changes most, the most first."""
        return [item for _, _, item in sorted(self._most, key=lambda one: one[:2], reverse=True)]

    def served(self, side: str) -> dict[tuple[str, str], Vector]:
        """Requests of a side by tier and model that answers."""
        found: dict[tuple[str, str], Vector] = {}
        for part, tier, model in self._served:
            if part in part_of(side):
                found[tier, model] = found.get((tier, model), nothing()) + self._served.of((part, tier, model))
        return found

    def budget_used(self, side: str, policy: Policy) -> float | None:
        return self._gates[side].budget_used(policy)

    def _learn(self, request: Recorded, weights: Vector) -> None:
        self.costing.learn(request, weights)
        if request.fate != "answered" or request.served is None:
            return
        model = request.served.model
        if request.duration_ms is not None:
            self.whole.learn(request, model, weights, request.duration_ms)
        if request.ttft_ms is not None and request.facts.stream:
            self.first.learn(request, model, weights, request.ttft_ms)

    def _resolve(self, side: str, request: Recorded) -> Policy:
        facts = request.facts
        subject = Subject(
            organisation=facts.organisation, team=facts.team, project=facts.project, key=facts.key, model=facts.model
        )
        return self.sets[side].resolve(subject, request.request_id)

    def _decide(self, side: str, request: Recorded) -> _Outcome:
        policy = self._resolve(side, request)
        facts = request.facts
        used = self._gates[side].budget_used(policy)
        if used is not None:
            facts = replace(facts, budget_used=used)
        decision = self._decider.decide(policy, request, facts)
        decision, turn = self.conversations[side].hold(policy, request, decision)
        return _Outcome(policy, decision, turn, None, False, False)

    def _compare(self, request: Recorded, old: _Outcome, new: _Outcome, weights: Vector) -> None:
        if request.version == old.policy.version and request.policy == old.policy.name:
            self.count["checked"] += 1
            self.count["reproduced"] += request.rule == old.decision.rule
        for side, outcome in zip(SIDES, (old, new), strict=True):
            self.rules[side][outcome.policy.name, outcome.decision.rule] += 1
        self._place(request, old, new)
        for side, outcome in zip(SIDES, (old, new), strict=True):
            self.conversations[side].follow(request, outcome.turn, outcome.served)
        if request.fate == "failed":
            self.count["failed"] += 1
        for side, outcome in zip(SIDES, (old, new), strict=True):
            outcome.cost_nanousd = self._cost_of(request, outcome)
            outcome.stopped = self._gates[side].ask(request, outcome.policy, outcome.cost_nanousd, hit=outcome.hit)
        self._settle_stops(request, old, new)
        self._climb(request, old, new, weights)
        if request.fate == "refused" and old.stopped is None:
            self.count["refused_otherwise"] += 1
            return
        self.count["compared"] += 1
        if _differs(old, new):
            self.count["changed"] += 1
            self._keep(request, old, new)
        if request.fate == "hit":
            self.count["hits"] += 1
            self.count["hits_lost"] += old.hit and not new.hit
        same = old.policy.name == new.policy.name and old.stopped is None and new.stopped is None
        alike = old.hit == new.hit and old.cost_nanousd == new.cost_nanousd
        if same and old.as_recorded and new.as_recorded and alike:
            self._add(BOTH, request, old, weights)
            return
        for side, outcome in zip(SIDES, (old, new), strict=True):
            self._add(side, request, outcome, weights)

    def _place(self, request: Recorded, old: _Outcome, new: _Outcome) -> None:
        """Who answers on each side."""
        old.as_recorded = _decided_by(old, request) or _same_target(old.decision, request)
        new.as_recorded = (
            (old.as_recorded and _goes_as(old.decision, new.decision) and _known(new) in (None, _known(old)))
            or _decided_by(new, request)
            or _same_target(new.decision, request)
        )
        if request.failed_first is not None and _decided_by(old, request) and not _checked_alike(old, new):
            new.as_recorded = False  # the first answer may have been given
        for outcome in (old, new):
            recorded = outcome.as_recorded and request.served is not None
            elsewhere = self._world.serve(outcome.decision, request.facts, _known(outcome))
            outcome.served = request.served if recorded else elsewhere
            mode = outcome.decision.cache.mode
            outcome.hit = request.fate == "hit" and mode != "off" and (mode == "semantic" or not request.semantic)

    def _climb(self, request: Recorded, old: _Outcome, new: _Outcome, weights: Vector) -> None:
        """What is known, or expected, of answers that are checked before they are given."""
        if request.fate != "answered":
            return
        told = _decided_by(old, request)
        checked = old.decision.escalate if told else None
        if checked is not None:
            self.climbs.learn(request, checked, weights)
        for side, outcome in zip(SIDES, (old, new), strict=True):
            escalate = outcome.decision.escalate
            if escalate is None or outcome.served is None or outcome.stopped is not None:
                continue
            # What its record holds was checked as it would be, as far as that can be told.
            as_recorded = not told or (checked is not None and checks_of(checked) == checks_of(escalate))
            if not (outcome.as_recorded and as_recorded):
                policy, served = outcome.policy, outcome.served
                self.climbs.expect(side, request, policy, outcome.decision, served, weights)

    def _cost_of(self, request: Recorded, outcome: _Outcome) -> int:
        if outcome.hit:
            return outcome.decision.cache.charged(request.saved_nanousd + request.cost_nanousd)
        if outcome.as_recorded and request.fate in ("answered", "failed"):
            return request.cost_nanousd
        if outcome.served is None:
            return 0
        return sum(self._world.cost(outcome.served.model, request.tokens))

    def _settle_stops(self, request: Recorded, old: _Outcome, new: _Outcome) -> None:
        """What was let through in truth was; so what both sides would stop, neither does, if it was answered."""
        kept = request.fate == "refused"
        for outcome, other in ((old, new), (new, old)):
            if outcome.stopped is not None:
                self.stops["old" if outcome is old else "new", outcome.policy.name, outcome.stopped] += 1
                if other.stopped is None:
                    which = "no_more" if outcome is old else "newly"
                    self.stops[which, outcome.policy.name, outcome.stopped] += 1
        if not kept:
            if old.stopped is not None:
                new.stopped = None
            old.stopped = None
        for outcome in (old, new):
            if outcome.stopped in WAITS:
                outcome.stopped = None

    def _add(self, side: str, request: Recorded, outcome: _Outcome, weights: Vector) -> None:
        if outcome.stopped is not None:
            self.count[f"refused_{side}"] += 1
            return
        served = outcome.served
        tier, model = (served.tier, served.model) if served is not None else ("none", "none")
        self._served.add((side, tier or "none", model), weights)
        if served is not None and request.fate != "failed":
            self.quality.add(side, self._world.table(outcome.policy), request.facts.profile, served.tier, weights)
        if outcome.hit or (outcome.as_recorded and request.fate in ("answered", "failed")):
            self.costing.known(side, weights, outcome.cost_nanousd)
            if request.fate != "failed" and request.duration_ms is not None:
                self.whole.known(side, weights, request.duration_ms)
                if request.ttft_ms is not None and request.facts.stream:
                    self.first.known(side, weights, request.ttft_ms)
        elif served is not None:
            self.costing.elsewhere(side, request, served.model, weights)
            self.whole.elsewhere(side, served.model, request, weights)
            if request.facts.stream:
                self.first.elsewhere(side, served.model, request, weights)

    def _keep(self, request: Recorded, old: _Outcome, new: _Outcome) -> None:
        change = abs(new.cost_nanousd * (new.stopped is None) - old.cost_nanousd * (old.stopped is None))
        if len(self._most) == MOST_CHANGED and change <= self._most[0][0]:
            return
        changed = Changed(request_id=request.request_id, ts_ms=request.ts_ms, old=_side(old), new=_side(new))
        item = (change, -self.count["requests"], changed)
        if len(self._most) < MOST_CHANGED:
            heapq.heappush(self._most, item)
        else:
            heapq.heapreplace(self._most, item)


def _decided_by(outcome: _Outcome, request: Recorded) -> bool:
    return (outcome.policy.name, outcome.policy.version) == (request.policy, request.version)


def _same_target(decision: Decision, request: Recorded) -> bool:
    """Whether the decision sends a request where its record says that it went."""
    if decision.model is not None:
        return decision.model == request.wanted
    return (decision.requested_tier or "") == request.tier and bool(request.tier)


def _checked_alike(old: _Outcome, new: _Outcome) -> bool:
    one, other = old.decision.escalate, new.decision.escalate
    return one is not None and other is not None and checks_of(one) == checks_of(other)


def _known(outcome: _Outcome) -> str | None:
    """The model that its conversation prefers."""
    return None if outcome.turn is None else outcome.turn.model


def _goes_as(one: Decision, other: Decision) -> bool:
    return (one.tier, one.model, one.requested_tier) == (other.tier, other.model, other.requested_tier)


def _differs(old: _Outcome, new: _Outcome) -> bool:
    """Whether the sides make different things of a request: another place, no hit, or a refusal."""
    return (
        not _goes_as(old.decision, new.decision)
        or old.served != new.served
        or old.hit != new.hit
        or old.stopped != new.stopped
    )


def _side(outcome: _Outcome) -> Side:
    served = outcome.served
    return Side(
        policy=outcome.policy.name,
        rule=outcome.decision.rule,
        tier=outcome.decision.requested_tier or (served.tier if served else ""),
        model=served.model if served is not None else "",
        cost_nanousd=0 if outcome.stopped is not None else outcome.cost_nanousd,
        stopped=outcome.stopped,
    )
