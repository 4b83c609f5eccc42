"""Sampling by Triton kernels: what `adjust` and `draw` do, begun on the device and not waited for.

Biases and bans are lists of a few tokens, sent and scattered; penalties and draws are kernels. The order is that of
`adjust.adjust_row`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels.penalise import penalise_launch
from engine.kernels.sample import DrawBuffers, draw_launches
from engine.layers.staging import upload
from engine.limits import DRAWN_AT_ONCE
from engine.sampling.adjust import banned
from engine.sampling.token_counts import TokenCounts
from engine.sampling.truncate import scale
from engine.types import SamplingParams, StepRow

# Rows drawn at a time: their scratch is smaller than what torch takes for DRAWN_AT_ONCE.
_ROWS = 4 * DRAWN_AT_ONCE


class DeviceSampling:
    """Adjusts and draws for one model."""

    def __init__(self, texts: int, vocab: int, device: torch.device) -> None:
        """`texts`: whose penalties are kept on the device, see `TokenCounts`."""
        self._counts = TokenCounts(texts, vocab, device)

    def adjust(
        self, logits: torch.Tensor, rows: Sequence[StepRow], changing: Sequence[int], end_ids: frozenset[int]
    ) -> None:
        """Biases, bans and penalties of the rows `changing`, in place. logits: float32 `[rows, vocab]`, contiguous."""
        vocab = logits.shape[1]
        bias_at: list[int] = []
        bias: list[float] = []
        ban_at: list[int] = []
        for i in changing:
            bias_at += [i * vocab + token for token in rows[i].params.logit_bias]
            bias += rows[i].params.logit_bias.values()
            ban_at += [i * vocab + token for token in banned(rows[i], end_ids, vocab)]
        flat = logits.view(-1)
        if bias:
            places, values = np.array(bias_at, dtype=np.int64), np.array(bias, dtype=np.float32)
            flat.index_add_(0, upload(places, logits.device), upload(values, logits.device))
        if ban_at:
            flat.index_fill_(0, upload(np.array(ban_at, dtype=np.int64), logits.device), -torch.inf)
        penalised = [i for i in changing if _has_penalties(rows[i].params)]
        for start in range(0, len(penalised), self._counts.texts):
            self._penalise(logits, rows, penalised[start : start + self._counts.texts])

    def _penalise(self, logits: torch.Tensor, rows: Sequence[StepRow], penalised: Sequence[int]) -> None:
        texts = self._counts.rows_of([rows[i] for i in penalised])
        settings = [
            (i, text, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for i, text, p in zip(penalised, texts, (rows[i].params for i in penalised), strict=True)
        ]
        sent = upload(np.array(settings, dtype=np.float32), logits.device)
        penalise_launch(logits, self._counts.counts, self._counts.in_prompt, sent).run()

    def draw_into(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        uniform: Sequence[float],
    ) -> None:
        """Draw for some rows of `logits`, float32 `[*, vocab]`, into `tokens`, int64 `[*]`.

        One entry of `rows`, `params` and `uniform`, numbers in [0, 1), per draw. Each row must hold a finite logit.
        The token is the one that `draw.draw` gives for the same number, up to where that falls within a rounding error
        of the border between two; and up to the order of equally likely tokens, which is the vocabulary's here.
        """
        vocab = logits.shape[1]
        logits = _without_untypical(logits.contiguous(), rows, params)  # rows of siblings share theirs
        for start in range(0, len(rows), _ROWS):
            part = slice(start, start + _ROWS)
            settings = [
                (row, p.temperature, math.log(p.min_p) if p.min_p > 0 else -math.inf, min(p.top_k, vocab), p.top_p, u)
                for row, p, u in zip(rows[part], params[part], uniform[part], strict=True)
            ]
            sent = upload(np.array(settings, dtype=np.float64), logits.device)
            for launch in draw_launches(logits, sent, tokens, DrawBuffers.empty(len(settings), vocab, logits.device)):
                launch.run()


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _without_untypical(logits: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits with minus infinity where typical_p leaves a token out, for rows that ask; a copy only then.

    What it leaves out goes by the distribution behind temperature and min_p. min_p, asked for again while drawing, does
    not go any further: the likeliest token may be gone by then, and its bound only falls.
    """
    asked = [n for n, p in enumerate(params) if p.typical_p < 1.0]
    if asked:
        logits = logits.clone()
    for n in asked:
        row = logits[rows[n]]
        row.masked_fill_(scale(row.unsqueeze(0), [params[n]])[0] == -torch.inf, -torch.inf)
    return logits
