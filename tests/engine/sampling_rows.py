"""Rows and logits for the tests of the sampler."""

from __future__ import annotations

import torch

from engine.sampler import Sampler
from engine.types import RowResult, SamplingParams, StepRow

VOCAB = 16
END = frozenset({3})


def row(
    params: SamplingParams, *, request_id: int = 0, prompt: tuple[int, ...] = (1, 2), answer: tuple[int, ...] = ()
) -> StepRow:
    tokens = [*prompt, *answer]
    return StepRow(request_id, tokens[-1:], len(tokens) - 1, [1], True, params, tokens, len(prompt))


def logits(*shape: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def sample(values: torch.Tensor, rows: list[StepRow]) -> list[RowResult]:
    before = values.clone()
    results = Sampler(END).sample(values, rows)
    assert torch.equal(values, before), "logits are not the sampler's to change"
    return results
