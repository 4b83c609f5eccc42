"""The end of a request: what it came to, and who is told (ledger, metrics, trace, log). Runs once, come what may."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from backends.attempt import Attempt
from gateway.accounting import Accounting
from gateway.ledger.rows import Outcome
from gateway.life import Life
from gateway.logs import enabled, log
from gateway.rollouts.shadow import compare
from gateway.tracing import Finished, TracedLeg

if TYPE_CHECKING:
    from gateway.services import Services

CLIENT_CLOSED_REQUEST = 499  # a status for metrics and logs only: nobody is there to receive it


async def finish(services: Services, life: Life, accounting: Accounting) -> None:
    """Settle, count, trace and log a request."""
    outcome, error = outcome_of(life)
    if life.exchange.gone and not life.status:
        life.status = CLIENT_CLOSED_REQUEST
    await accounting.settle(outcome, error)
    services.rollouts.finished(life, outcome)
    metrics = services.metrics
    metrics.requests.labels(life.dialect.route, outcome, str(life.status)).inc()
    metrics.duration.labels(life.dialect.route).observe(life.seconds())
    if life.decision is not None:
        metrics.cache.labels(life.cache).inc()
        fallback = "yes" if life.fallback else "no"
        metrics.decisions.labels(
            life.decision.policy, life.decision.rule, life.decision.requested_tier or "", fallback
        ).inc()
        if life.session is not None:
            metrics.session_turns.labels(life.decision.policy, life.said_of_session(life.session)).inc()
    if life.span is not None:
        services.tracing.finish(life.span, _finished(life, error))
    _log(life, outcome, error)
    if life.shadow is not None:
        await compare(services, life, accounting)


def outcome_of(life: Life) -> tuple[Outcome, str | None]:
    """How the request ended, and what went wrong if something did."""
    if life.exchange.gone and not life.delivered():
        return "cancelled", "the client closed the connection" if life.line is None else "the batch was stopped"
    if life.replay_of is not None and life.error is None:
        return "replayed", None
    if life.served is not None and life.served.outcome == "blocked":
        return "blocked", None
    if life.error is None:
        return ("cache_hit" if life.cache in ("exact", "semantic") else "success"), None
    if life.error.code == "not_in_cache":
        return "not_cached", None  # what the client asked for, so nothing went wrong
    if life.served is not None and life.served.outcome == "over_budget":
        return "over_budget", life.error.message
    if life.attempt is not None and life.attempt.outcome in ("timeout", "cut", "refused", "cancelled"):
        return life.attempt.outcome, life.error.message
    return ("refused" if life.error.status < 500 else "error"), life.error.message


def _finished(life: Life, error: str | None) -> Finished:
    row = life.served
    return Finished(
        operation=life.asked.operation if life.asked else "chat",
        requested_model=life.requested_model,
        model=row.model if row else None,
        provider=row.backend if row else "tierline",
        finish_reasons=tuple(sorted(set(life.meter.finish_reasons.values()))),
        input_tokens=row.input_tokens if row else 0,
        output_tokens=row.output_tokens if row else 0,
        duration_s=life.seconds(),
        ttft_s=life.attempt.first_content_s if life.attempt else None,
        error=None if error is None else life.error.code if life.error else "cancelled",
        attributes={
            "request_id": life.request_id,
            "cache": life.cache,
            "cost_usd": life.cost_nanousd / 1e9,
            "policy": life.decision.policy if life.decision else "",
        },
        legs=_legs(life.attempt),
    )


def _legs(attempt: Attempt | None) -> tuple[TracedLeg, ...]:
    """The two parts of an attempt whose prompt another replica was to compute; none of any other."""
    if attempt is None or (leg := attempt.leg) is None:
        return ()
    said: dict[str, str | int] = {"replica": leg.replica, "outcome": leg.outcome, "tokens": leg.tokens}
    error = None if leg.outcome == "computed" else leg.outcome
    whole = attempt.duration_s or time.monotonic() - attempt.started
    return (
        TracedLeg("prefill", attempt.started_at, leg.seconds, said, error),
        TracedLeg(
            "decode", attempt.started_at + leg.seconds, max(0.0, whole - leg.seconds), {"replica": attempt.replica}
        ),
    )


def _log(life: Life, outcome: Outcome, error: str | None) -> None:
    level = logging.INFO if life.status < 500 or outcome == "not_cached" else logging.WARNING
    if not enabled(level):
        return
    row, decision = life.served, life.decision
    log(
        level,
        "request finished",
        request_id=life.request_id,
        status=life.status,
        outcome=outcome,
        key=life.principal.key_prefix if life.principal else None,
        policy=decision.policy if decision else None,
        rule=decision.rule if decision else None,
        requested_tier=decision.requested_tier if decision else None,
        tier=row.tier if row else None,
        model=row.model if row else None,
        fallback=life.fallback,
        cache=life.cache,
        replay_of=life.replay_of,
        input_tokens=row.input_tokens if row else None,
        output_tokens=row.output_tokens if row else None,
        cost_usd=f"{life.cost_nanousd / 1e9:.9f}",
        ms=round(life.seconds() * 1000, 1),
        # The code, not the message: a message may quote what the client sent.
        error=life.error.code if life.error else error,
    )
