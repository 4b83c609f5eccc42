"""Log-probabilities of the raw logits: of the chosen token and of the likeliest ones, for the rows that ask.

`RowLogprobs` begins the work and the way of its results to the host; `get` waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.layers.staging import Download, upload
from engine.limits import DRAWN_AT_ONCE
from engine.types import StepRow, TokenLogprob


class _Some:
    """Of a few rows."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        """logits: `[rows, vocab]`; tokens: int64 `[rows]`, on the same device; `counts`: of likeliest tokens."""
        raw = torch.log_softmax(logits, dim=-1)
        chosen = raw.gather(1, tokens.unsqueeze(1))
        ranks = (raw > chosen).sum(dim=-1) + 1
        values, ids = raw.topk(min(max(counts), raw.shape[1]), dim=-1)
        self._counts = counts
        self._found = Download(tokens, chosen.squeeze(1), ranks, values, ids)

    def get(self) -> list[TokenLogprob]:
        tokens, chosen, ranks, values, ids = (part.tolist() for part in self._found.get())
        return [
            TokenLogprob(token, value, tuple(zip(ids[i][:count], values[i][:count], strict=True)), ranks[i])
            for i, (token, value, count) in enumerate(zip(tokens, chosen, self._counts, strict=True))
        ]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """One entry per row of `logits` `[rows, vocab]`: of its token, with the `counts[row]` likeliest ones."""
    return _Some(logits, upload(np.asarray(tokens, dtype=np.int64), logits.device), counts).get()


class RowLogprobs:
    """Those of the chosen tokens, for the rows that ask."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[StepRow], tokens: torch.Tensor) -> None:
        """logits: `[rows, vocab]`; tokens: int64 `[rows]`."""
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        self._parts: list[tuple[list[int], _Some]] = []
        for start in range(0, len(asked), DRAWN_AT_ONCE):
            part = asked[start : start + DRAWN_AT_ONCE]
            places = upload(np.asarray(part, dtype=np.int64), logits.device)
            counts = [rows[i].params.logprobs or 0 for i in part]
            self._parts.append((part, _Some(logits.index_select(0, places), tokens.index_select(0, places), counts)))

    def get(self) -> dict[int, TokenLogprob]:
        """By row index."""
        return {row: entry for rows, some in self._parts for row, entry in zip(rows, some.get(), strict=True)}
