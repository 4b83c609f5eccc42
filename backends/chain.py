"""One call's way through its candidates: try, retry on another replica, fall back to the next, until one answers.

It promises an end: at most `Limits.max_attempts` attempts and `Limits.total_s` seconds, waiting included; that retries
keep to their share of a backend's requests; and that what a server refused goes on only to a candidate that may take
it. Two calls of `answer` share one chain where an answer is continued: what was tried stays tried.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from backends.attempt import (
    Attempt,
    AttemptFailed,
    AttemptObserver,
    Call,
    Candidate,
    NoBackend,
    NoBackendKind,
    UpstreamRefused,
)
from backends.attempting import Dispatched, attempt_at
from backends.dialect import CannotTranslate
from backends.errors import CONTENT_POLICY, CONTEXT_LENGTH
from backends.hedge import LOST, race
from backends.pool import Pool
from backends.replica import Replica

BACK_OFF_S = 0.1  # before a second try on the same replica; doubles, jittered
BACK_OFF_MAX_S = 2.0
PATIENCE_S = 1.0  # how long a request waits for the end of a Retry-After while another candidate is left

# What each way of failing means for the client: status and sentence. No addresses: those are in the attempts.
_ENDINGS: dict[NoBackendKind, tuple[int, str]] = {
    "unavailable": (503, "no server could be reached"),
    "overloaded": (503, "every server is busy, or says that it serves again soon"),
    "rate_limited": (429, "the servers limit the rate of requests"),
    "timeout": (504, "no server answered in time"),
    "deadline": (504, "the request's deadline passed before an answer began"),
    "upstream_error": (502, "the servers answered with errors"),
}
# The same where it did not even come to an attempt.
_UNASKED: dict[str, str] = {
    "overloaded": "No server was asked: each has as many requests as it may have.",
    "rate_limited": "No server was asked: each has said that it takes no requests for a while.",
    "resting": "No server was asked: each has said that it takes no requests for a while.",
    "deadline": "The request's deadline had passed before a server could be asked.",
}
_KINDS: dict[str, NoBackendKind] = {
    "connect": "unavailable",
    "connect_timeout": "unavailable",
    "overloaded": "overloaded",
    "resting": "overloaded",
    "rate_limited": "rate_limited",
    "first_token_timeout": "timeout",
    "between_tokens_timeout": "timeout",
    "total_timeout": "timeout",
    "deadline": "deadline",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one call, over all its candidates and attempts."""

    max_attempts: int = 6
    total_s: float = 900.0


