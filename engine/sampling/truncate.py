"""What cuts the tail off a distribution: min_p, typical_p, top_k and top_p, in this order, after the temperature.

`scale` and `cut` turn logits into logits whose softmax is the distribution that a row draws from. The sampler cuts with
top_k and top_p while it draws (`draw.draw_ranked`), which sorts less; `target_probs` gives the whole distribution,
for those who need to know it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.layers.staging import upload
from engine.types import SamplingParams


def column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """float32 `[rows, 1]`."""
    return upload(np.array(values, dtype=np.float32), device).unsqueeze(1)


def scale(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, min_p and typical_p applied: float32 `[rows, vocab]`, at most 0, a new tensor.

    The largest logit is subtracted first, so that no temperature makes any value overflow.
    """
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= column([p.temperature for p in params], logits.device)
    if any(p.min_p > 0 for p in params):
        scaled.masked_fill_(scaled < column([p.min_p for p in params], logits.device).log(), -torch.inf)
    for i, p in enumerate(params):
        if p.typical_p < 1.0:
            _keep_typical(scaled[i], p.typical_p)
    return scaled


def _keep_typical(scaled: torch.Tensor, mass: float) -> None:
    """Locally typical sampling (arXiv 2202.00666, section 4) of one row `[vocab]`, in place.

    Kept are the tokens whose information content is nearest to the entropy, as few as hold `mass`, and at least one.
    """
    logprobs = scaled.double().log_softmax(dim=-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nansum()  # 0 * -inf counts nothing
    order = (-logprobs - entropy).abs().argsort(stable=True)
    ranked = probs[order]
    outside = ranked.cumsum(dim=-1) - ranked >= mass
    outside[0] = False
    scaled.masked_fill_(torch.empty_like(outside).scatter_(0, order, outside), -torch.inf)


def truncates(params: SamplingParams) -> bool:
    """Whether top_k or top_p is asked for."""
    return params.top_k > 0 or params.top_p < 1.0


def target_probs(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The distributions that rows draw from, float64 `[rows, vocab]`. scaled: from `scale`."""
    probs = scaled.double().softmax(dim=-1)
    for i, p in enumerate(params):
        if not truncates(p):
            continue
        ranked, order = probs[i].sort(descending=True, stable=True)
        if 0 < p.top_k < len(ranked):
            ranked[p.top_k :] = 0.0
            ranked /= ranked.sum()
        outside = ranked.cumsum(dim=-1) - ranked >= p.top_p
        outside[0] = False  # top_p = 0 keeps the likeliest
        ranked[outside] = 0.0
        probs[i, order] = ranked / ranked.sum()
    return probs
