"""One request over many candidates: try, retry on another replica, fall back to the next candidate, until one answers.

It promises that `open` returns only a committed answer (a stream's first content, or a whole plain answer), so that
every failure before it stays invisible; that a failure after it is raised and never looks like an end; that an
answer which no retry can change (4xx) goes back as it came; and that cancelling breaks the upstream connection at
once. The order of events of a request is `Dispatcher.open`, read top to bottom; the nouns are in `attempt.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NoReturn

import uuid_utils

from backends.attempt import (
    Answer,
    Attempt,
    AttemptFailed,
    AttemptObserver,
    BackendError,
    Call,
    Candidate,
    Event,
    NoBackend,
    NoBackendKind,
    Outcome,
    StreamCut,
    UpstreamRefused,
    describe_error,
    kind_of,
)
from backends.connection import FailureKind
from backends.dialect import CannotTranslate, Dialect, MalformedAnswer
from backends.http import Exchange, HttpFailure, retry_after_s
from backends.pool import Pool, Replica
from backends.stream import EventStream

__all__ = [
    "Attempt",
    "AttemptObserver",
    "BackendError",
    "Call",
    "Candidate",
    "Dispatched",
    "Dispatcher",
    "Event",
    "NoBackend",
    "StreamCut",
    "UpstreamRefused",
]

TOTAL: FailureKind = "total_timeout"
OWN: FailureKind = "deadline"
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
ERROR_BODY_S = 2.0  # the body of an error may take so long; after that its status must do
BACK_OFF_S = 0.1  # before a second try on the same replica; doubles, jittered
BACK_OFF_MAX_S = 2.0
# How long a request waits for a replica's Retry-After: briefly while another candidate is left, longer if none is.
PATIENCE_S = 1.0
LAST_PATIENCE_S = 10.0

# What each way of failing means for the client: status and sentence. No addresses: those are in the attempts.
_ENDINGS: dict[NoBackendKind, tuple[int, str]] = {
    "unavailable": (503, "no server could be reached"),
    "overloaded": (503, "every server is busy"),
    "rate_limited": (429, "the servers limit the rate of requests"),
    "timeout": (504, "no server answered in time"),
    "deadline": (504, "the request's deadline passed before an answer began"),
    "upstream_error": (502, "the servers answered with errors"),
}
_KINDS: dict[str, NoBackendKind] = {
    "connect": "unavailable",
    "connect_timeout": "unavailable",
    "overloaded": "overloaded",
    "rate_limited": "rate_limited",
    "first_token_timeout": "timeout",
    "between_tokens_timeout": "timeout",
    "total_timeout": "timeout",
    "deadline": "deadline",
}


class Dispatched:
    """A committed answer: `status` and `headers` of the replica, and `whole` (plain, else None) or `events` (stream).

    Call `aclose` in any case: it ends
    `attempt` ("cancelled", unless the answer has arrived whole) and breaks the connection if more was to come.
    """

    def __init__(
        self,
        attempt: Attempt,
        exchange: Exchange,
        *,
        whole: Answer | None = None,
        stream: EventStream | None = None,
    ) -> None:
        self.attempt = attempt
        self.status = exchange.status
        self.headers: Mapping[str, str] = exchange.headers
        self.whole = whole
        self._stream = stream

    @property
    def events(self) -> AsyncIterator[Event]:
        """The stream's events; iterating raises StreamCut if it breaks. Raises TypeError for a plain answer."""
        if self._stream is None:
            raise TypeError("a plain answer has no events; it is in `whole`")
        return self._stream

    async def aclose(self) -> None:
        """Give up what has not arrived; the server sees its connection close at once. May be called again."""
        if self._stream is not None:
            await self._stream.aclose()


