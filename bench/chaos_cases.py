"""The faults that `chaos.py` injects, each with what a client and the ledger must see of it.

A case's request goes to a model whose server is broken in the named way; a healthy server is the fallback. `fault` is a
model name that the mock upstream understands (`mock_upstream.Behaviour`, `mock_faults.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Expect = Literal[
    "whole",  # the story, every character once, and a success
    "error event",  # a beginning of the story, then an explicit error, and no success
    "error",  # an error answer
    "left",  # the client leaves; the server must learn of it within a second
]
Where = Literal["mock", "refused", "unknown name", "tls", "deaf"]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

SHORT = {"connect_s": 0.5, "first_token_s": 0.5, "between_tokens_s": 0.5, "total_s": 1.5}
LONG = {"connect_s": 10.0, "first_token_s": 20.0, "between_tokens_s": 20.0, "total_s": 30.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One fault. `rows`: outcomes in the ledger, in the order of attempts."""

    name: str
    fault: str
    rows: tuple[str, ...]
    expect: Expect = "whole"
    stream: bool = True
    where: Where = "mock"
    silent: bool = False  # only a deadline notices it, so deadlines are short
    fallback: bool = True
    warm: bool = False  # the broken server has answered well before
    replica: bool = False  # two replicas of one backend, of which whichever is asked first is broken
    prefill: bool = True
    body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 200
    retry_after: tuple[int, int] | None = None  # seconds, from and to

    @property
    def timeouts(self) -> dict[str, float]:
        return SHORT if self.silent else LONG

    @property
    def attempts(self) -> int:
        return 1 if self.fallback else 2

    @property
    def title(self) -> str:
        return f"{self.name}, {'stream' if self.stream else 'plain'}"


def _both(name: str, fault: str, outcome: str = "error", **options: Any) -> list[Case]:
    """A fault before any content, of a stream and of a plain answer: the healthy server answers."""
    return [Case(name, fault, (outcome, "success"), stream=stream, **options) for stream in (True, False)]


def _cut(name: str, fault: str, outcome: str = "cut", **options: Any) -> Case:
    """A fault after content: the healthy server continues."""
    return Case(f"{name} in mid-stream", fault, (outcome, "success"), **options)


def _hopeless(name: str, fault: str, *rows: str, **options: Any) -> Case:
    """A fault that leaves nothing but to say so."""
    return Case(name, fault, rows, options.pop("expect", "error"), **options)


BEFORE: list[Case] = [
    *_both("connection refused", "story", where="refused"),
    *_both("connection not accepted", "story", "timeout", where="deaf", silent=True),
    *_both("name unknown", "story", where="unknown name"),
    *_both("TLS handshake fails", "story", where="tls"),
    *_both("accepted, then silence", "hang", "timeout", silent=True),
    *_both("closed before the head", "close"),
    *_both("half a head, then silence", "half_head", "timeout", silent=True),
    *_both("another protocol", "not_http"),
    *_both("status 500", "status,status=500"),
    *_both("status 503 with Retry-After", "status,status=503,retry_after=30"),
    *_both("status 429 with Retry-After", "status,status=429,retry_after=30"),
    *_both("status 302", "status,status=302"),
    *_both("status 408", "status,status=408"),
    *_both("status 529", "status,status=529"),
    *_both("status 200 with an error object", "error"),
    *_both("status 200 with a page of HTML", "html"),
    *_both("status 200 with nothing", "empty"),
    *_both("compressed unasked", "gzip"),
    *_both("malformed chunked encoding", "chunking"),
    *_both("content-length too short", "short_length"),
    *_both("half a character of UTF-8", "utf8"),
    *_both("a byte at a time beyond the deadline", "drip,interval_ms=20", "timeout", silent=True),
    *_both("reset in the body", "reset"),
    *_both("part of the body, then silence", "stall", "timeout", silent=True),
    *_both("the same replica answers the retry", "status,status=500,times=1", fallback=False),
    *_both("another replica answers", "close,times=1", replica=True, fallback=False),
    Case("content-length too long", "long_length", ("error", "success"), stream=False),
    Case("truncated JSON", "truncated", ("error", "success"), stream=False),
    Case("an answer without a choice", "no_choices", ("error", "success"), stream=False),
    Case("only signs of life", "story,pings=9999,interval_ms=50", ("timeout", "success"), silent=True),
    Case("[DONE] before any content", "early_done", ("error", "success")),
    Case("garbage for the first event", "garbage", ("error", "success")),
]

