"""Drawing on CUDA: what `truncate.scale` and `draw.draw` do, by the kernels of `engine/kernels/sample.py`.

For the same logits and the same number both give the same token, up to where the number falls within a rounding error
of the border between two; and up to the order of tokens that are equally likely, which is the vocabulary's here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.kernels.sample import DrawBuffers, draw_launches
from engine.limits import DRAWN_AT_ONCE
from engine.types import SamplingParams

# Rows drawn at a time: their scratch is smaller than what torch takes for DRAWN_AT_ONCE.
_ROWS = 4 * DRAWN_AT_ONCE


def serves(params: SamplingParams) -> bool:
    """Whether the kernels know all that these parameters ask for."""
    return params.typical_p >= 1.0


def draw_into(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    uniform: Sequence[float],
) -> None:
    """Draw for some rows of `logits`, float32 `[*, vocab]`, into `tokens`, int64 `[*]`.

    One entry of `rows`, `params` and `uniform`, numbers in [0, 1), per draw. Each row must hold a finite logit.
    """
    vocab = logits.shape[1]
    logits = logits.contiguous()  # rows of siblings share theirs
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        settings = torch.tensor(
            [
                (row, p.temperature, math.log(p.min_p) if p.min_p > 0 else -math.inf, min(p.top_k, vocab), p.top_p, u)
                for row, p, u in zip(rows[part], params[part], uniform[part], strict=True)
            ],
            dtype=torch.float64,
        ).to(logits.device)
        for launch in draw_launches(logits, settings, tokens, DrawBuffers.empty(len(settings), vocab, logits.device)):
            launch.run()