class Chain:
    """The state of one call. `attempts` are all that were made."""

    __slots__ = (
        "_ends",
        "_failure",
        "_limits",
        "_pools",
        "_retry_after",
        "_silent",
        "_tried",
        "_waited",
        "attempts",
        "observer",
    )

    def __init__(
        self, pools: Mapping[str, Pool], observer: AttemptObserver, limits: Limits, deadline: float | None
    ) -> None:
        self._pools = pools
        self._limits = limits
        self._ends = time.monotonic() + limits.total_s
        if deadline is not None and deadline < self._ends:
            self._ends = deadline
        self.observer = observer
        self.attempts: list[Attempt] = []
        self._tried: dict[str, list[Replica]] = {}  # by backend
        self._silent: tuple[Candidate, ...] = ()  # they ran into a deadline
        self._failure: AttemptFailed | None = None  # the latest
        self._retry_after: float | None = None  # the soonest that a server named
        self._waited = False  # in a queue, in vain: once is enough

    def failed(self, failure: AttemptFailed) -> None:
        """Remember what went wrong last; it decides what is tried next and what the client is told."""
        self._failure = failure
        if failure.retry_after is not None:
            self._retry_after = min(failure.retry_after, self._retry_after or failure.retry_after)

    def broke(self, candidate: Candidate, silent: bool, message: str) -> None:
        """The answer of `candidate` broke off after it was returned; `silent`: because nothing came any more."""
        self.failed(AttemptFailed("between_tokens_timeout" if silent else "disconnected", message))
        if silent:
            self._silent += (candidate,)

    def continued(self, candidate: Candidate) -> None:
        """`candidate` goes on with an answer that broke off."""
        self._pools[candidate.backend].continued += 1

    def elsewhere(self, candidate: Candidate) -> bool:
        """Whether its backend has a free replica that was not asked yet."""
        return self._pools[candidate.backend].fresh(self._tried.get(candidate.backend, ()))

    async def answer(self, call: Call, candidates: Sequence[Candidate]) -> Dispatched:
        """A committed answer to `call` from one of `candidates`, tried in their order.

        Candidates whose backend is busy come after those that can take a request at once, and those whose backend has
        no replica in rotation last.

        Raises:
            UpstreamRefused: the request itself was refused, and no candidate is left that may take it.
            CannotTranslate: no candidate's kind of server can be asked that.
            NoBackend: nothing answered.
            ValueError: a header that HTTP does not allow.
        """
        rest = list(candidates)
        refusal: UpstreamRefused | None = None
        untranslatable: CannotTranslate | None = None
        while rest:
            candidate = rest.pop(self._next(rest) if len(rest) > 1 else 0)
            try:
                answer = await self._ask(call, candidate, rest)
            except UpstreamRefused as refused:
                refusal, rest = refused, _fitting(refused, candidate, rest)
            except CannotTranslate as error:
                untranslatable = error
            else:
                if answer is not None:
                    return answer
        if refusal is not None:
            raise refusal
        if untranslatable is not None and not self.attempts:
            raise untranslatable
        raise self._no_backend(candidates)

    def _next(self, rest: Sequence[Candidate]) -> int:
        """The place in `rest` of the one to try next: the first of the best rank."""
        best, best_rank = 0, 3
        for place, candidate in enumerate(rest):
            rank = self._pools[candidate.backend].rank()
            if rank == 0:
                return place
            if rank < best_rank:
                best, best_rank = place, rank
        return best

    async def _ask(self, call: Call, candidate: Candidate, rest: Sequence[Candidate]) -> Dispatched | None:
        """Try one candidate as often as its backend allows; None if it did not answer."""
        pool = self._pools[candidate.backend]
        tried = self._tried.setdefault(candidate.backend, [])
        for _ in range(pool.attempts):
            if time.monotonic() >= self._ends:
                self.failed(AttemptFailed("deadline", "the request's deadline passed"))
                raise self._no_backend([candidate])
            if len(self.attempts) >= self._limits.max_attempts:
                return None
            if not tried:
                pool.retries.earn()
            elif not await self._may_retry(pool, candidate, tried, rest):
                return None
            replica = pool.acquire(tried, call.placement) or await self._queue(pool, call, rest)
            if replica is None:
                return None
            tried.append(replica)
            try:
                return await self._send(call, candidate, pool, replica)
            except AttemptFailed as failure:
                self.failed(failure)
                if failure.outcome == "timeout":
                    self._silent += (candidate,)
        return None

    async def _may_retry(
        self, pool: Pool, candidate: Candidate, tried: Sequence[Replica], rest: Sequence[Candidate]
    ) -> bool:
        """Whether to ask a backend again, after a pause if it has to be the same replica."""
        if pool.fresh(tried):
            return pool.retries.spend()
        if candidate in self._silent:
            return False  # it was silent all that time: asking the same one again doubles the client's wait
        rest_s = pool.rest_s()
        if rest_s is not None and rest_s > self._patience_s(pool, rest):
            return False
        pause_s = min(BACK_OFF_S * 2 ** (len(tried) - 1), BACK_OFF_MAX_S) * random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s >= self._ends or not pool.retries.spend():
            return False
        await asyncio.sleep(pause_s)
        return True

    async def _queue(self, pool: Pool, call: Call, rest: Sequence[Candidate]) -> Replica | None:
        """Wait for a replica of a busy backend; None if another candidate is the better idea, or none came free."""
        try:
            return await pool.wait(call.owner, self._patience_s(pool, rest), call.placement)
        except AttemptFailed as failure:
            self.failed(failure)
            self._waited = self._waited or failure.kind == "overloaded"
            return None

    def _patience_s(self, pool: Pool, rest: Sequence[Candidate]) -> float:
        """How long to wait for this backend, seeing which candidates are left."""
        if any(self._pools[candidate.backend].rank() == 0 for candidate in rest):
            patience_s = PATIENCE_S if pool.rest_s() is not None else 0.0
        else:
            patience_s = 0.0 if self._waited else pool.queue_timeout_s
        return min(patience_s, self._ends - time.monotonic())

    def _send(self, call: Call, candidate: Candidate, pool: Pool, replica: Replica) -> Coroutine[Any, Any, Dispatched]:
        """One try, or two side by side where the backend is slow and may be hedged."""
        hedging = pool.hedging
        if hedging is not None and call.stream:
            hedging.share.earn()
            delay_s = hedging.delay_s()
            if delay_s is not None:
                return self._hedged(call, candidate, pool, replica, delay_s)
        return self._attempt(call, candidate, pool, replica)

    async def _hedged(
        self, call: Call, candidate: Candidate, pool: Pool, replica: Replica, delay_s: float
    ) -> Dispatched:
        begun = False

        async def first() -> Dispatched:
            nonlocal begun
            begun = True
            return await self._attempt(call, candidate, pool, replica)

        async def second() -> Dispatched:
            other = self._beside(pool, replica, call)
            if other is None:
                raise AttemptFailed("overloaded", "there is no replica to ask beside the slow one")
            self._tried[candidate.backend].append(other)
            return await self._attempt(call, candidate, pool, other)

        try:
            return await race(first(), delay_s, second, self._lost)
        finally:
            if not begun:  # cancelled before its first step, so nobody else gives the replica back
                pool.release(replica, call.placement)

    def _attempt(
        self, call: Call, candidate: Candidate, pool: Pool, replica: Replica
    ) -> Coroutine[Any, Any, Dispatched]:
        return attempt_at(
            replica, pool, candidate, call, attempts=self.attempts, observer=self.observer, ends=self._ends
        )

    def _beside(self, pool: Pool, slow: Replica, call: Call) -> Replica | None:
        """A replica for a hedge: another one, or the same where the backend has one address for all of its servers."""
        assert pool.hedging is not None
        if len(self.attempts) >= self._limits.max_attempts or not (len(pool.replicas) == 1 or pool.fresh([slow])):
            return None
        other = pool.acquire([slow], call.placement)
        if other is not None and not pool.hedging.share.spend():
            pool.release(other, call.placement)
            return None
        return other

    async def _lost(self, answer: Dispatched) -> None:
        """A hedge that was answered too, but too late."""
        await answer.aclose()
        answer.attempt.error = LOST
        self.observer.attempt_ended(answer.attempt)

    def _no_backend(self, candidates: Sequence[Candidate]) -> NoBackend:
        failed = self._failure.kind if self._failure else "connect"
        kind = _KINDS.get(failed, "upstream_error")
        status, sentence = _ENDINGS[kind]
        number = len(self.attempts)
        message = f"No answer after {number} attempt{'s' if number > 1 else ''}: {sentence}."
        if not number:
            message = _UNASKED.get(failed, f"No answer: {sentence}.")
        retry_after = self._retry_after
        if retry_after is None and kind == "unavailable":
            soonest = [self._pools[candidate.backend].back_in_s() for candidate in candidates]
            retry_after = min((seconds for seconds in soonest if seconds is not None), default=None)
        return NoBackend(kind, status, message, self.attempts, retry_after)


def _fitting(refused: UpstreamRefused, candidate: Candidate, rest: Sequence[Candidate]) -> list[Candidate]:
    """Those of `rest` that may take what `candidate` would not: a longer context, or another backend's judgement."""
    code = refused.said.get("code") if refused.said else None
    if code == CONTEXT_LENGTH:
        return [other for other in rest if other.context_length > candidate.context_length]
    if code == CONTENT_POLICY:
        return [other for other in rest if other.backend != candidate.backend]
    return []
