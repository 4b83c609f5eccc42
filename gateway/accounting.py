"""What a request costs, row by row: the dispatcher reports attempts here, and each gets one ledger row.

An attempt's opening is in the journal before a byte leaves for the backend, its row before the last byte reaches the
client, so a killed gateway loses no row of an answer that somebody received. `settle` is the single end.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from backends.dispatch import Attempt, Candidate
from gateway.access.limits import BudgetExhausted
from gateway.dialects.errors import OutOfBudget, Unavailable
from gateway.ledger.journal import JournalError
from gateway.ledger.prices import ModelPrice, cost, estimate
from gateway.ledger.records import Close, Decided, Noted, Open, Progress, Record
from gateway.ledger.rows import LedgerRow, Note, Outcome, new_id, now_ms
from gateway.ledger.usage import Usage, from_openai
from gateway.life import Life
from gateway.metering import BYTES_PER_TOKEN
from gateway.routing.record import record_of
from gateway.sessions.holding import follow

if TYPE_CHECKING:
    from gateway.services import Services

logger = logging.getLogger("tierline.ledger")

PROGRESS_INTERVAL_S = 1.0
RAISE_TOKENS = 64  # how far a hold is raised beyond what a stream has: seldom enough to cost little
NOTHING = Usage(input_tokens=0, output_tokens=0, source="counted")


class Accounting:
    """The books of one request. Observes the dispatcher's attempts (see `backends.dispatch.AttemptObserver`)."""

    def __init__(self, services: Services, life: Life) -> None:
        self._services = services
        self._life = life
        self._attempts = 0
        self._open: dict[str, LedgerRow] = {}  # rows of attempts that have started and not ended
        self._put_by: list[Attempt] = []  # their answers are whole, and another one may be given
        self._progress_at = time.monotonic() + PROGRESS_INTERVAL_S
        self._touch_at = time.monotonic() + services.settings.hold_ttl_seconds / 2
        self._settled = False

    def attempt_started(self, attempt: Attempt) -> None:
        """Journal the attempt before it can cost anything."""
        life = self._life
        if life.attempt is None and not life.internal and life.line is None:
            self._services.metrics.overhead.observe(time.monotonic() - life.exchange.received_at)
        life.attempt = attempt
        self._attempts += 1  # an attempt's own number counts within one dispatch
        row = self._row(attempt.id, self._attempts, attempt.candidate, int(attempt.started_at * 1000))
        row.replica, row.placed = attempt.replica, attempt.placed
        self._charge(row, Usage(input_tokens=life.input_estimate, output_tokens=0, source="estimated"))
        try:
            self._services.journal.append(Open(row))
        except JournalError as error:
            raise Unavailable(f"The ledger cannot take this request: {error}.", code="ledger_unavailable") from error
        self._open[attempt.id] = row

    def attempt_ended(self, attempt: Attempt) -> None:
        """An attempt ended before any of its answer was used.

        One that the client gave up on, or that ran out of time, has cost its input: the server was at work on it. A
        refused or failed one costs nothing.
        """
        row = self._open.pop(attempt.id, None)
        if row is None:
            return
        usage = NOTHING
        connected = not (attempt.error or "").startswith("connect")
        if attempt.outcome in ("cancelled", "timeout") and connected:
            usage = Usage(input_tokens=self._life.input_estimate, output_tokens=0, source="estimated")
        self._charge(row, usage)
        self._close(row, attempt, attempt.outcome if attempt.outcome != "running" else "error")
        self._life.tokens += usage.total_tokens
        self._life.cost_nanousd += row.cost_nanousd
        if usage.total_tokens:
            self._life.output_hold = 0  # part of the hold is used: the next event raises it

    def attempt_cut(self, attempt: Attempt) -> None:
        """The answer goes on in another attempt: this one's row says what it delivered, and the count starts anew."""
        life = self._life
        self.answered("timeout" if attempt.outcome == "timeout" else "cut")
        delivered = life.meter.counted_output()  # it is part of the next attempt's prompt
        life.input_estimate += delivered
        life.input_hold += delivered
        life.output_hold = 0
        life.meter.restart()

    def progress_due(self) -> bool:
        """Whether a stream has grown beyond what is held for it, or a second has passed. Asked after every event."""
        meter, held = self._life.meter, self._life.output_hold
        grown = meter.content_events > held or meter.bytes > held * BYTES_PER_TOKEN
        return grown or time.monotonic() >= self._progress_at

    async def progress(self) -> None:
        """Set more aside for a stream that has grown; journal how much was delivered, which a crash is billed by.

        Raises:
            OutOfBudget: a budget does not cover more. The row of the attempt is written.
        """
        life, now = self._life, time.monotonic()
        attempt, output = life.attempt, life.meter.counted_output()
        if attempt is None:
            return
        if output > life.output_hold or now >= self._touch_at:
            await self._raise_hold(attempt, output)
        if now < self._progress_at:
            return
        self._progress_at = now + PROGRESS_INTERVAL_S
        row = self._open[attempt.id]
        self._charge(row, Usage(input_tokens=life.input_estimate, output_tokens=output, source="estimated"))
        try:
            self._services.journal.append(Progress(attempt.id, output, row.cost_nanousd))
        except JournalError as error:
            logger.warning("progress of attempt %s is not on record: %s", attempt.id, error)

    async def _raise_hold(self, attempt: Attempt, output: int) -> None:
        """Hold `RAISE_TOKENS` more than the stream has, but no more than it can have; let the hold live on.

        One that has more than it can have by our own count is a count too high, or a server that keeps no limit.
        """
        services, life = self._services, self._life
        assert life.grant is not None
        model, ttl_s = attempt.candidate.model, services.settings.hold_ttl_seconds
        limit, raised = life.output_limits[model], output + RAISE_TOKENS
        held = max(life.output_hold, raised if output >= limit else min(raised, limit))
        # Earlier attempts have been used and are not in the ledger's balance before the end: they are held as well.
        more = estimate(self._price(model), life.input_hold, held)
        tokens, cost_nanousd = life.tokens + life.input_hold + held, life.cost_nanousd + more
        try:
            await services.limiter.touch(life.grant.hold_id, ttl_s, tokens, cost_nanousd)
        except BudgetExhausted as spent:
            services.metrics.limited.labels(spent.limit).inc()
            self.answered("over_budget", "a budget was spent while the answer came")
            raise OutOfBudget(spent.message) from None
        life.output_hold = held
        self._touch_at = time.monotonic() + ttl_s / 2

    def answered(self, outcome: Outcome, error: str | None = None) -> None:
        """Write the row of the attempt that answered, or failed while answering. The first outcome stands."""
        life = self._life
        attempt = life.attempt
        if attempt is None or attempt in self._put_by or (row := self._open.pop(attempt.id, None)) is None:
            return
        attempt.error = error or attempt.error
        self._bill(row)
        self._close(row, attempt, outcome)
        life.served = row

    def _bill(self, row: LedgerRow) -> None:
        """Charge an answer by what the server reports, or what was counted of it."""
        life = self._life
        output = life.meter.counted_output()
        counted = Usage(input_tokens=life.input_estimate, output_tokens=output, source="counted")
        usage = from_openai(life.meter.usage, counted) or counted
        self._charge(row, usage)
        row.set_finish_reasons(life.meter.finish_reasons.values())
        row.set_answer_id(life.meter.answer_id)
        life.tokens += usage.total_tokens
        life.cost_nanousd += row.cost_nanousd

    def put_by(self) -> None:
        """The answer of the latest attempt is whole, and another one may be given in its place: its cost counts, and is
        on record for a crash, but its row stays open until `take_up`, or until the end, when it is `escalated`."""
        life = self._life
        attempt = life.attempt
        assert attempt is not None
        row = self._open[attempt.id]
        self._bill(row)
        self._journal(Progress(attempt.id, row.output_tokens, row.cost_nanousd))
        self._put_by.append(attempt)
        life.output_hold = 0  # all of it is used: the next step has its own

    def take_up(self, attempt: Attempt) -> None:
        """The answer of this attempt, put by before, is given after all: it is the one to be settled."""
        life, row = self._life, self._open[attempt.id]
        self._put_by.remove(attempt)
        life.attempt = attempt
        life.tokens -= row.usage().total_tokens
        life.cost_nanousd -= row.cost_nanousd

    def answered_from_cache(
        self, model: str, tier: str, usage: Usage, cost_nanousd: int, finish_reason: str = "stop"
    ) -> None:
        """Write the row of an answer that came from the cache: of what it would have cost the policy's share is the
        cost, and the rest saved."""
        life = self._life
        assert life.decision is not None
        if model != (own := life.candidates[0].model):  # another's, which this request would have asked last
            cost_nanousd = min(cost_nanousd, cost(self._price(own), usage).total_nanousd)
            if life.decision.cache.share_tiers:
                life.fallback = "shared_answer"
        answering = Candidate(model=model, tier=tier, backend="cache", upstream_model=model)
        row = self._row(new_id(), 1, answering, now_ms())
        row.set_usage(usage)
        row.price_version = self._price(model).version
        row.outcome = "cache_hit"
        row.status_code = 200
        row.finish_reason = finish_reason
        row.cost_nanousd = life.decision.cache.charged(cost_nanousd)
        row.saved_nanousd = cost_nanousd - row.cost_nanousd
        row.duration_ms = row.ttft_ms = life.seconds() * 1000
        life.served = row
        life.cost_nanousd += row.cost_nanousd
        self._journal(Close(row))
        self._services.metrics.saved.labels(model).inc(row.saved_nanousd / 1e9)
        self._services.metrics.of_model(model).cost.inc(row.cost_nanousd / 1e9)

    def decided(self) -> None:
        """Journal why the request goes where it goes; never what it says."""
        made = record_of(self._services, self._life)
        if made is not None:
            self._journal(Decided(made))

    def note(self, kind: str, data: dict[str, Any]) -> None:
        """Put on record what happened to the request; `data` holds numbers and labels, never what was written."""
        request_id = self._life.request_id
        self._journal(Noted(Note(id=new_id(), request_id=request_id, ts_ms=now_ms(), kind=kind, data=data)))
        if self._settled:
            self._flush()  # no row comes after it that it could wait for

    async def settle(self, outcome: Outcome, error: str | None = None) -> None:
        """End of the request: close what is open and replace the hold by what was used. Idempotent.

        Called before the client's last byte, so that who has an answer finds its limits as the answer says; and again
        at the end, for requests that did not come so far.
        """
        if self._settled:
            return
        life = self._life
        self.answered(outcome, error)
        while self._put_by:
            attempt = self._put_by.pop(0)
            self._close(self._open.pop(attempt.id), attempt, "escalated")
        if life.session is not None and (moved := follow(self._services, life)) is not None:
            self.note("session", moved)
        self._flush()  # a request without an attempt has written nothing yet
        if life.grant is not None:
            settled = await self._services.queue.settle(life.grant.hold_id, life.tokens, life.cost_nanousd)
            life.standing = settled or life.standing
            if life.served is not None and life.principal is not None and outcome == "success" and not life.internal:
                self._services.estimator.observe(life.principal.key_id, life.served.model, life.served.output_tokens)
                self._services.paces.observe(life.served, life.attempt)
        self._settled = True

    def _charge(self, row: LedgerRow, usage: Usage) -> None:
        row.set_usage(usage)
        price = self._price(row.model, self._life.meter.service_tier)
        row.price_version = price.version
        row.cost_nanousd = cost(price, usage).total_nanousd

    def _price(self, model: str, service_tier: str | None = None) -> ModelPrice:
        return self._services.prices.price_for(model, service_tier, batch=self._life.line is not None)

    def _row(self, attempt_id: str, number: int, candidate: Candidate, ts_ms: int) -> LedgerRow:
        life = self._life
        principal, decision = life.principal, life.decision
        if principal is None or decision is None:
            raise RuntimeError(f"request {life.request_id}: an attempt began before the request was admitted")
        return LedgerRow(
            attempt_id=attempt_id,
            request_id=life.request_id,
            attempt=number,
            ts_ms=ts_ms,
            key_id=principal.key_id,
            project_id=principal.project_id,
            team_id=principal.team_id,
            organisation_id=principal.organisation_id,
            policy=decision.policy,
            policy_version=decision.policy_version,
            tier=candidate.tier,
            requested_tier=decision.requested_tier or candidate.tier,
            requested_model=life.requested_model,
            model=candidate.model,
            backend=candidate.backend,
            cache=life.cache,
            stream=life.stream,
            tags=life.tags,
        )

    def _close(self, row: LedgerRow, attempt: Attempt, outcome: Outcome) -> None:
        row.outcome = outcome
        row.status_code = attempt.status_code or 0
        row.duration_ms = (attempt.duration_s or time.monotonic() - attempt.started) * 1000
        if attempt.first_content_s is not None:
            row.ttft_ms = attempt.first_content_s * 1000
        if attempt.error:
            row.set_error(attempt.error)
        self._journal(Close(row))
        self._count(row)

    def _journal(self, record: Record) -> None:
        try:
            self._services.journal.append(record)
        except JournalError:
            # The disk is failing: the log is the last place where this record can be kept.
            logger.exception("a ledger record could not be journaled: %s", msgspec.json.encode(record).decode())

    def _flush(self) -> None:
        try:
            self._services.journal.flush()
        except JournalError as failure:
            request_id = self._life.request_id
            logger.error("why request %s was decided as it was is not on record: %s", request_id, failure)

    def _count(self, row: LedgerRow) -> None:
        metrics = self._services.metrics
        metrics.attempts.labels(row.backend, row.model, row.outcome).inc()
        if row.placed and (placer := self._services.pools[row.backend].placer) is not None:
            placer.hit_tokens += row.cached_input_tokens
        counts = metrics.of_model(row.model)
        counts.input.inc(row.input_tokens - row.cached_input_tokens)
        if row.cached_input_tokens:
            counts.cached_input.inc(row.cached_input_tokens)
        counts.output.inc(row.output_tokens)
        counts.cost.inc(row.cost_nanousd / 1e9)
        if row.ttft_ms is not None and row.stream:
            counts.ttft.observe(row.ttft_ms / 1000)
            if row.output_tokens > 1:
                counts.tpot.observe((row.duration_ms - row.ttft_ms) / 1000 / (row.output_tokens - 1))
