"""Verdicts in words: for the log, the command and the records."""

from __future__ import annotations

from typing import Final

from gateway.rollouts.judging import Verdict

NAMES: Final = {
    "error_rate": "requests that fail at a server",
    "p95_latency": "95 % of the answers within",
    "cost_per_request": "cost of an answer",
    "quality": "good answers among those judged",
}


def breach_of(verdict: Verdict) -> str:
    """What a guard found, such as `error_rate: 12.5 %, where the old policy has 0.4 % and 2.4 % is allowed`."""
    new, old, bound = (amount(verdict.guard, value) for value in (verdict.new, verdict.old, verdict.bound))
    return f"{verdict.guard}: {new}, where the old policy has {old} and {bound} is allowed"


def amount(guard: str, value: float | None) -> str:
    """A measured value with its unit."""
    if value is None:
        return "-"
    if guard == "p95_latency":
        return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms"
    if guard == "cost_per_request":
        return f"${value:.9f}".rstrip("0").rstrip(".")
    return f"{value:.2%}".replace("%", " %")


def state_of(verdict: Verdict) -> str:
    """How far it is: breached, waiting for what, or how much of the evidence for a breach there is."""
    if verdict.breach:
        return "breached"
    if verdict.waits:
        return f"not compared yet: {verdict.waits}"
    share = verdict.evidence / verdict.needed if verdict.needed else 0.0
    return f"quiet ({share:.1%} of the evidence that a roll-back needs)".replace("%", " %", 1)
