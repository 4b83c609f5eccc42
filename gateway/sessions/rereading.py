"""How long models take to read a prompt, learnt from streams: what a conversation waits for when it moves to one."""

from __future__ import annotations

from typing import Final

# Of shorter ones the time to the first token says little about reading.
LEAST_TOKENS: Final = 512
_WEIGHT: Final = 0.2


class Rereading:
    """Seconds per token that was not in a model's prompt cache, by model; the newest weigh most."""

    def __init__(self) -> None:
        self._per_token_s: dict[str, float] = {}

    def observe(self, model: str, fresh_tokens: int, first_token_s: float) -> None:
        if fresh_tokens >= LEAST_TOKENS:
            seen = first_token_s / fresh_tokens
            known = self._per_token_s.get(model, seen)
            self._per_token_s[model] = known + _WEIGHT * (seen - known)

    def seconds(self, model: str, tokens: int) -> float:
        """For so many tokens; 0 where nothing is known yet."""
        return self._per_token_s.get(model, 0.0) * tokens