DURING: list[Case] = [
    _cut("cut", "cut,after=4"),
    _cut("cut after a blank line", "cut,after=6"),
    _cut("cut after an emoji", "cut,after=8"),
    _cut("reset", "reset,after=4"),
    _cut("silence", "stall,after=4", "timeout", silent=True),
    _cut("clean end without a finish reason", "end,after=4"),
    _cut("[DONE] without a finish reason", "early_done,after=4", warm=True),
    _cut("error event", "error,after=4"),
    _cut("overloaded event", "error,after=4,code=529"),
    _cut("garbage event", "garbage,after=4"),
    _cut("malformed chunked encoding", "chunking,after=4"),
    _cut("half a character of UTF-8", "utf8,after=4"),
    _cut("a byte at a time beyond the deadline", "drip,after=4,interval_ms=20", "timeout", silent=True),
    _cut("cut, continued by another replica,", "cut,after=4,times=1", replica=True, fallback=False),
    Case("cut twice", "cut,after=4,times=2", ("cut", "cut", "success"), fallback=False),
]

HARMLESS: list[Case] = [
    Case("[DONE] twice", "done_twice", ("success",)),
    Case("no [DONE]", "no_done", ("success",)),
    Case("reset after the finish reason", "cut_after_finish", ("success",)),
    Case("every byte in a piece of its own", "story,piece=1", ("success",)),
    Case("connection closed after the answer", "drop", ("success",)),
    Case("connection closed after the answer", "drop", ("success",), stream=False),
]

HOPELESS: list[Case] = [
    _hopeless("cut, tools asked for", "cut,after=4", "cut", expect="error event", body={"tools": [TOOL]}),
    _hopeless("cut, two choices asked for", "cut,after=4", "cut", expect="error event", body={"n": 2}),
    _hopeless("cut, nobody can continue", "cut,after=4", "cut", expect="error event", prefill=False, fallback=False),
    _hopeless("refused in mid-stream", "error,after=4,code=400", "cut", expect="error event"),
    _hopeless("status 500 everywhere", "status,status=500", "error", "error", fallback=False, status=502),
    _hopeless("status 500 everywhere", "status,status=500", "error", "error", fallback=False, status=502, stream=False),
    _hopeless("cut everywhere", "cut", "error", "error", fallback=False, status=502, stream=False),
    _hopeless("refused request", "status,status=422", "refused", status=422),
    _hopeless("rejected credentials", "status,status=401", "refused", status=502),
    _hopeless(
        "status 429 everywhere",
        "status,status=429,retry_after=30",
        "error",
        fallback=False,
        status=429,
        retry_after=(25, 30),
    ),
    _hopeless(
        "no server anywhere",
        "story",
        "error",
        "error",
        where="refused",
        fallback=False,
        status=503,
        retry_after=(1, 2),
    ),
    _hopeless("silence everywhere", "hang", "timeout", fallback=False, silent=True, status=504),
]

LEAVING: list[Case] = [
    Case("the client leaves before an answer", "hang", ("cancelled",), "left"),
    Case("the client leaves before an answer", "hang", ("cancelled",), "left", stream=False),
    Case("the client leaves in mid-stream", "story,interval_ms=200", ("cancelled",), "left"),
    Case(
        "the client leaves during a rescue",
        "cut,after=4,times=1,then=hang",
        ("cut", "cancelled"),
        "left",
        fallback=False,
    ),
]

CASES = [*BEFORE, *DURING, *HARMLESS, *HOPELESS, *LEAVING]
