"""What the ledger records: a row per attempt, a decision per request. No prompt or answer text, ever.

Field names are the database's column names and the journal's keys, so a row is the same thing everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec
import uuid_utils

from gateway.ledger.usage import Usage, UsageSource

# `audit` and `shadow`: a hit was found and not given; a backend answered, to be compared with it.
CacheState = Literal["miss", "exact", "semantic", "audit", "shadow", "bypass"]
Outcome = Literal[
    "success",  # the whole answer was delivered
    "error",  # the server or the connection failed
    "timeout",  # a deadline passed
    "cancelled",  # the client left
    "cut",  # the server stopped in the middle of an answer
    "escalated",  # the whole answer failed a check of the policy, and was not given
    "blocked",  # a guardrail held the whole answer back
    "over_budget",  # a budget was spent in the middle of an answer: the gateway ended it
    "refused",  # not run: limit, budget, policy or an invalid request
    "cache_hit",  # answered from the cache
    "interrupted",  # the gateway died; written when it started again
    "replayed",  # of a request only: it had the idempotency key, and so the answer, of another
    "not_cached",  # of a request only, no row has it: not in the cache, and the client wanted nothing else
]
OUTCOMES: Final[tuple[str, ...]] = Outcome.__args__  # type: ignore[attr-defined]

# Tags whose names begin so are the gateway's own; no client can send them.
OWN_TAGS: Final = "tierline-"
# The tag of rows that belong to a batch: its id.
BATCH_TAG: Final = "tierline-batch"
MAX_ERROR_CHARACTERS: Final = 1000
MAX_ANSWER_ID_CHARACTERS: Final = 128
MAX_FINISH_REASON_CHARACTERS: Final = 256


class LedgerRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One attempt: one call to one replica, or one answer from the cache, or one refusal.

    `ts_ms` is when the attempt started (UTC, milliseconds since 1970); it decides the day and the budget month.
    `attempt` counts from 1 within `request_id`. `answer_id` is the id that the backend gave its answer. Amounts are
    nano-dollars, durations milliseconds. `placed` is why it went to its replica, where there were several: a word, and
    tokens of the prompt that the replica was believed to hold.
    """

    attempt_id: str
    request_id: str
    attempt: int
    ts_ms: int
    key_id: str = ""
    project_id: str = ""
    team_id: str = ""
    organisation_id: str = ""
    policy: str = ""
    policy_version: str = ""
    tier: str = ""
    requested_tier: str = ""
    requested_model: str = ""
    model: str = ""
    backend: str = ""
    replica: str = ""
    cache: CacheState = "miss"
    outcome: Outcome = "error"
    status_code: int = 0
    finish_reason: str = ""
    input_tokens: int = 0
    cached_input_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    usage_source: UsageSource = "estimated"
    cost_nanousd: int = 0
    saved_nanousd: int = 0
    price_version: str = ""
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    stream: bool = False
    tags: dict[str, str] = {}
    error: str = ""
    answer_id: str = ""
    placed: str = ""

    def set_usage(self, usage: Usage) -> None:
        self.input_tokens = usage.input_tokens
        self.cached_input_tokens = usage.cached_input_tokens
        self.cache_write_tokens = usage.cache_write_tokens
        self.output_tokens = usage.output_tokens
        self.reasoning_tokens = usage.reasoning_tokens
        self.usage_source = usage.source

    def set_error(self, message: str) -> None:
        """Keep the beginning of an error message (a row has a bounded size) as text that every store can hold."""
        self.error = _storable(message, MAX_ERROR_CHARACTERS)

    def set_answer_id(self, answer_id: str | None) -> None:
        """Keep a backend's id of its answer; likewise bounded."""
        self.answer_id = _storable(answer_id or "", MAX_ANSWER_ID_CHARACTERS)

    def set_finish_reasons(self, reasons: Iterable[str]) -> None:
        """Keep why the choices of an answer ended, in a backend's words; likewise bounded."""
        self.finish_reason = _storable(",".join(sorted(set(reasons))), MAX_FINISH_REASON_CHARACTERS)

    def usage(self) -> Usage:
        return Usage(
            input_tokens=self.input_tokens,
            cached_input_tokens=self.cached_input_tokens,
            cache_write_tokens=self.cache_write_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.reasoning_tokens,
            source=self.usage_source,
        )


class Decision(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a request went where it went. `features` are numbers and labels, never the text they were made from.

    `why` is a sentence, `reason` one word for it. `beside` are models of the tiers that no candidate is of: what
    the request would have cost there. Every model is named with its price (`gateway/routing/record.py`).
    """

    request_id: str
    ts_ms: int
    policy: str = ""
    policy_version: str = ""
    rule: str = ""
    why: str = ""
    reason: str = ""
    tier: str = ""
    model: str = ""
    features: dict[str, Any] = {}
    candidates: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []


class Note(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that happened to a request after it was decided: a step of escalation, a difference to another policy,
    what a guardrail found, how its answer was judged. `kind` is one word; `data` holds numbers and labels, never text
    that people or models wrote.
    """

    id: str
    request_id: str
    ts_ms: int
    kind: str
    data: dict[str, Any] = {}


def _storable(text: str, characters: int) -> str:
    if len(text) <= characters and text.isascii() and "\x00" not in text:
        return text
    return text[:characters].encode("utf-8", "replace").decode().replace("\x00", "")


def new_id() -> str:
    """A UUIDv7: unique, and ordered by time, which keeps indexes and listings in the order of events."""
    return str(uuid_utils.uuid7())


def now_ms() -> int:
    return time.time_ns() // 1_000_000
