"""One batch as its row has it, and as the API shows it."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from gateway.files.store import UNFINISHED

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: Final = ("failed", "completed", "expired", "cancelled")
STATUSES: Final[tuple[str, ...]] = (*UNFINISHED, *ENDED)
WINDOW_MS: Final = 86_400_000


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a batch. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What its lines came to so far, and the tokens of their answers."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A row. `completed`, `failed` and the tokens are its own once it has ended; until then its results tell."""

    id: str
    organisation_id: str
    project_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    status: Status = "validating"
    created_ms: int
    expires_ms: int
    in_progress_ms: int | None = None
    finalizing_ms: int | None = None
    cancelling_ms: int | None = None
    ended_ms: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    errors: str | None = None
    metadata: str | None = None
    headers: str = "{}"
    output_expires_s: int | None = None
    lease_owner: str = ""
    lease_until_ms: int = 0

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def with_counts(self, counts: Counts) -> Batch:
        return msgspec.structs.replace(self, **msgspec.structs.asdict(counts))

    def faults(self) -> list[dict[str, Any]]:
        return [] if self.errors is None else msgspec.json.decode(self.errors, type=list[dict[str, Any]])

    def line_headers(self) -> dict[str, str]:
        """What each of its lines is asked with."""
        return msgspec.json.decode(self.headers, type=dict[str, str])

    def shown(self) -> dict[str, Any]:
        """As the API shows it."""
        ended_at = {status: _seconds(self.ended_ms) if self.status == status else None for status in ENDED}
        faults = [{"code": None, "line": None, "param": None, **fault} for fault in self.faults()]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_ms // 1000,
            "in_progress_at": _seconds(self.in_progress_ms),
            "expires_at": self.expires_ms // 1000,
            "finalizing_at": _seconds(self.finalizing_ms),
            "completed_at": ended_at["completed"],
            "failed_at": ended_at["failed"],
            "expired_at": ended_at["expired"],
            "cancelling_at": _seconds(self.cancelling_ms),
            "cancelled_at": ended_at["cancelled"],
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_input_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": None if self.metadata is None else msgspec.json.decode(self.metadata),
        }


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
