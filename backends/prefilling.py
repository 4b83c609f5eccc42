"""A long prompt is computed by one replica before another one answers: the first leg of an attempt.

The replica that answers is told where it finds the prompt's keys and values. It is never worse off than without: where
the first leg fails, is busy or takes too long, it computes the prompt itself. The leg belongs to the attempt: its time
counts, and who leaves meanwhile has begun an attempt.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from backends.attempt import AttemptFailed, Call, Candidate
from backends.connection import FailureKind, HttpFailure
from backends.openai import OPENAI
from backends.placement.asked import Placement
from backends.protocol import PAGES_FROM_HEADER, PREFILLED_HEADER
from backends.replica import Replica

if TYPE_CHECKING:
    from backends.pool import Pool

# computed: the pages are there. busy: no replica was free. refused: it answered 4xx. late, failed: as the words say.
LegOutcome = Literal["computed", "busy", "refused", "late", "failed"]
LEG_OUTCOMES: tuple[LegOutcome, ...] = get_args(LegOutcome)
_MAX_ANSWER_BYTES = 1 << 16
_ADDRESS_CHARACTERS = 300
_LATE: FailureKind = "total_timeout"


class Leg(msgspec.Struct, frozen=True):
    """What became of a prompt's computation. `replica`: its base URL, empty where none was asked; `tokens`: computed
    for this request; `pages_at`: where they are, None where the answering replica knows."""

    outcome: LegOutcome
    replica: str = ""
    seconds: float = 0.0
    tokens: int = 0
    pages_at: str | None = None

    def headers(self) -> Mapping[str, str]:
        """For the replica that answers."""
        if self.outcome != "computed":
            return {}
        where = {} if self.pages_at is None else {PAGES_FROM_HEADER: self.pages_at}
        return {**where, PREFILLED_HEADER: str(self.tokens)}


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Computed(msgspec.Struct):
    usage: _Usage
    pages_at: str | None = None
    prompt_page: str | None = None


_decoder = msgspec.json.Decoder(_Computed)


class Prefilling:
    """The replicas of one backend that compute prompts for its others.

    Args:
        pool: of those replicas.
        from_tokens: prompts of which the answering replica lacks fewer are not worth it.
        timeout_s: the longest that the leg may take.
    """

    def __init__(self, pool: Pool, from_tokens: int, timeout_s: float) -> None:
        self.pool = pool
        self.legs: Counter[LegOutcome] = Counter()
        self.tokens = 0  # computed, ever
        self._from_tokens = from_tokens
        self._timeout_s = timeout_s

    def wanted(self, call: Call, replica: Replica) -> bool:
        """Whether this replica should not compute the prompt itself."""
        placement = call.placement
        if not replica.place.fetches or placement is None or self in placement.legs:
            return False
        missing = placement.prompt_tokens - placement.expected_hit
        return missing >= self._from_tokens and _takes_pages(call.payload)

    async def ask(self, call: Call, candidate: Candidate, ends: float) -> Leg:
        """Have the prompt computed. Raises nothing but what cancelling it raises.

        `ends`: monotonic seconds at which the whole call has to be over.
        """
        placement = call.placement
        assert placement is not None
        placement.legs[self] = None  # a second attempt meanwhile computes for itself
        leg = await self._ask(call, candidate, placement, ends)
        placement.legs[self] = leg
        self.legs[leg.outcome] += 1
        self.tokens += leg.tokens
        return leg

    def again(self, call: Call, replica: Replica) -> Leg | None:
        """What an earlier attempt has had computed, where it is of use to this replica."""
        if call.placement is None or not replica.place.fetches:
            return None
        return call.placement.legs.get(self)

    async def _ask(self, call: Call, candidate: Candidate, asked: Placement, ends: float) -> Leg:
        pool, started = self.pool, time.monotonic()
        placement = Placement(asked.prompt_tokens, 0, asked.patient, asked.chain)
        replica = pool.acquire((), placement)
        if replica is None:
            return Leg("busy")
        computed: _Computed | None = None
        outcome: LegOutcome = "refused"
        try:
            deadline = min(ends, started + self._timeout_s)
            kind: FailureKind = _LATE if deadline < ends else "deadline"
            computed = await self._computed(pool, replica, call, candidate, deadline, kind)
        except AttemptFailed as failure:
            outcome = "late" if failure.kind in (_LATE, "deadline") else "failed"
            pool.failed(replica, failure, time.monotonic() - started)
        else:
            pool.succeeded(replica)
            if computed is not None and pool.placer is not None:
                pool.placer.answered(replica, placement, computed.prompt_page or "")
        finally:
            pool.release(replica, placement)
        seconds = time.monotonic() - started
        if computed is None:
            return Leg(outcome, replica.base_url, seconds)
        usage = computed.usage
        tokens = max(0, usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens)
        return Leg("computed", replica.base_url, seconds, tokens, computed.pages_at)

    @staticmethod
    async def _computed(
        pool: Pool, replica: Replica, call: Call, candidate: Candidate, deadline: float, kind: FailureKind
    ) -> _Computed | None:
        """What the replica says; None: it refuses the request, as the other will with better words."""
        try:
            exchange = await pool.client.send(
                replica.endpoint.origin,
                OPENAI.post_prefill(replica.endpoint, call, candidate),
                connect_s=pool.timeouts.connect_s,
                deadline=deadline,
                deadline_kind=kind,
                first_token_deadline=float("inf"),
            )
            try:
                body = await exchange.read_all(_MAX_ANSWER_BYTES)
            except BaseException:
                exchange.close()
                raise
        except HttpFailure as failure:
            raise AttemptFailed.by(failure) from failure
        if 400 <= exchange.status < 500 and exchange.status not in (408, 429):
            return None
        if exchange.status != 200:
            raise AttemptFailed("upstream_error", f"status {exchange.status}")
        try:
            computed = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise AttemptFailed("protocol", f"it does not say what it has computed: {error}") from error
        at = computed.pages_at
        if at is not None and not (0 < len(at) <= _ADDRESS_CHARACTERS and at.isascii() and at.isprintable()):
            raise AttemptFailed("protocol", "it says no address of its pages")
        return computed


def _takes_pages(payload: Mapping[str, Any]) -> bool:
    """Whether an engine would use pages: not where answers must be reproducible, nor where the prompt is scored."""
    seeded = payload.get("seed") is not None and payload.get("temperature") != 0
    return not (seeded or payload.get("echo") or payload.get("prompt_logprobs") is not None)
