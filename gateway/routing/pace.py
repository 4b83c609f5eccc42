"""How long models take to answer, learnt from their answers: what a request with a deadline can expect of them.

    whole answers    seconds = a + b x output tokens, the line nearest to the latest of them
    streams          seconds to the first content: after that a stream also waits for its client, who is not the model

Nothing is known of a model after ten minutes without an answer: it may have been busy, and need not be any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from backends.attempt import Attempt
from gateway.ledger.rows import LedgerRow

_KEEP: Final = 0.95  # the weight of an answer against that of the next one: about the last twenty count
_LEAST: Final = 5
_FRESH_S: Final = 600.0
_SPREAD: Final = 25.0  # added to the variance of lengths: answers of nearly one length say nothing about others


class _Pace:
    """Sums over the answers of one model: x is their tokens of output, y their seconds."""

    __slots__ = ("at", "count", "first_count", "first_s", "weight", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = self.first_s = self.at = 0.0
        self.count = self.first_count = 0

    def whole_s(self, tokens: int) -> float:
        """By the line, and never less than nothing."""
        x, y = self.x / self.weight, self.y / self.weight
        covariance = self.xy / self.weight - x * y
        variance = self.xx / self.weight - x * x + _SPREAD
        return max(0.0, y + max(0.0, covariance / variance) * (tokens - x))


class Paces:
    """Of all models, in this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Pace] = {}

    def observe(self, row: LedgerRow, attempt: Attempt | None) -> None:
        """Learn from an answer that was given."""
        if not row.stream:
            self.answered(row.model, row.output_tokens, row.duration_ms / 1000)
        elif attempt is not None and attempt.first_content_s is not None:
            self.began(row.model, attempt.first_content_s)

    def answered(self, model: str, output_tokens: int, seconds: float) -> None:
        """An answer came in one piece."""
        pace = self._of(model)
        pace.weight = pace.weight * _KEEP + 1
        pace.x = pace.x * _KEEP + output_tokens
        pace.y = pace.y * _KEEP + seconds
        pace.xx = pace.xx * _KEEP + output_tokens**2
        pace.xy = pace.xy * _KEEP + output_tokens * seconds
        pace.count += 1

    def began(self, model: str, seconds: float) -> None:
        """A stream has begun."""
        pace = self._of(model)
        pace.first_s = seconds if not pace.first_count else pace.first_s + (1 - _KEEP) * 4 * (seconds - pace.first_s)
        pace.first_count += 1

    def seconds(self, model: str, output_tokens: int) -> float | None:
        """Until an answer of this length is there, as far as that is known; None where it is not."""
        pace = self._known.get(model)
        if pace is None or self._clock() - pace.at > _FRESH_S:
            return None
        found = [pace.first_s] if pace.first_count >= _LEAST else []
        if pace.count >= _LEAST:
            found.append(pace.whole_s(output_tokens))
        return max(found, default=None)

    def _of(self, model: str) -> _Pace:
        now = self._clock()
        pace = self._known.get(model)
        if pace is None or now - pace.at > _FRESH_S:
            pace = self._known[model] = _Pace()
        pace.at = now
        return pace
