"""Conversations in a simulation: where each is on one side, by the step that the gateway takes (`tiers/session.py`).

A record names the conversation of a turn and where it was then, if a policy with `session` decided it. From the first
such turn on each side goes its own way. What the gateway also weighs, how long a model takes to read a conversation
anew, is not on record and left out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from msgspec.structs import replace

from policies.evaluate import Decision, with_tier
from policies.load import Policy
from policies.schema.session import SessionPolicy
from policies.simulation.recorded import Recorded, Served, Tokens, World
from tiers import TIERS
from tiers.session import NO_COST, Pin, Step, SwitchCost, Terms, Wish, answered, step

_MOST: Final = 100_000  # conversations of a side; the one that has rested longest goes first
# Decisions that are nobody's to change.
_SETTLED: Final = ("pinned", "named model")


class Conversations:
    """The conversations of one side. `turns` were replayed; `alone` are of policies that keep conversations, but their
    record names none."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pins: OrderedDict[str, tuple[int, Pin]] = OrderedDict()
        self.turns = self.alone = self.switches = 0

    def hold(self, policy: Policy, request: Recorded, decision: Decision) -> tuple[Decision, Step | None]:
        """What the conversation makes of the decision on its turn."""
        session = policy.document.session
        if session is None or session.pin is None or decision.rule in _SETTLED:
            return decision, None
        wish = self._wish(policy, request, decision)
        if wish is None:
            return decision, None
        if request.conversation is None:
            self.alone += 1
            return decision, None
        self.turns += 1
        pin = self._pin(request, session)
        terms = Terms(session.margin, None if session.downgrade_after == "never" else session.downgrade_after)
        taken = step(pin, wish, terms, self._cost(request, decision, pin, wish))
        self.switches += taken.outcome in ("upgraded", "downgraded")
        if taken.tier != wish.tier or (wish.model is not None and taken.model != wish.model):
            decision = with_tier(policy, replace(decision, model=None, fallback_reason=None), taken.tier)
        return decision, taken

    def follow(self, request: Recorded, taken: Step | None, served: Served | None) -> None:
        """Keep where the conversation is after its turn."""
        if taken is None or request.conversation is None:
            return
        pin = taken.pin
        if request.fate == "answered" and served is not None and taken.outcome != "moved":
            pin = answered(pin, served.tier, served.model, request.tokens.input + request.tokens.output)
        self._pins[request.conversation] = (request.ts_ms, pin)
        self._pins.move_to_end(request.conversation)
        if len(self._pins) > _MOST:
            self._pins.popitem(last=False)

    def _pin(self, request: Recorded, session: SessionPolicy) -> Pin | None:
        assert request.conversation is not None
        assert session.pin is not None
        known = self._pins.get(request.conversation)
        if known is None:
            return request.pin  # begun before the recording, or here
        at_ms, pin = known
        return pin if request.ts_ms - at_ms <= session.pin * 1000 else None

    def _wish(self, policy: Policy, request: Recorded, decision: Decision) -> Wish | None:
        """What the policy decided, as a wish; None where it leaves nothing to stay on."""
        sticky = decision.rule != "budget exhausted"
        if decision.rule_index is not None:
            route = next(rule.route for rule in policy.rules if rule.index == decision.rule_index)
            if route.cascade is not None:
                return None
            sticky = route.sticky
        tier = decision.tier
        if decision.model is not None:
            served = self._world.serve(decision, request.facts)
            tier = served.tier if served is not None and served.model == decision.model else None
        if tier not in TIERS:
            return None
        odds = None if decision.auto is None else decision.auto.p_success
        return Wish(tier, decision.model, known=odds is None or bool(odds), sticky=sticky, p_success=odds)

    def _cost(self, request: Recorded, decision: Decision, pin: Pin | None, wish: Wish) -> SwitchCost:
        """The lost discount on what the pinned model has in its prompt cache, beside what the turn costs."""
        if pin is None or not wish.p_success or TIERS.index(wish.tier) <= TIERS.index(pin.tier):
            return NO_COST
        target = self._world.serve(decision, request.facts)
        if target is None:
            return NO_COST
        fresh, _ = self._world.cost(pin.model, Tokens(input=pin.tokens))
        cached, _ = self._world.cost(pin.model, Tokens(input=pin.tokens, cached_input=pin.tokens))
        return SwitchCost(
            lost_nanousd=max(0, fresh - cached),
            turn_nanousd=sum(self._world.cost(target.model, request.tokens)),
        )
