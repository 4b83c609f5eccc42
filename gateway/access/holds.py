"""Holds: what is set aside for a running request, and how much to set aside.

A hold is a record with an id, an owner's scopes and an expiry, not an amount in a counter: so settling twice is
noticed, and a hold that nobody settles can be found and given back. The amount comes from what the same key got from
the same model before, never from the whole context window.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal

import msgspec

from gateway.access.counting import Counters
from gateway.access.limits import Scope

# Weight of the newest answer: about the last ten answers count.
_WEIGHT: Final = 0.2
# Mean plus this many mean deviations: few answers are longer, as with retransmission timers (RFC 6298 uses four).
_DEVIATIONS: Final = 2.0
DEFAULT_OUTPUT_TOKENS: Final = 512
MAX_OUTPUT_TOKENS: Final = 8192
_MAX_HISTORIES: Final = 50_000


class Hold(msgspec.Struct):
    """One admitted request. Amounts are what is set aside now; `month` is the budget month it was admitted in. `taken`
    are the scopes that it counts against."""

    hold_id: str
    taken: list[tuple[Scope, Counters]]
    tokens: int
    cost_nanousd: int
    month: int
    expires_s: float
    unlimited: tuple[str, ...] = ()
    state: Literal["open", "expired"] = "open"


class OutputEstimator:
    """How many output tokens to expect, from exponentially weighted history per key and model."""

    def __init__(self, default_tokens: int = DEFAULT_OUTPUT_TOKENS, ceiling_tokens: int = MAX_OUTPUT_TOKENS) -> None:
        if not 0 < default_tokens <= ceiling_tokens:
            raise ValueError(f"need 0 < default_tokens <= ceiling_tokens, got {default_tokens} and {ceiling_tokens}")
        self._default = default_tokens
        self._ceiling = ceiling_tokens
        self._history: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def estimate(self, key_id: str, model: str, max_tokens: int | None = None) -> int:
        """Expected output tokens: this key's history, or a default, capped by what the request allows and by a ceiling.

        Never another key's history: what others ask says nothing about what this one may spend.
        """
        seen = self._history.get((key_id, model))
        expected = self._default if seen is None else round(seen[0] + _DEVIATIONS * seen[1])
        return max(1, min(expected, self._ceiling, max_tokens if max_tokens is not None else self._ceiling))

    def expect(self, key_id: str, model: str, max_tokens: int | None = None) -> int:
        """Output tokens that are as likely too many as too few: the mean of this key's history, or the default."""
        seen = self._history.get((key_id, model))
        expected = self._default if seen is None else round(seen[0])
        return expected if max_tokens is None else min(expected, max_tokens)

    def observe(self, key_id: str, model: str, output_tokens: int) -> None:
        """Learn from a complete answer. Cut and cancelled ones teach nothing about length: do not report those."""
        key = (key_id, model)
        seen = self._history.get(key)
        if seen is None:
            self._history[key] = (float(output_tokens), output_tokens / 4)
        else:
            mean, deviation = seen
            deviation += _WEIGHT * (abs(output_tokens - mean) - deviation)
            self._history[key] = (mean + _WEIGHT * (output_tokens - mean), deviation)
        self._history.move_to_end(key)
        while len(self._history) > _MAX_HISTORIES:
            self._history.popitem(last=False)
