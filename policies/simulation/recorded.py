"""One recorded request as a simulation sees it, and what it must be told of the world: prices, models, limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from policies.evaluate import Decision
from policies.facts import Facts
from policies.load import Policy
from tiers.session import Pin
from tiers.success import SuccessTable

# answered: by a model; hit: by the cache; failed: models were asked in vain; refused: none was asked.
Fate = Literal["answered", "hit", "failed", "refused"]


class Tokens(msgspec.Struct, frozen=True):
    """What an answer used: cached and written input are part of the input, reasoning is part of the output."""

    input: int = 0
    output: int = 0
    cached_input: int = 0
    cache_write: int = 0
    reasoning: int = 0


class Served(msgspec.Struct, frozen=True):
    model: str
    tier: str


class Recorded(msgspec.Struct, kw_only=True, frozen=True):
    """A request that was decided, and what became of it.

    Attributes:
        policy, version, rule: what decided it; `tier` is the tier decided on, `wanted` the first candidate's model.
        served: who answered; of a hit, whose answer was given; None where nobody did.
        tokens: of the answer, or estimated where there is none.
        cost_nanousd: of all its attempts. saved_nanousd: of a hit.
        semantic: the hit was one in other words.
        failed_first: who was asked first, where that answer failed a check and a larger tier was asked.
        conversation: which one it is a turn of, where a policy that keeps them decided it; `pin` is where that was.
    """

    request_id: str
    ts_ms: int
    facts: Facts
    policy: str
    version: str
    rule: str
    tier: str
    wanted: str
    fate: Fate
    served: Served | None = None
    tokens: Tokens = Tokens()
    cost_nanousd: int = 0
    saved_nanousd: int = 0
    semantic: bool = False
    ttft_ms: float | None = None
    duration_ms: float | None = None
    failed_first: Served | None = None
    conversation: str | None = None
    pin: Pin | None = None


class World(Protocol):
    """What the policies decide about."""

    def serve(self, decision: Decision, facts: Facts, known: str | None = None) -> Served | None:
        """Who would be asked first, of the decided tier the `known` model before others; None where no model can."""
        ...

    def cost(self, model: str, tokens: Tokens) -> tuple[int, int]:
        """What it costs, in nano-dollars: input with fees, and output."""
        ...

    def table(self, policy: Policy) -> SuccessTable:
        """What `tier: auto` of a policy goes by."""
        ...

    def conditions(self, policy: str, version: str) -> Sequence[tuple[str, str | None]] | None:
        """Names and conditions of the rules of a version that was in force; None where it is not known."""
        ...


class Gate(Protocol):
    """The limits of one set of policies, in the time of the recording. Requests come in its order."""

    def ask(self, request: Recorded, policy: Policy, cost_nanousd: int, *, hit: bool) -> str | None:
        """Have a request in; or the kind of limit that stops it, `parallel` where it would wait for its turn.

        `hit`: the cache answers, so its tokens count against nothing.
        """
        ...

    def budget_used(self, policy: Policy) -> float | None:
        """The spent share of the policy's budget; None where it has none."""
        ...
