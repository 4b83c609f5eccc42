"""Where an answer ends: at an end-of-sequence token, at a stop token, at its limit, or where its grammar does."""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduling.request import Request
from engine.types import FinishReason, TokenMasks


def ending(
    request: Request, token_ids: Sequence[int], eos_token_ids: frozenset[int]
) -> tuple[int, FinishReason | None]:
    """How many of these new tokens the answer takes, and why it ends with the last of them (None: it does not).

    Before `min_tokens` tokens nothing stops it but its limit, which may be at the end of the prompt.
    """
    params = request.params
    if request.num_tokens >= request.max_total_tokens:
        return 0, FinishReason.LENGTH
    ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
    generated = request.num_generated_tokens
    for count, token_id in enumerate(token_ids, 1):
        if token_id in ends and generated + count >= params.min_tokens:
            return count, FinishReason.STOP
        if request.num_tokens + count >= request.max_total_tokens:
            return count, FinishReason.LENGTH
    return len(token_ids), None


def follow(grammar: TokenMasks, token_ids: Sequence[int]) -> tuple[int, bool]:
    """Advance a grammar over generated tokens: how many of them it takes, and whether nothing more can follow.

    Raises:
        GrammarFailed: it does not allow one of them.
    """
    for count, token_id in enumerate(token_ids, 1):
        grammar.accept((token_id,))
        if grammar.is_complete:
            return count, True
    return len(token_ids), False
