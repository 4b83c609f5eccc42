"""What a replica is chosen by, of one request, and what the request puts on the replicas it was sent to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.placement.chain import Chain

if TYPE_CHECKING:
    from backends.prefilling import Leg, Prefilling
    from backends.replica import Replica

OUTPUT_WORK = 0.5  # of a token that is computed: answers are written side by side, a prompt takes whole steps


class Load:
    """What one attempt puts on a replica: tokens to compute before it can begin, and afterwards."""

    __slots__ = ("ahead", "output", "prefill")

    def __init__(self, prefill: float, output: float, ahead: float) -> None:
        self.prefill = prefill
        self.output = output
        self.ahead = ahead  # work on the replica when it came


class Placement:
    """Made by the gateway, one per request that has a choice between replicas; changed by `Placer` only.

    Args:
        prompt_tokens, output_tokens: as far as they can be told beforehand.
        patient: nobody waits for the answer now.
        chain: beginnings of the prompt.
    """

    __slots__ = ("chain", "expected_hit", "legs", "loads", "output_tokens", "patient", "prompt_tokens", "why")

    def __init__(self, prompt_tokens: int, output_tokens: int, patient: bool = False, chain: Chain = ()) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.patient = patient
        self.chain = chain
        self.why = ""  # the latest choice: a word for people and metrics
        self.expected_hit = 0  # tokens that the latest choice is believed to hold
        self.loads: dict[Replica, Load] = {}
        self.legs: dict[Prefilling, Leg | None] = {}  # prompts computed elsewhere; None: that is under way

    def said(self) -> str:
        """The latest choice, for the record."""
        return f"{self.why} {self.expected_hit}/{self.prompt_tokens}"

    def begin(self, replica: Replica, hit: int) -> None:
        """It goes to this replica, which is believed to hold so many of its tokens."""
        load = Load(max(0, self.prompt_tokens - hit), self.output_tokens * OUTPUT_WORK, replica.work)
        self.loads[replica] = load
        replica.work += load.prefill + load.output

    def computed(self, replica: Replica) -> Load | None:
        """Its answer has begun: the prompt is computed. Returns what that took, once."""
        load = self.loads.get(replica)
        if load is None or not load.prefill:
            return None
        replica.work -= load.prefill
        told = Load(load.prefill, load.output, load.ahead)
        load.prefill = 0.0
        return told

    def end(self, replica: Replica) -> None:
        """It is over there, whatever became of it."""
        load = self.loads.pop(replica, None)
        if load is not None:
            # An idle replica has no work: sums of fractions would leave some.
            replica.work = replica.work - load.prefill - load.output if replica.outstanding else 0.0
