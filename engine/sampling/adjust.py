"""What changes a row's logits before there is a distribution: bans, biases and penalties, in place, row by row.

The order: logit_bias, min_tokens and bad words, then the penalties. A ban is minus infinity, which nothing undoes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.types import SamplingParams, StepRow


def fault_of(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be applied to this vocabulary, or None."""
    outside = [t for t in params.logit_bias if not 0 <= t < vocab_size]
    if outside:
        return f"logit_bias names token {outside[0]}, the vocabulary has {vocab_size}"
    if () in params.bad_words:
        return "bad_words holds an empty sequence of tokens"
    words = [t for word in params.bad_words for t in word if not 0 <= t < vocab_size]
    if words:
        return f"bad_words names token {words[0]}, the vocabulary has {vocab_size}"
    return None


def num_generated(row: StepRow) -> int:
    """Tokens of the answer so far."""
    return len(row.all_token_ids) - row.num_prompt_tokens


def adjusts(row: StepRow) -> bool:
    """Whether `adjust_row` would change anything."""
    p = row.params
    return (
        bool(p.logit_bias)
        or bool(p.bad_words)
        or p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        or num_generated(row) < p.min_tokens
    )


def adjust_row(logits: torch.Tensor, row: StepRow, end_ids: frozenset[int]) -> None:
    """Change one row's logits `[vocab]` in place.

    Repetition penalty (arXiv 1909.05858, section 4.1) looks at prompt and answer; presence and frequency penalties (as
    the OpenAI API defines them) and bad words at the answer alone.
    """
    p = row.params
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(p.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if tokens := banned(row, end_ids, logits.shape[0]):
        logits[torch.tensor(tokens, dtype=torch.int64, device=logits.device)] = -torch.inf
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(row.all_token_ids, dtype=np.int64))).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
        answer = np.asarray(row.all_token_ids[row.num_prompt_tokens :], dtype=np.int64)
        ids_array, counts = np.unique(answer, return_counts=True)
        penalty = p.presence_penalty + p.frequency_penalty * torch.from_numpy(counts).to(logits.device, logits.dtype)
        logits[torch.from_numpy(ids_array).to(logits.device)] -= penalty


def banned(row: StepRow, end_ids: frozenset[int], vocab_size: int) -> list[int]:
    """Tokens that must not come next."""
    p = row.params
    found = []
    if num_generated(row) < p.min_tokens:
        found += [t for t in end_ids | p.stop_token_ids if 0 <= t < vocab_size]
    if p.bad_words:
        longest = max(map(len, p.bad_words)) - 1
        start = max(row.num_prompt_tokens, len(row.all_token_ids) - longest)
        found += _completing(p.bad_words, tuple(row.all_token_ids[start:]))
    return found


def _completing(words: Sequence[tuple[int, ...]], tail: tuple[int, ...]) -> list[int]:
    """The last token of every word of which the answer's `tail` ends with all the others."""
    return [word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]
