"""One attempt at one replica: send, read until the answer is committed, and tell pool and observer how it ended.

It promises that a replica which was acquired is released exactly once, whatever happens; that the pool hears the
verdict before the replica is free again; and that cancelling breaks the upstream connection at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import msgspec
import uuid_utils

from backends.attempt import (
    Answer,
    Attempt,
    AttemptFailed,
    AttemptObserver,
    Call,
    Candidate,
    Event,
    Outcome,
    UpstreamRefused,
    describe_error,
    kind_of,
)
from backends.connection import Exchange, FailureKind, HttpFailure
from backends.dialect import Dialect, MalformedAnswer
from backends.errors import DEADLINE_EXCEEDED
from backends.http import retry_after_s
from backends.pool import Pool
from backends.protocol import PROMPT_PAGE_HEADER
from backends.replica import Replica
from backends.stream import EventStream, Take

TOTAL: FailureKind = "total_timeout"
OWN: FailureKind = "deadline"
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
ERROR_BODY_S = 2.0  # the body of an error may take so long; after that its status must do


class Dispatched:
    """A committed answer: `status` and `headers` of the replica, and `whole` (plain, else None) or `events` (stream).

    Call `aclose` in any case: it ends `attempt` ("cancelled", unless the answer has arrived whole) and breaks the
    connection if more was to come. `rescued`: a stream that broke and went on in another attempt, which is `attempt`
    from then on.
    """

    rescued = False

    def __init__(
        self,
        attempt: Attempt,
        status: int,
        headers: Mapping[str, str],
        *,
        whole: Answer | None = None,
        stream: EventStream | None = None,
    ) -> None:
        self.attempt = attempt
        self.status = status
        self.headers = headers
        self.whole = whole
        self.stream = stream

    @property
    def events(self) -> AsyncIterator[Event]:
        """The stream's events; iterating raises StreamCut if it breaks. Raises TypeError for a plain answer."""
        if self.stream is None:
            raise TypeError("a plain answer has no events; it is in `whole`")
        return self.stream

    def pass_on(self, take: Take | None) -> None:
        """Offer the stream's events to `take` while `events` waits for one; see `EventStream.pass_on`."""
        if self.stream is not None:
            self.stream.pass_on(take)

    async def aclose(self) -> None:
        """Give up what has not arrived; the server sees its connection close at once. May be called again."""
        if self.stream is not None:
            await self.stream.aclose()


async def attempt_at(
    replica: Replica,
    pool: Pool,
    candidate: Candidate,
    call: Call,
    *,
    attempts: list[Attempt],
    observer: AttemptObserver,
    ends: float,
) -> Dispatched:
    """One try on a replica that has been acquired.

    Args:
        attempts: those of the call so far; this one is added.
        ends: monotonic seconds at which the whole call has to be over.

    Raises:
        AttemptFailed: it failed in a way that another try may mend.
        UpstreamRefused: it was refused; trying again will not help.
        CannotTranslate: this kind of server cannot be asked that; nothing was sent.
        ValueError: a header that HTTP does not allow.
    """
    try:
        request = pool.dialect.post(replica.endpoint, call, candidate)
        number = len(attempts) + 1
        attempt = Attempt(str(uuid_utils.uuid7()), number, candidate, replica.base_url, time.time(), time.monotonic())
        if call.placement is not None and replica in call.placement.loads:
            attempt.placed = call.placement.said()
        observer.attempt_started(attempt)
    except BaseException:
        pool.release(replica, call.placement)
        raise
    attempts.append(attempt)

    def ended(outcome: Outcome, error: str | None) -> None:
        pool.release(replica, call.placement)
        _end(attempt, outcome, error)
        observer.attempt_ended(attempt)

    try:
        headers = await _prompt_elsewhere(call, pool, replica, attempt, ends)
        if headers:
            told = msgspec.structs.replace(call, headers={**call.headers, **headers})
            request = pool.dialect.post(replica.endpoint, told, candidate)
        return await _answer(call, pool, replica, attempt, request, ends)
    except AttemptFailed as failure:
        if failure.status is not None and is_final(failure.status):  # a refusal dressed as an answer
            pool.succeeded(replica)
            ended("refused", str(failure))
            raise UpstreamRefused(attempt, failure.status, {}, failure.body, failure.said) from failure
        pool.failed(replica, failure, time.monotonic() - attempt.started)
        ended(failure.outcome, f"{failure.kind}: {failure}")
        raise
    except UpstreamRefused as refusal:
        pool.succeeded(replica)
        ended("refused", str(refusal))
        raise
    except asyncio.CancelledError as cancelled:
        ended("cancelled", cancelled.args[0] if cancelled.args else None)
        raise
    except BaseException as error:
        ended("error", f"internal: {type(error).__name__}")
        raise