class _History:
    """What a call has been through: its attempts and the latest failure."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.started = time.monotonic()
        self.attempts: list[Attempt] = []
        self.failure: AttemptFailed | None = None
        self.retry_after: float | None = None  # the soonest that a server named
        self.untranslatable: CannotTranslate | None = None

    def failed(self, failure: AttemptFailed) -> None:
        self.failure = failure
        if failure.retry_after is not None:
            self.retry_after = min(failure.retry_after, self.retry_after or failure.retry_after)

    def no_backend(self) -> NoBackend:
        kind = _KINDS.get(self.failure.kind, "upstream_error") if self.failure else "unavailable"
        status, sentence = _ENDINGS[kind]
        tried = len(self.attempts)
        if tried:
            message = f"No answer after {tried} attempt{'s' if tried > 1 else ''}: {sentence}."
        elif kind == "deadline":
            message = "The request's deadline had passed before a server could be asked."
        else:  # pools that are full
            message = "No server was asked: each has as many requests as it may have."
        return NoBackend(kind, status, message, self.attempts, self.retry_after)


class Dispatcher:
    """Sends calls to the pools of backends, by name."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    async def open(self, call: Call, candidates: Sequence[Candidate], observer: AttemptObserver) -> Dispatched:
        """Get a committed answer to `call` from one of `candidates`, tried in their order.

        Candidates whose backend has no replica in rotation come last, so that a dead backend costs nothing while
        another is alive.

        Raises:
            UpstreamRefused: a replica answered 4xx; nothing further was tried.
            CannotTranslate: no candidate's kind of server can be asked that.
            NoBackend: nothing answered.
            ValueError: no candidate, a backend that does not exist, or a header that HTTP does not allow.
        """
        history = _History(call)
        ordered = self._in_order(candidates)
        for candidate in ordered:
            pool = self._pools[candidate.backend]
            patience = LAST_PATIENCE_S if candidate is ordered[-1] else PATIENCE_S
            tried: list[Replica] = []
            for again in range(pool.attempts):
                if again and not await _pause(pool, tried, again, history, patience):
                    break
                if call.deadline is not None and time.monotonic() >= call.deadline:
                    history.failed(AttemptFailed("deadline", "the request's deadline passed"))
                    raise history.no_backend()
                replica = pool.acquire(tried)
                if replica is None:
                    message = f"every replica of '{pool.name}' has {pool.max_outstanding} requests, its most"
                    history.failed(AttemptFailed("overloaded", message, retry_after=1.0))
                    break
                tried.append(replica)
                dispatched = await _attempt(call, candidate, pool, replica, history, observer)
                if dispatched is not None:
                    return dispatched
                if history.untranslatable is not None:
                    break  # no other replica of this kind of server can be asked either
        if history.untranslatable is not None and not history.attempts:
            raise history.untranslatable
        raise history.no_backend()

    def _in_order(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        if not candidates:
            raise ValueError("a call needs at least one candidate")
        for candidate in candidates:
            if candidate.backend not in self._pools:
                raise ValueError(
                    f"model '{candidate.model}' names the backend '{candidate.backend}', which has no pool"
                )
        if len(candidates) == 1:
            return candidates
        return sorted(candidates, key=lambda candidate: not self._pools[candidate.backend].available())


async def _pause(pool: Pool, tried: Sequence[Replica], again: int, history: _History, patience_s: float) -> bool:
    """Wait before attempt number `again` (from 1) of a candidate; False if the next candidate is the better idea."""
    replica = pool.best(tried)
    if replica is None:
        return False
    now = time.monotonic()
    wait_s = max(0.0, replica.limited_until - now)
    if replica in tried:
        if history.failure is not None and history.failure.outcome == "timeout":
            return False  # it was silent all that time: asking the same one again doubles the client's wait
        wait_s = max(wait_s, min(BACK_OFF_S * 2 ** (again - 1), BACK_OFF_MAX_S) * random.uniform(0.5, 1.0))
    give_up = min(history.call.deadline or float("inf"), history.started + pool.timeouts.total_s)
    if wait_s > patience_s or now + wait_s >= give_up:
        return False
    if wait_s:
        await asyncio.sleep(wait_s)
    return True


async def _attempt(
    call: Call, candidate: Candidate, pool: Pool, replica: Replica, history: _History, observer: AttemptObserver
) -> Dispatched | None:
    """One try on a replica that has been acquired; None if it failed in a way that another try may mend."""
    try:
        request = pool.dialect.post(replica.endpoint, call, candidate)
        number = len(history.attempts) + 1
        attempt = Attempt(str(uuid_utils.uuid7()), number, candidate, replica.base_url, time.time(), time.monotonic())
        observer.attempt_started(attempt)
    except CannotTranslate as error:
        pool.release(replica)
        history.untranslatable = error
        return None
    except BaseException:
        pool.release(replica)
        raise
    history.attempts.append(attempt)

    def ended(outcome: Outcome, error: str | None) -> None:
        pool.release(replica)
        _end(attempt, outcome, error)
        observer.attempt_ended(attempt)

    try:
        return await _answer(call, pool, replica, attempt, request)
    except AttemptFailed as failure:
        if failure.status is not None and _is_final(failure.status):  # a refusal dressed as an answer
            pool.succeeded(replica)
            ended("refused", str(failure))
            raise UpstreamRefused(attempt, failure.status, {}, failure.body, failure.said) from failure
        pool.failed(replica, failure)
        ended(failure.outcome, f"{failure.kind}: {failure}")
        history.failed(failure)
        return None
    except UpstreamRefused as refusal:
        pool.succeeded(replica)
        ended("refused", str(refusal))
        raise
    except asyncio.CancelledError:
        ended("cancelled", None)
        raise
    except BaseException as error:
        ended("error", f"internal: {type(error).__name__}")
        raise


async def _answer(call: Call, pool: Pool, replica: Replica, attempt: Attempt, request: bytes) -> Dispatched:
    """Send the request and read until the answer is committed.

    Raises:
        AttemptFailed, UpstreamRefused: it was not; the connection is broken or free again.
    """
    timeouts = pool.timeouts
    deadline, kind = attempt.started + timeouts.total_s, TOTAL
    if call.deadline is not None and call.deadline < deadline:
        deadline, kind = call.deadline, OWN
    try:
        exchange = await pool.client.send(
            replica.endpoint.origin,
            request,
            connect_s=timeouts.connect_s,
            deadline=deadline,
            deadline_kind=kind,
            first_token_deadline=attempt.started + timeouts.first_token_s if call.stream else float("inf"),
        )
    except HttpFailure as failure:
        raise AttemptFailed.by(failure) from failure
    attempt.status_code = exchange.status
    try:
        if not 200 <= exchange.status < 300:
            await _raise_error(pool.dialect, exchange, attempt)
        if exchange.headers.get("content-encoding", "identity") != "identity":
            raise AttemptFailed("protocol", "the answer is compressed although that was not asked for")
        if call.stream:
            return await _stream(call, pool, replica, attempt, exchange)
        body = await exchange.read_all(MAX_ANSWER_BYTES)
        whole = pool.dialect.answer(body, call)
        if whole.completion.error is not None:
            raise AttemptFailed.reported(whole.completion.error)
    except HttpFailure as failure:
        raise AttemptFailed.by(failure) from failure
    except MalformedAnswer as error:
        raise AttemptFailed("protocol", str(error)) from error
    except BaseException:
        exchange.close()
        raise
    pool.release(replica)
    pool.succeeded(replica)
    _end(attempt, "success", None)
    return Dispatched(attempt, exchange, whole=whole)


async def _stream(call: Call, pool: Pool, replica: Replica, attempt: Attempt, exchange: Exchange) -> Dispatched:
    if exchange.headers.get("content-type", "").startswith("application/json"):  # an error, or a server that cannot
        body = await exchange.read_all(MAX_ANSWER_BYTES)
        error = pool.dialect.error(body)
        raise AttemptFailed.reported(error) if error else AttemptFailed("protocol", "asked for a stream, got none")

    def ended(outcome: Outcome, failure: AttemptFailed | None) -> None:
        pool.release(replica)
        if outcome == "success":
            pool.succeeded(replica)
        elif failure is not None:
            pool.failed(replica, failure)
        _end(attempt, outcome, f"{failure.kind}: {failure}" if failure else None)

    choices = call.payload.get("n")
    stream = EventStream(
        exchange,
        pool.dialect.reader(call),
        pool.timeouts.between_tokens_s,
        choices if isinstance(choices, int) else 1,
        ended,
    )
    await stream.commit()
    attempt.first_content_s = time.monotonic() - attempt.started
    return Dispatched(attempt, exchange, stream=stream)


async def _raise_error(dialect: Dialect, exchange: Exchange, attempt: Attempt) -> NoReturn:
    """Turn a status that is not 2xx into AttemptFailed or UpstreamRefused."""
    exchange.deadline = min(exchange.deadline, time.monotonic() + ERROR_BODY_S)
    try:
        body = await exchange.read_all(MAX_ERROR_BYTES)
    except HttpFailure:
        body = b""  # the status says enough
    status = exchange.status
    if _is_final(status):
        raise UpstreamRefused(attempt, status, exchange.headers, body, dialect.error(body))
    error = dialect.error(body)
    what = f"status {status}: {describe_error(error)}" if error else f"status {status}"
    raise AttemptFailed(kind_of(status), what, retry_after=retry_after_s(exchange.headers))


def _is_final(status: int) -> bool:
    """Whether no retry can change the answer: the request itself is at fault."""
    return 400 <= status < 500 and status not in (408, 429)


def _end(attempt: Attempt, outcome: Outcome, error: str | None) -> None:
    attempt.outcome = outcome
    attempt.error = error
    attempt.duration_s = time.monotonic() - attempt.started
