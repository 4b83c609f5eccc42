"""Drawing on a CPU, compiled and by torch, against a sort of everything in float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from engine.layers import native
from engine.sampling.draw import draw
from engine.types import SamplingParams

_BUILDS = {"this processor": (), "portable": ("-DTIERLINE_PORTABLE", "-mno-avx512f", "-O1"), "torch": None}


@pytest.fixture(params=_BUILDS, autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL | None:
    flags = _BUILDS[request.param]
    kernels = None if flags is None else native.build(flags)
    monkeypatch.setattr(native, "library", lambda: kernels)
    return kernels


def by_sorting(scaled: np.ndarray, params: SamplingParams, uniform: float) -> tuple[int, float]:
    """The token, and how far from a border the number fell, as a share of what it was drawn from."""
    weights = np.exp(scaled.astype(np.float64))
    cut = params.top_k > 0 or params.top_p < 1
    order = np.argsort(-weights, kind="stable") if cut else np.arange(len(weights))
    if params.top_k > 0:
        order = order[: params.top_k]
    ranked = weights[order]
    before = np.cumsum(ranked) - ranked
    kept = order[(before < params.top_p * ranked.sum()) | (np.arange(len(order)) == 0)] if cut else order
    borders = np.cumsum(weights[kept])
    target = uniform * borders[-1]
    return int(kept[np.searchsorted(borders, target, side="right")]), np.abs(borders - target).min() / borders[-1]


PARAMS = [
    SamplingParams(),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=1e-9, top_k=50),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=40, top_p=0.7),
    SamplingParams(top_k=10**9, top_p=0.999),
]


@pytest.mark.parametrize("vocab", [1, 7, 512, 1000, 20_011])
@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0, 30.0])
def test_tokens_are_those_of_a_sort(library: ctypes.CDLL | None, vocab: int, spread: float) -> None:
    """Flat and peaked, with ties, and with tokens that are ruled out. Torch has tokens of one weight in any order."""
    random = np.random.default_rng(vocab)
    logits = random.standard_normal((3 * len(PARAMS), vocab)) * spread
    logits[::2] = np.round(logits[::2])  # many of the same weight
    logits[:, 1::3] = -np.inf
    scaled = (logits - logits.max(axis=-1, keepdims=True)).astype(np.float32)
    params = PARAMS * 3
    uniform = np.concatenate([random.random(2 * len(PARAMS)), np.full(len(PARAMS), 1 - 2**-53)])
    got = draw(torch.from_numpy(scaled), params, torch.from_numpy(uniform).unsqueeze(1)).tolist()
    clear = 0
    for token, row, p, u in zip(got, scaled, params, uniform, strict=True):
        want, distance = by_sorting(row, p, u)
        assert row[token] > -np.inf
        if distance > 1e-6:
            assert token == want or (library is None and row[token] == row[want]), (p, u)
            clear += 1
    assert clear >= len(PARAMS)


def test_a_row_that_is_no_distribution_harms_no_other() -> None:
    scaled = (torch.arange(33) * -1e-3).repeat(4, 1)
    scaled[1] = torch.nan
    scaled[2, 5:] = -torch.inf
    params = [SamplingParams(top_k=5), SamplingParams(top_p=0.5), SamplingParams(top_k=30), SamplingParams()]
    tokens = draw(scaled, params, torch.full((4, 1), 0.99, dtype=torch.float64)).tolist()
    assert 0 <= tokens[1] < 33
    assert tokens[0] == tokens[2] == 4
    assert tokens[3] == 32
