"""The decoder against transformers on small random models in float32: whole prompts, chunks, and token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.layers import native
from engine.load_runner import load_runner
from tests.engine.models import all_logits, write_model

T = GGMLQuantizationType
TOKENS = [int(t) for t in np.random.default_rng(7).integers(2, 320, 45)]
PAGES = [5, 2, 9]  # 16 tokens each, not in order


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled CPU kernels and without."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    else:
        compiled = native.build()  # also where TIERLINE_NATIVE=0 turns them off
        monkeypatch.setattr(native, "library", lambda: compiled)
    return str(request.param)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": False},
        {"head_dim": 16},
        {"head_dim": 24},  # no multiple of the vector width: torch serves it
        {"architecture": "qwen2", "head_dim": 16},
        {"architecture": "qwen3"},
        {"linear_factor": 4.0},
        {"rope_factors": [1.0 + i / 4 for i in range(16)]},
        {"encoding": T.Q4_1},
        {"encoding": T.Q4_0},
        {"encoding": T.Q8_0},
        {"encoding": T.F16},
        {"encoding": T.BF16},
    ],
    ids=str,
)
def test_logits_equal_transformers(tmp_path: Path, kernels: str, options: dict[str, object]) -> None:
    path = tmp_path / "tiny.gguf"
    reference = write_model(path, **options)  # type: ignore[arg-type]
    with torch.inference_mode():
        want = reference(torch.tensor([TOKENS])).logits[0]
    assert want.std() > 0.2, "logits this flat would match by accident"
    runner = load_runner(path, precision="float32", max_model_len=64, kv_cache_bytes=1 << 20)
    for chunk in (len(TOKENS), 7, 1):
        runner.attention.kv_cache.fill_(torch.nan)
        assert torch.allclose(all_logits(runner, TOKENS, PAGES, chunk), want, atol=1e-4, rtol=1e-4), f"chunk {chunk}"


@pytest.mark.parametrize("encoding", [T.Q4_1, T.Q8_0, T.F32], ids=lambda kind: kind.name)
def test_auto_stays_close(tmp_path: Path, kernels: str, encoding: GGMLQuantizationType) -> None:
    path = tmp_path / "tiny.gguf"
    reference = write_model(path, encoding=encoding)
    with torch.inference_mode():
        want = reference(torch.tensor([TOKENS])).logits[0]
    runner = load_runner(path, max_model_len=64, kv_cache_bytes=1 << 20)
    for chunk in (len(TOKENS), 1):
        error = (all_logits(runner, TOKENS, PAGES, chunk) - want).abs().max() / want.abs().max()
        assert error < 0.05, f"chunk {chunk}"


def test_a_wrong_permutation_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    reference = write_model(path)
    monkeypatch.setattr("engine.loader.families.undo_permutation", lambda heads, dim: np.arange(heads * dim))
    runner = load_runner(path, precision="float32", max_model_len=64, kv_cache_bytes=1 << 20)
    with torch.inference_mode():
        want = reference(torch.tensor([TOKENS])).logits[0]
    assert not torch.allclose(all_logits(runner, TOKENS, PAGES, 64), want, atol=1e-2)
