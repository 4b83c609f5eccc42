"""Whether a conversation stays on its tier or moves: a pin, what a switch costs, and hysteresis. Plain arithmetic.

A switch throws away the prompt cache of the model that is left, and the next model reads the whole conversation anew.
So a turn that wants a larger tier gets it at once where it gains more P(success) than `needed`; one that wants less
stays: until the pin ends, or until enough turns in a row wanted less. What a policy's rule names counts as gain enough.

It promises: a wish beyond the margin is served in the turn that has it; without downgrades a conversation never returns
to a tier that it left, whatever is wished, and with them wishes within the margin never make it; each return doubles
the turns before the next downgrade, so `n` turns hold about log2(n) of them. The same input gives the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from tiers import TIERS

Outcome = Literal["new", "kept", "upgraded", "downgraded", "moved"]

# The most P(success) that a switch can cost: one that loses all, set against a turn that costs nothing beside it.
SWITCH_WEIGHT: Final = 0.1
# A wait of as long as this for the conversation to be read anew weighs half.
WAIT_S: Final = 5.0
_MOST_RETURNS: Final = 16


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a conversation is.

    Attributes:
        tokens: what its last turn left in the prompt cache of `model`.
        fewer: turns in a row, up to now, that wanted a smaller tier.
        largest: the largest tier that those wanted; "" where there are none.
        returns: how often it had to go up again after a downgrade.
        came_down: whether its last switch was a downgrade.
    """

    tier: str
    model: str
    tokens: int = 0
    fewer: int = 0
    largest: str = ""
    returns: int = 0
    came_down: bool = False


@dataclass(frozen=True, slots=True)
class Terms:
    """A policy's settings: P(success) that a switch must gain beyond its cost, and turns before a downgrade; None: none
    before the pin ends."""

    margin: float
    downgrade_after: int | None


@dataclass(frozen=True, slots=True)
class Wish:
    """What a turn would get by itself.

    Attributes:
        tier, model: where it would go; the model only where a rule names one.
        known: False where nobody could tell what it needs: such a turn never counts as wanting less.
        sticky: False where the policy wants it to go there whatever the pin says; for this turn, the pin stays.
        p_success: of each tier, where that was estimated.
    """

    tier: str
    model: str | None = None
    known: bool = True
    sticky: bool = True
    p_success: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """What leaving the pinned model costs.

    Attributes:
        lost_nanousd: the discount on the conversation's tokens, which lie in the prompt cache of the model left.
        turn_nanousd: what this turn costs on the model that it would go to.
        reread_s: how long that model takes to read the conversation.
    """

    lost_nanousd: int = 0
    turn_nanousd: int = 0
    reread_s: float = 0.0

    def share(self) -> float:
        """P(success) that a switch must gain for it, in [0, `SWITCH_WEIGHT`]."""
        money = self.lost_nanousd / (self.lost_nanousd + self.turn_nanousd) if self.lost_nanousd > 0 else 0.0
        return SWITCH_WEIGHT * max(money, self.reread_s / (self.reread_s + WAIT_S))


NO_COST: Final = SwitchCost()


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of a turn.

    `model` is the model to prefer within `tier`; None: whichever is first. `pin` is the conversation's next pin, before
    it is known which model answers. `gain` and `needed` are there where they were weighed against each other.
    """

    outcome: Outcome
    tier: str
    model: str | None
    why: str
    pin: Pin
    gain: float | None = None
    needed: float | None = None


def step(pin: Pin | None, wish: Wish, terms: Terms, cost: SwitchCost = NO_COST) -> Step:
    """Decide one turn. `cost` is looked at where the turn wants a larger tier than it is on."""
    if pin is None:
        fresh = Pin(wish.tier, wish.model or "")
        return Step("new", wish.tier, wish.model, "the conversation begins here", fresh)
    if not wish.sticky:
        if wish.tier == pin.tier and wish.model in (None, pin.model):
            return _kept(pin, f"it is on '{pin.tier}' already")
        why = f"the rule is not sticky, so this turn leaves '{pin.tier}', where the conversation stays"
        return Step("moved", wish.tier, wish.model, why, pin)
    at, wanted = TIERS.index(pin.tier), TIERS.index(wish.tier)
    if wanted > at:
        return _larger(pin, wish, terms, cost)
    if wanted < at and wish.known:
        return _smaller(pin, wish, terms)
    if not wish.known:
        return _kept(pin, f"nobody can tell what this turn needs, and it is on '{pin.tier}' already")
    return _kept(replace(pin, fewer=0, largest=""), f"it wants '{pin.tier}' again")


def answered(pin: Pin, tier: str, model: str, tokens: int) -> Pin:
    """The pin once a model has answered: it follows to where that was, also where that was not what was decided."""
    if tier != pin.tier:
        return Pin(tier, model, tokens, returns=pin.returns)
    return replace(pin, model=model, tokens=tokens)


def _kept(pin: Pin, why: str, gain: float | None = None, needed: float | None = None) -> Step:
    return Step("kept", pin.tier, pin.model or None, why, pin, gain, needed)


def _larger(pin: Pin, wish: Wish, terms: Terms, cost: SwitchCost) -> Step:
    gain = needed = None
    odds = wish.p_success
    if odds and pin.tier in odds and wish.tier in odds:
        gain, needed = odds[wish.tier] - odds[pin.tier], terms.margin + cost.share()
        weighed = f"'{wish.tier}' would gain {gain:.3f} of P(success), a switch needs more than {needed:.3f}"
        if gain <= needed:
            why = f"{weighed}: it stays on '{pin.tier}'"
            return _kept(replace(pin, fewer=0, largest=""), why, gain, needed)
        why = f"{weighed}: it leaves '{pin.tier}'"
    else:
        why = f"this turn is decided for the larger '{wish.tier}': it leaves '{pin.tier}'"
    returns = min(pin.returns + pin.came_down, _MOST_RETURNS)
    return Step("upgraded", wish.tier, wish.model, why, Pin(wish.tier, "", returns=returns), gain, needed)


def _smaller(pin: Pin, wish: Wish, terms: Terms) -> Step:
    """A downgrade goes no further down than to the largest tier that one of the turns in a row wanted."""
    if terms.downgrade_after is None:
        return _kept(pin, f"it would do with '{wish.tier}', and is on '{pin.tier}' until the conversation rests")
    fewer = pin.fewer + 1
    patience = terms.downgrade_after << pin.returns
    largest = max(pin.largest or wish.tier, wish.tier, key=TIERS.index)
    if fewer < patience:
        why = f"turn {fewer} of {patience} in a row that would do with less than '{pin.tier}'"
        return _kept(replace(pin, fewer=fewer, largest=largest), why)
    model = wish.model if wish.tier == largest else None
    why = f"{fewer} turns in a row would have done with '{largest}' or less: it leaves '{pin.tier}'"
    return Step("downgraded", largest, model, why, Pin(largest, "", returns=pin.returns, came_down=True))
