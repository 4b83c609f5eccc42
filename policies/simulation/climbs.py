"""Further steps of checked answers in a simulation: how often a model's answers fail checks, and what a step costs.

Nobody knows whether an answer that was never given would have passed. How often a model's answers fail is on record
where a policy in force checked them: their share is taken for answers that other requests would get from it, under the
very same checks. One step is counted, to the next tier that `escalate.to` names; a second one is not.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from policies.evaluate import Decision, with_tier
from policies.load import Policy
from policies.schema.escalation import Escalate
from policies.simulation.recorded import Recorded, Served, World
from policies.simulation.sums import Sums, Vector, nothing, ratio
from tiers import TIERS

LEAST_CHECKED: Final = 30  # answers of a model, for a share of those that fail
Checks = tuple[frozenset[str], float | None, float | None]
_Asked = tuple[str, Checks]


class Climbs:
    """Sums over requests: answers that were checked and failed, and what a step of others would cost, by side."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._checked: Sums[_Asked] = Sums()
        self._failed: Sums[_Asked] = Sums()
        self._costs: Sums[tuple[str, str, Checks]] = Sums()
        self._requests: Sums[tuple[str, str, Checks]] = Sums()

    def learn(self, request: Recorded, escalate: Escalate, weights: Vector) -> None:
        """An answer that was checked by these, and what came of it."""
        first = request.failed_first or request.served
        if first is None:
            return
        asked = (first.model, checks_of(escalate))
        self._checked.add(asked, weights)
        if request.failed_first is not None:
            self._failed.add(asked, weights)

    def expect(
        self, side: str, request: Recorded, policy: Policy, decision: Decision, served: Served, weights: Vector
    ) -> None:
        """A request would be answered by this model, and the answer checked as the decision says."""
        assert decision.escalate is not None
        target = self._next(policy, decision, served, request)
        if target is None:
            return
        group = (side, served.model, checks_of(decision.escalate))
        self._costs.add(group, weights, float(sum(self._world.cost(target.model, request.tokens))))
        self._requests.add(group, weights)

    def total(self, side: str) -> Vector:
        """What further steps of a side are expected to cost, in nano-dollars; nothing where nobody knows."""
        found = nothing()
        for group in self._costs:
            if group[0] == side and (share := self._share(group[1:])) is not None:
                found = found + self._costs.of(group) * share
        return found

    def counts(self, side: str) -> tuple[float, int, int]:
        """Steps that are expected of a side, of how many requests, and requests of which nobody knows."""
        steps, known, unknown = 0.0, 0, 0
        for group in self._requests:
            if group[0] == side:
                number, share = float(self._requests.of(group)[0]), self._share(group[1:])
                if share is None:
                    unknown += round(number)
                else:
                    steps, known = steps + number * float(share[0]), known + round(number)
        return steps, known, unknown

    def _share(self, asked: _Asked) -> Vector | None:
        checked = self._checked.of(asked)
        return ratio(self._failed.of(asked), checked) if checked[0] >= LEAST_CHECKED else None

    def _next(self, policy: Policy, decision: Decision, served: Served, request: Recorded) -> Served | None:
        """Who is asked after this one; None where nobody larger can be."""
        assert decision.escalate is not None
        if served.tier not in TIERS:
            return None
        to, at = decision.escalate.to, TIERS.index(served.tier)
        tiers = TIERS if to == "next" else (to,) if isinstance(to, str) else to
        for tier in tiers:
            if TIERS.index(tier) > at and tier in policy.served:
                return self._world.serve(with_tier(policy, replace(decision, model=None), tier), request.facts)
        return None


def checks_of(escalate: Escalate) -> Checks:
    """What makes an answer fail: equal for settings under which the same answers do."""
    sure = escalate.asks_confidence
    bare = escalate.mean_logprob if sure else None
    return frozenset(escalate.when), escalate.confidence if sure and bare is None else None, bare
