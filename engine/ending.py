"""Where an answer ends: at an end-of-sequence token, at a stop token, or at its limit."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request
from engine.types import FinishReason


def ending(
    request: Request, token_ids: Sequence[int], eos_token_ids: frozenset[int]
) -> tuple[int, FinishReason | None]:
    """How many of these new tokens the answer takes, and why it ends with the last of them (None: it does not).

    Before `min_tokens` tokens nothing stops it but its limit.
    """
    params = request.params
    ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
    generated = request.num_generated_tokens
    for count, token_id in enumerate(token_ids, 1):
        if token_id in ends and generated + count >= params.min_tokens:
            return count, FinishReason.STOP
        if request.num_tokens + count >= request.max_total_tokens:
            return count, FinishReason.LENGTH
    return len(token_ids), None
