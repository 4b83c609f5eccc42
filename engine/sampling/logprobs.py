"""Log-probabilities of the raw logits: of the chosen token and of the likeliest ones, for the rows that ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.limits import DRAWN_AT_ONCE
from engine.types import StepRow, TokenLogprob


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """One entry per row of `logits` `[rows, vocab]`: of its token, with the `counts[row]` likeliest ones."""
    raw = torch.log_softmax(logits, dim=-1)
    chosen = raw.gather(1, torch.tensor(tokens, dtype=torch.int64, device=raw.device).unsqueeze(1))
    ranks = ((raw > chosen).sum(dim=-1) + 1).tolist()
    values, ids = (part.tolist() for part in raw.topk(min(max(counts), raw.shape[1]), dim=-1))
    return [
        TokenLogprob(token, value, tuple(zip(ids[i][:count], values[i][:count], strict=True)), ranks[i])
        for i, (token, value, count) in enumerate(zip(tokens, chosen.squeeze(1).tolist(), counts, strict=True))
    ]


def row_logprobs(logits: torch.Tensor, rows: Sequence[StepRow], ids: Sequence[int]) -> dict[int, TokenLogprob]:
    """Those of the chosen tokens `ids`, by row index, for the rows that ask."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    found: dict[int, TokenLogprob] = {}
    for start in range(0, len(asked), DRAWN_AT_ONCE):
        part = asked[start : start + DRAWN_AT_ONCE]
        counts = [rows[i].params.logprobs or 0 for i in part]
        found |= zip(part, token_logprobs(logits[part], [ids[i] for i in part], counts), strict=True)
    return found
