"""All blocks in one call of the compiled kernels: the same bits as operation by operation, only where they serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.geometry import step_geometry
from engine.layers import linear_native, native
from engine.layers.blocks_native import NativeBlocks
from engine.load_runner import load_runner
from engine.runner import ModelRunner
from engine.types import StepRow
from tests.engine.models import row, write_model

T = GGMLQuantizationType


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels are in use, and alone, also where they are turned off or slow at prompts."""
    kernels = native.build()
    monkeypatch.setattr(native, "library", lambda: kernels)
    monkeypatch.setattr(linear_native, "prompt_gain", lambda: 100.0)


def load(path: Path, precision: str = "auto") -> ModelRunner:
    return load_runner(path, device="cpu", precision=precision, max_model_len=512, kv_cache_bytes=1 << 22)


def states(runner: ModelRunner, rows: list[StepRow]) -> torch.Tensor:
    """The normed states of all tokens, from a cache that is the same before each call."""
    runner.attention.kv_cache.copy_(
        torch.randn(runner.attention.kv_cache.shape, generator=torch.Generator().manual_seed(0))
    )
    step = step_geometry(rows, 16, 512)
    runner.attention.begin(step)
    ids = torch.tensor([token for r in rows for token in r.token_ids])
    with torch.inference_mode():
        return runner.decoder.hidden(ids, torch.from_numpy(step.positions), torch.arange(len(ids)))


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": T.Q4_1},
        {"encoding": T.Q8_0, "head_dim": 64},
        {"encoding": T.Q4_0, "architecture": "qwen2", "heads": 3},
        {"encoding": T.Q4_1, "architecture": "qwen3"},
    ],
    ids=str,
)
def test_one_call_gives_the_same_bits(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, **options)  # type: ignore[arg-type]
    runner = load(path)
    blocks = runner.decoder.blocks
    assert isinstance(blocks, NativeBlocks)
    lengths = [1, 40, 300, 17, 129]  # the last row computes three tokens
    first = iter(range(1, 200, 20))
    rows = [
        row(list(range(3, 3 + length)), range(start := next(first), start + 20), start=length - (3 if n == 4 else 1))
        for n, length in enumerate(lengths)
    ]
    for some in (rows[:1], rows, rows[1:3]):  # scratch that grows, and that is larger than needed
        together = states(runner, some)
        cache = runner.attention.kv_cache.clone()
        assert blocks.serves(sum(len(r.token_ids) for r in some))
        runner.decoder.blocks = None
        assert torch.equal(states(runner, some), together)
        assert torch.equal(runner.attention.kv_cache, cache)
        runner.decoder.blocks = blocks


def test_a_step_with_prompts_is_one_call_too(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, encoding=T.Q4_1)
    runner = load(path)
    blocks = runner.decoder.blocks
    assert blocks is not None
    assert blocks.serves(runner.attention.config.max_num_batched_tokens)
    assert not blocks.serves(runner.attention.config.max_num_batched_tokens + 1)
    prompts = [
        row([7] * 5, [1], start=0),
        row(list(range(3, 203)), range(2, 15), start=0),
        row([9] * 40, [20, 21, 22], start=0),
    ]
    together = states(runner, prompts)
    runner.decoder.blocks = None
    assert torch.equal(states(runner, prompts), together)


def test_where_a_part_is_not_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, encoding=T.Q4_1, head_dim=16)
    assert load(path).decoder.blocks is None
    write_model(path, encoding=T.F16)
    assert load(path).decoder.blocks is None
    write_model(path, encoding=T.Q4_1)
    assert load(path, "float32").decoder.blocks is None
    assert load(path, "bfloat16").decoder.blocks is None
    # Packed weights for few rows, dense ones for many: one call for few.
    monkeypatch.setattr(linear_native, "prompt_gain", lambda: 0.0)
    runner = load(path)
    assert runner.decoder.blocks is not None
    assert runner.decoder.blocks.serves(8)
    assert not runner.decoder.blocks.serves(9)
    monkeypatch.setattr(native, "library", lambda: None)
    assert load(path).decoder.blocks is None
