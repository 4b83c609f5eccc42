"""From distributions to tokens: the likeliest, or the one at which a uniform number in [0, 1) falls.

On a CPU a compiled kernel draws (`engine/kernels/cpu_draw.c`), which sorts next to nothing, or else torch. Both
draw the same token, up to where the number falls within a rounding error of the border between two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.layers import native
from engine.sampling.truncate import truncates
from engine.types import SamplingParams

# First try at top_p: so many of the likeliest tokens usually hold the nucleus; rows where they do not sort everything.
_NUCLEUS_GUESS = 128


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest logits of each row, int64 `[rows]`; of a row with NaN, the first NaN."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # in vectors: torch's takes nine times as long
    return logits.argmax(dim=-1)


def draw(scaled: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Sampled tokens, int64 `[rows]`. scaled: from `truncate.scale`; uniform: float64 `[rows, 1]`.

    Raises MemoryError where there is no memory for it."""
    library = native.library() if scaled.device.type == "cpu" else None
    if library is None:
        return draw_by_torch(scaled, params, uniform)
    scaled, uniform = scaled.contiguous(), uniform.contiguous()
    rows, vocab = scaled.shape
    top_p = np.array([p.top_p for p in params], dtype=np.float64)
    top_k = np.array([p.top_k for p in params], dtype=np.int64)
    tokens = torch.empty(rows, dtype=torch.int64)
    pointers = (scaled.data_ptr(), uniform.data_ptr(), top_p.ctypes.data, top_k.ctypes.data, tokens.data_ptr())
    library.tl_draw(*pointers, rows, vocab)
    if (tokens < 0).any():
        raise MemoryError(f"no memory to draw from {vocab} tokens")
    return tokens


def draw_by_torch(scaled: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """`draw` on any device."""
    tokens = torch.empty(len(params), dtype=torch.int64, device=scaled.device)
    plain = [i for i, p in enumerate(params) if not truncates(p)]
    if plain:
        tokens[plain] = invert(torch.softmax(scaled[plain], dim=-1), uniform[plain])
    ranked = [i for i, p in enumerate(params) if truncates(p)]
    if ranked:
        tokens[ranked] = _draw_ranked(scaled[ranked], [params[i] for i in ranked], uniform[ranked])
    return tokens


def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index where the cumulative distribution passes `uniform`. probs: `[rows, n]`; uniform: `[rows, 1]`, below 1.

    Summed in float64. An index of zero probability is never chosen: the search is for the first sum *above* the target,
    and the target is below the last sum.
    """
    cumulative = probs.double().cumsum(dim=-1)
    last = cumulative[:, -1:]
    target = torch.minimum(uniform * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probs.shape[1] - 1)


def _draw_ranked(scaled: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Draw from the top_k likeliest tokens, then from the smallest set of those that holds top_p. int64 `[rows]`.

    Only as many tokens are ranked as the largest top_k needs; with top_p alone a guess is tried first.
    """
    vocab = scaled.shape[1]
    limits = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
    width = min(vocab, max(limit if limit < vocab else _NUCLEUS_GUESS for limit in limits))
    values, ids = scaled.topk(width, dim=-1)  # sorted, likeliest first
    # Probabilities are relative to what top_k leaves: all of the vocabulary where it is off.
    total = scaled.logsumexp(dim=-1, keepdim=True)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scaled.device).unsqueeze(1)
    limit = torch.tensor(limits, device=scaled.device).unsqueeze(1)
    within = torch.arange(width, device=scaled.device) < limit
    kept = values.masked_fill(~within, -torch.inf)
    total = torch.where(limit < vocab, kept.logsumexp(dim=-1, keepdim=True), total)
    probs = (kept - total).exp().double()
    before = probs.cumsum(dim=-1) - probs
    unfinished = (limit == vocab) & (before[:, -1:] + probs[:, -1:] < top_p) & (width < vocab)
    outside = before >= top_p
    outside[:, 0] = False  # top_p = 0 keeps the likeliest
    probs.masked_fill_(outside, 0.0)
    tokens = ids.gather(1, invert(probs, uniform).unsqueeze(1)).squeeze(1)
    for row in unfinished.squeeze(1).nonzero().squeeze(1).tolist():
        tokens[row] = _draw_nucleus(scaled[row], params[row].top_p, uniform[row])
    return tokens


def _draw_nucleus(scaled: torch.Tensor, top_p: float, uniform: torch.Tensor) -> torch.Tensor:
    """top_p over the whole vocabulary, for one row `[vocab]` whose nucleus is wide."""
    values, ids = scaled.sort(descending=True, stable=True)
    probs = values.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs.masked_fill_(before >= top_p, 0.0)
    return ids[invert(probs.unsqueeze(0), uniform.unsqueeze(0))].squeeze(0)
