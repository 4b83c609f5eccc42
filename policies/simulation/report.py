"""What a simulation found, as plain data: for tables, for JSON, and for thresholds."""

from __future__ import annotations

from typing import Any

import msgspec

from policies.simulation.sums import Estimate


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A figure under both sets. `change` is new/old - 1, of shares new - old. Of `old` and `new` the interval is that
    of the next requests of this kind, as many as were recorded; of `change` that of the recorded ones."""

    unit: str
    old: Estimate
    new: Estimate
    change: Estimate


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the requests, under both sets."""

    name: str
    old: Estimate
    new: Estimate


class RuleUse(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests a rule decided. `in_old` and `in_new` say whether the set has such a rule."""

    policy: str
    rule: str
    old: int
    new: int
    in_old: bool
    in_new: bool


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that a limit of a policy stops: refused, or with `parallel` and `queue` kept waiting. `newly`: that it
    did not stop before, `no_more`: that it stopped before."""

    policy: str
    limit: str
    old: int
    new: int
    newly: int
    no_more: int


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """The monthly budget of a policy at the end of the recording: the spent share. None: the set has no such budget."""

    policy: str
    old: float | None
    new: float | None


class Undecidable(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that could not be decided again, because the record does not tell what a rule would look at."""

    set: str
    policy: str
    rule: str
    requests: int


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer a model answers than the one that did; None: the recording does not tell, 1 was taken."""

    answered: str
    instead: str
    requests: int
    factor: float | None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one set makes of a request. `stopped`: the limit that refuses it."""

    policy: str
    rule: str
    tier: str
    model: str
    cost_nanousd: int
    stopped: str | None = None


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    ts_ms: int
    old: Side
    new: Side


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. `reproduced` is the share of the requests decided by policies that are still in force for which their
    replay names the rule of the record; it says how far replay can be trusted here."""

    requests: int
    first_ms: int
    last_ms: int
    compared: int
    changed: int
    failed: int
    refused_otherwise: int
    reproduced: float | None
    recorded_cost_nanousd: int
    undecided: list[Undecidable]
    undecided_requests: int
    figures: dict[str, Compared]
    tiers: list[Mix]
    models: list[Mix]
    rules: list[RuleUse]
    never_matched: list[RuleUse]
    stopped: list[Stopped]
    refused_old: int
    refused_new: int
    budgets: list[Spent]
    hits: int
    hits_lost: int
    stretched: list[Stretch]
    most_changed: list[Changed]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def value(self, metric: str, percent: bool) -> float | None:
        """What a threshold bounds; None where it is not known."""
        whole = max(1, self.requests) if percent else 1
        counts = {
            "refused": self.refused_new - self.refused_old,
            "changed": self.changed,
            "undecided": self.undecided_requests,
            "hits_lost": self.hits_lost,
        }
        if metric in counts:
            return counts[metric] / whole
        figure = self.figures.get({"latency": "latency_p95", "ttft": "ttft_p95"}.get(metric, metric))
        return None if figure is None else figure.change.value
