"""What is known of one turn of a conversation: what it came from, what was weighed, and what came of it."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.sessions.identity import Identity
from tiers.session import Outcome, Pin, Step, SwitchCost, Terms, Wish, step


class Turn(msgspec.Struct):
    """One turn. `seconds`: how long the conversation is kept after it. `pin`: where it was before."""

    identity: Identity
    seconds: float
    pin: Pin | None
    wish: Wish
    terms: Terms
    cost: SwitchCost
    step: Step
    followed: bool = False

    def said(self, tier: str, model: str) -> Outcome:
        """What the client is told, by the model that answered: one that was not decided on is a move."""
        decided = self.step.outcome
        if self.pin is None or decided == "moved":
            return decided
        if (tier, model) == (self.pin.tier, self.pin.model):
            return "kept"  # also where it may not go, or found nobody where it wanted to go
        return "moved" if tier != self.step.tier or (decided == "kept" and self.pin.model) else decided

    def recorded(self) -> dict[str, Any]:
        """For the record of the decision: all that `step_again` needs, in numbers and labels."""
        seen: dict[str, Any] = {
            "id": self.identity.id[:12],
            "by": self.identity.source,
            "outcome": self.step.outcome,
            "pin": None if self.pin is None else msgspec.to_builtins(self.pin),
            "wanted": self.wish.tier,
            "wanted_model": self.wish.model,
            "known": self.wish.known,
            "sticky": self.wish.sticky,
            "terms": {"margin": self.terms.margin, "downgrade_after": self.terms.downgrade_after},
        }
        if self.step.gain is not None:
            seen |= {"gain": self.step.gain, "needed": self.step.needed, "cost": msgspec.to_builtins(self.cost)}
        return seen


def step_again(features: dict[str, Any]) -> Step:
    """The step of a turn from the record of its decision (`features`), which tells the same.

    Raises:
        KeyError: it is not the record of a turn.
    """
    seen = features["session"]
    wish = Wish(seen["wanted"], seen["wanted_model"], seen["known"], seen["sticky"], features.get("p_success"))
    pin = None if seen["pin"] is None else Pin(**seen["pin"])
    return step(pin, wish, Terms(**seen["terms"]), SwitchCost(**seen.get("cost", {})))