async def _prompt_elsewhere(
    call: Call, pool: Pool, replica: Replica, attempt: Attempt, ends: float
) -> Mapping[str, str]:
    """Have a long prompt computed by another replica, where the backend has some for that; what to tell this one."""
    prefilling = pool.prefilling
    if prefilling is None or call.placement is None:
        return {}
    if prefilling.wanted(call, replica):
        attempt.leg = await prefilling.ask(call, attempt.candidate, ends)
    leg = attempt.leg or prefilling.again(call, replica)
    if leg is None or leg.outcome != "computed":
        return {}
    call.placement.computed(replica)
    return leg.headers()


async def _answer(
    call: Call, pool: Pool, replica: Replica, attempt: Attempt, request: bytes, ends: float
) -> Dispatched:
    """Send the request and read until the answer is committed.

    Raises:
        AttemptFailed, UpstreamRefused: it was not; the connection is broken or free again.
    """
    timeouts = pool.timeouts
    deadline, kind = attempt.started + timeouts.total_s, TOTAL
    if ends < deadline:
        deadline, kind = ends, OWN
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
        if call.placement is not None and pool.placer is not None:
            pool.placer.answered(replica, call.placement, exchange.headers.get(PROMPT_PAGE_HEADER, ""))
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
    pool.succeeded(replica)
    pool.release(replica, call.placement)
    _end(attempt, "success", None)
    return Dispatched(attempt, exchange.status, exchange.headers, whole=whole)


async def _stream(call: Call, pool: Pool, replica: Replica, attempt: Attempt, exchange: Exchange) -> Dispatched:
    content_type = exchange.headers.get("content-type", "")
    if content_type.startswith("application/json"):  # an error, or a server that cannot
        body = await exchange.read_all(MAX_ANSWER_BYTES)
        error = pool.dialect.error(body)
        raise AttemptFailed.reported(error) if error else AttemptFailed("protocol", "asked for a stream, got none")
    if content_type.startswith("text/html"):  # a proxy's page: its end need not be awaited
        raise AttemptFailed("protocol", "asked for a stream, got a page of HTML")

    def ended(outcome: Outcome, failure: AttemptFailed | None) -> None:
        pool.repeats_reasons = pool.repeats_reasons or stream.repeats_reasons
        if outcome == "success":
            pool.succeeded(replica)
            pool.gives_reasons = pool.gives_reasons or stream.finished
        elif failure is not None:
            pool.failed(replica, failure, time.monotonic() - attempt.started)
        pool.release(replica, call.placement)
        _end(attempt, outcome, f"{failure.kind}: {failure}" if failure else None)

    stream = EventStream(
        exchange,
        pool.dialect.reader(call),
        pool.timeouts.between_tokens_s,
        call.choices(),
        ended,
        gives_reasons=pool.gives_reasons,
        repeats_reasons=pool.repeats_reasons,
    )
    await stream.commit()
    attempt.first_content_s = time.monotonic() - attempt.started
    pool.observe(replica, attempt.first_content_s, call.placement)
    return Dispatched(attempt, exchange.status, exchange.headers, stream=stream)


async def _raise_error(dialect: Dialect, exchange: Exchange, attempt: Attempt) -> NoReturn:
    """Turn a status that is not 2xx into AttemptFailed or UpstreamRefused."""
    exchange.deadline = min(exchange.deadline, time.monotonic() + ERROR_BODY_S)
    try:
        body = await exchange.read_all(MAX_ERROR_BYTES)
    except HttpFailure:
        body = b""  # the status says enough
    status = exchange.status
    if is_final(status):
        raise UpstreamRefused(attempt, status, exchange.headers, body, dialect.error(body))
    error = dialect.error(body)
    what = f"status {status}: {describe_error(error)}" if error else f"status {status}"
    retry_after = retry_after_s(exchange.headers)
    if status == 504 and error is not None and error.get("code") == DEADLINE_EXCEEDED:
        raise AttemptFailed("deadline", what)  # the time was short; nothing is wrong with the server
    # A server that says when it will serve again, such as an engine that is being started anew, is not broken.
    kind = "overloaded" if status == 503 and retry_after is not None else kind_of(status)
    raise AttemptFailed(kind, what, retry_after=retry_after)


def is_final(status: int) -> bool:
    """Whether no retry can change the answer: the request itself is at fault."""
    return 400 <= status < 500 and status not in (408, 429)


def _end(attempt: Attempt, outcome: Outcome, error: str | None) -> None:
    attempt.outcome = outcome
    attempt.error = error
    attempt.duration_s = time.monotonic() - attempt.started
