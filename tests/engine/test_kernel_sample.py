"""Tokens drawn by the kernels are those that the plain sampler draws with the same number, and as often as they should
be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.sampling.draw import draw
from engine.sampling.on_device import DeviceSampling
from engine.sampling.truncate import scale, target_probs
from engine.types import SamplingParams
from tests.engine.kernel_support import kernel_device


def plain_draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> list[int]:
    numbers = torch.tensor(uniform, dtype=torch.float64).unsqueeze(1)
    return draw(scale(logits, params), params, numbers).tolist()


def kernel_draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> list[int]:
    device = kernel_device()
    tokens = torch.full((len(logits),), -1, dtype=torch.int64, device=device)
    DeviceSampling(1, logits.shape[1], device).draw_into(tokens, logits.to(device), range(len(logits)), params, uniform)
    return tokens.tolist()


def logits_of(rows: int, vocab: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def numbers(count: int, seed: int = 0) -> list[float]:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()


KINDS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=4.0),
    "top_k": SamplingParams(top_k=20),
    "top_1": SamplingParams(top_k=1, temperature=2.0),
    "top_k beyond the vocabulary": SamplingParams(top_k=1_000_000),
    "nucleus": SamplingParams(top_p=0.9),
    "wide nucleus": SamplingParams(top_p=0.999, temperature=3.0),
    "empty nucleus": SamplingParams(top_p=0.0),
    "min_p": SamplingParams(min_p=0.05),
    "all": SamplingParams(temperature=1.3, min_p=0.01, top_k=40, top_p=0.8),
    "typical": SamplingParams(typical_p=0.5),
    "typical and all": SamplingParams(temperature=1.5, typical_p=0.6, min_p=0.01, top_k=30, top_p=0.9),
}


@pytest.mark.parametrize("vocab", [1, 1000, 4099])
def test_draws_are_those_of_the_plain_sampler(vocab: int) -> None:
    """A batch of rows of every kind, one beside the other."""
    params = list(KINDS.values())
    logits, uniform = logits_of(len(params), vocab, seed=vocab), numbers(len(params), vocab)
    assert kernel_draw(logits, params, uniform) == plain_draw(logits, params, uniform)


def test_banned_tokens_are_never_drawn() -> None:
    """Whole chunks of minus infinity, also the first and the last one, and numbers at both ends."""
    logits = torch.full((4, 6500), -torch.inf)
    logits[:, 2100:2110] = logits_of(4, 10)
    params = [SamplingParams(), SamplingParams(top_k=50, top_p=0.99999)] * 2
    uniform = [0.0] * 2 + [1.0 - 2.0**-53] * 2
    drawn = kernel_draw(logits, params, uniform)
    assert drawn == plain_draw(logits, params, uniform)
    assert all(2100 <= token < 2110 for token in drawn)


def test_equally_likely_tokens_count_in_order_of_the_vocabulary() -> None:
    logits = torch.zeros(3, 2500)
    logits[2, 2490:] = 1.0
    params = [SamplingParams(top_k=4)] * 2 + [SamplingParams(top_k=12)]
    assert kernel_draw(logits, params, [0.3, 0.76, 0.999999]) == [1, 3, 1]


def test_a_nucleus_ends_within_equally_likely_tokens() -> None:
    """Of ten tokens of a tenth each, 0.35 takes four."""
    logits = torch.full((2, 100), -torch.inf)
    logits[:, 50:60] = 7.0
    assert kernel_draw(logits, [SamplingParams(top_p=0.35)] * 2, [0.9999, 0.5]) == [53, 52]


def test_rows_that_do_not_draw_keep_their_tokens() -> None:
    device = kernel_device()
    logits = logits_of(4, 500).to(device)
    tokens = torch.tensor([7, 7, 7, 7], device=device)
    DeviceSampling(1, 500, device).draw_into(
        tokens, logits, [2, 0], [SamplingParams(), SamplingParams(top_k=3)], [0.5, 0.5]
    )
    expected = plain_draw(logits[[2, 0]].cpu(), [SamplingParams(), SamplingParams(top_k=3)], [0.5, 0.5])
    assert tokens.tolist() == [expected[1], 7, expected[0], 7]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over a vocabulary of 16 with random numbers, at the 99.9 % quantile of 15 degrees of freedom."""
    logits, count, params = logits_of(1, 16, spread=1.0, seed=5), 160, SamplingParams(temperature=1.2)
    drawn = kernel_draw(logits.expand(count, -1), [params] * count, numbers(count, 9))
    expected = target_probs(scale(logits, [params]), [params])[0] * count
    seen = torch.bincount(torch.tensor(drawn), minlength=16).double()
    assert float(((seen - expected).square() / expected).sum()) < 37.7


def test_ranked_draws_follow_the_distribution() -> None:
    """Numbers that are spread evenly: at most one draw of difference per token."""
    params, count = SamplingParams(top_k=9, top_p=0.8), 8
    logits = logits_of(1, 16, spread=1.0, seed=5)
    drawn = kernel_draw(logits.expand(count, -1), [params] * count, [(i + 0.5) / count for i in range(count)])
    expected = target_probs(scale(logits, [params]), [params])[0] * count
    seen = torch.bincount(torch.tensor(drawn), minlength=16).double()
    assert (seen - expected).abs().max() <= 1.0
    assert not seen[expected == 0].any()
