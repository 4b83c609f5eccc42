"""What is known of one request while it lives. The pipeline fills it in, step by step, in the order of the fields.

It holds facts and says them to the client as headers; what they cost stands in `accounting.py`, what is counted,
traced and logged at the end in `finish.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from backends.dispatch import Attempt, Candidate
from edge.cycle import checked_lines
from gateway.access.limits import Grant, Standing
from gateway.access.principal import Principal
from gateway.bodies import Room
from gateway.cache_headers import NONE, Directives
from gateway.dialects.dialect import Asked, Dialect, Writer
from gateway.dialects.errors import GatewayError
from gateway.http import Exchange, Header, headers_of
from gateway.ledger.rows import CacheState, LedgerRow
from gateway.metering import Meter
from policies.evaluate import Decision
from policies.facts import Facts
from policies.load import Policy

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from gateway.batches.line import Line
    from gateway.idempotency.recorder import Recorder
    from gateway.sessions.turn import Turn
    from tiers.session import Outcome


class Climb(msgspec.Struct):
    """The tiers whose answers a request got, in order, and why answers of theirs failed: as many reasons as tiers where
    the one that was given failed as well."""

    tiers: list[str] = []
    reasons: list[str] = []

    def __str__(self) -> str:
        return f"{'>'.join(self.tiers)};{','.join(self.reasons)}"

    def reached(self, tier: str) -> bool:
        """Whether a failed check is why this tier was asked."""
        return tier in self.tiers[1:]

    @property
    def passed(self) -> bool:
        """Whether the last answer passed, and so was given."""
        return len(self.reasons) < len(self.tiers)


class Life(msgspec.Struct, eq=False):
    """One request. `served` is the ledger row of the answer that the client got, once there is one."""

    exchange: Exchange
    dialect: Dialect
    request_id: str
    started: float = msgspec.field(default_factory=time.monotonic)
    span: Span | None = None
    internal: bool = False  # asked by the gateway itself: no client waits, and only budgets bound it
    patient: bool = False  # nobody waits for the answer now: it may come late, from wherever it is cheapest
    line: Line | None = None  # of a batch, which this request is

    # authenticate and parse
    principal: Principal | None = None
    room: Room | None = None  # memory that its body takes
    asked: Asked | None = None
    tags: dict[str, str] = {}
    cache_directives: Directives = NONE
    deadline: float | None = None  # monotonic
    idempotency_key: str | None = None
    recorder: Recorder | None = None  # of the first request with the key
    conversation: str | None = None  # that its answer is kept in, by id
    replay_of: str | None = None  # the request whose answer this one gets, because it has the key of that one

    # decide
    policy: Policy | None = None
    facts: Facts | None = None
    embedding: str | None = None  # what became of the vector that the classifier was to see
    decision: Decision | None = None
    shadow: Policy | None = None  # that decides in silence as well, once the answer is given
    candidates: list[Candidate] = []
    fallback: str | None = None  # why another tier than the decided one serves
    expected_ms: dict[str, int | None] = {}  # by model, what an answer was expected to take, if there is a deadline
    session: Turn | None = None  # of a conversation that the policy keeps where it is
    input_estimate: int = 0  # what is likely: for rules, and for the bill where no server says

    # admit
    input_hold: int = 0  # tokens set aside for the input of an attempt
    output_hold: int = 0  # tokens set aside for the output of the attempt that answers, all choices together
    output_limits: dict[str, int] = {}  # by model: the most that all choices can have
    grant: Grant | None = None
    standing: Standing | None = None  # of its limits as they refused it, or once it is settled; until then `grant` says

    # cache
    cache: CacheState = "bypass"
    cache_score: float | None = None
    cache_p: float | None = None  # chance that the answer found fits, under a promise
    cache_age_s: float | None = None
    cache_entry: str | None = None  # of the answer found, given or not
    cache_reason: str | None = None

    # dispatch and answer
    writer: Writer | None = None
    attempt: Attempt | None = None
    climb: Climb | None = None  # of a request whose answer failed a check
    meter: Meter = msgspec.field(default_factory=Meter)
    served: LedgerRow | None = None
    status: int = 0
    abandoned: bool = False  # its client left in the middle, and what came after that went to nobody
    error: GatewayError | None = None
    cost_nanousd: int = 0
    tokens: int = 0

    @property
    def choices(self) -> int:
        return self.asked.choices if self.asked else 1

    @property
    def requested_model(self) -> str:
        return self.asked.model if self.asked else ""

    @property
    def stream(self) -> bool:
        return self.asked is not None and self.asked.stream

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def delivered(self) -> bool:
        """Whether the client has every choice to its end; one that closes after that has lost nothing."""
        whole = self.meter.complete(self.choices) and not self.abandoned
        return whole or (self.served is not None and self.served.outcome == "cache_hit")

    def headers(self) -> list[Header]:
        """Tierline's response headers, as far as they are known."""
        return headers_of(self.header_lines())

    def header_lines(self) -> bytes:
        """The same as they are sent (`edge.cycle.header_lines`)."""
        # Answers belong to a key: whoever stands between keeps none.
        lines = [f"x-request-id: {self.request_id}", "cache-control: no-store"]
        if self.dialect.request_id_header != "x-request-id":
            lines.append(f"{self.dialect.request_id_header}: {self.request_id}")
        if self.decision is not None:
            self._say_decision(lines, self.decision)
        if self.standing is not None:
            lines += self.standing.lines()
        elif self.grant is not None:
            lines += self.grant.standing.lines()
        text = "\r\n".join(lines) + "\r\n"
        return checked_lines(text.encode("latin-1", "replace"), len(lines))

    def _say_decision(self, lines: list[str], decision: Decision) -> None:
        lines += (
            f"x-tierline-policy: {decision.policy}@{decision.policy_version}",
            f"x-tierline-reason: {decision.reason}",
            f"x-tierline-cache: {self.cache}",
        )
        if self.facts is not None and self.facts.profile is not None:
            lines.append(f"x-tierline-task: {self.facts.profile.task}")
        if self.cache_reason:
            lines.append(f"x-tierline-cache-reason: {self.cache_reason}")
        if self.cache_score is not None:
            lines.append(f"x-tierline-cache-score: {self.cache_score:.4f}")
        if self.cache_p is not None:
            lines.append(f"x-tierline-cache-p: {self.cache_p:.4f}")
        if self.cache_age_s is not None:
            lines.append(f"x-tierline-cache-age: {self.cache_age_s:.0f}")
            if self.cache in ("exact", "semantic"):
                lines.append(f"age: {self.cache_age_s:.0f}")  # RFC 9111, section 5.1
        if self.cache_entry is not None:
            lines.append(f"x-tierline-cache-entry: {self.cache_entry}")
        served = self._served_by()
        if served is not None:
            tier, model, backend = served
            lines += (f"x-tierline-tier: {tier}", f"x-tierline-model: {model}", f"x-tierline-backend: {backend}")
            if decision.auto is not None and (p := decision.auto.p_success.get(tier)) is not None:
                lines.append(f"x-tierline-p: {p:.2f}")
            if decision.requested_tier and decision.requested_tier != tier:
                lines.append(f"x-tierline-requested-tier: {decision.requested_tier}")
                if self.fallback or self.climb is None or not self.climb.reached(tier):
                    lines.append(f"x-tierline-fallback: {self.fallback or 'backend_failed'}")
            if self.climb is not None:
                lines.append(f"x-tierline-escalated: {self.climb}")
        if self.session is not None:
            lines.append(f"x-tierline-session: {self.said_of_session(self.session)}")

    def said_of_session(self, turn: Turn) -> Outcome:
        """Whether its conversation stayed or went: as decided, unless another model answered."""
        served = None if self.cache in ("exact", "semantic") else self._served_by()
        return turn.step.outcome if served is None else turn.said(served[0], served[1])

    def _served_by(self) -> tuple[str, str, str] | None:
        if self.served is not None:
            return self.served.tier, self.served.model, self.served.backend
        if self.attempt is not None:
            candidate = self.attempt.candidate
            return candidate.tier, candidate.model, candidate.backend
        return None

    def cost_line(self) -> bytes:
        """The header line that says what it cost."""
        return b"x-tierline-cost-usd: %.9f\r\n" % (self.cost_nanousd / 1e9)

    def summary(self) -> dict[str, str | float]:
        """What a stream's usage chunk says under `tierline`."""
        said: dict[str, str | float] = {"cost_usd": self.cost_nanousd / 1e9, "cache": self.cache}
        if self.served is not None:
            said |= {"model": self.served.model, "tier": self.served.tier}
            if self.served.saved_nanousd:
                said["saved_usd"] = self.served.saved_nanousd / 1e9
        if self.climb is not None:
            said["escalated"] = str(self.climb)
        return said
