"""All blocks in one call of the compiled kernels: the same bits as operation by operation, only where they serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.geometry import step_geometry
from engine.layers import linear_native, native
from engine.layers.attention import AttentionConfig
from engine.layers.attention_cpu import CpuAttention
from engine.layers.blocks_native import NativeBlocks
from engine.layers.device import build_ops
from engine.layers.linear import LinearPolicy
from engine.load_runner import load_runner
from engine.models.decoder import Decoder
from engine.models.rope import RopeSpec
from engine.models.spec import Activation, LayerSpec, ModelSpec
from engine.models.tensors import LayerTensors, NetworkTensors
from engine.quant.blocks import BlockTensor
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


class RandomTensors:
    """Four-bit weights and float32 vectors of any block that a spec describes."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._random = np.random.default_rng(0)

    def matrix(self, rows: int, columns: int) -> BlockTensor:
        values = self._random.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        return BlockTensor(quantize(values, T.Q4_1), T.Q4_1, (rows, columns))

    def vector(self, size: int) -> np.ndarray:
        return 1 + self._random.standard_normal(size, dtype=np.float32) / 4

    def layers(self) -> Iterator[LayerTensors]:
        spec = self.spec
        hidden, q_size, kv_size = spec.hidden_size, spec.q_size, spec.kv_size
        for _ in spec.layers:
            yield LayerTensors(
                attention_norm=self.vector(hidden),
                qkv=[self.matrix(q_size + 2 * kv_size, hidden)],
                attention_output=self.matrix(hidden, q_size),
                mlp_norm=self.vector(hidden),
                mlp=NetworkTensors(
                    [self.matrix(2 * spec.intermediate_size, hidden)], self.matrix(hidden, spec.intermediate_size)
                ),
                q_norm=self.vector(spec.head_dim) if spec.qk_norm else None,
                k_norm=self.vector(spec.head_dim) if spec.qk_norm else None,
                sinks=self.vector(spec.num_heads) if spec.sinks else None,
                post_attention_norm=self.vector(hidden) if spec.post_norms else None,
                post_mlp_norm=self.vector(hidden) if spec.post_norms else None,
            )

    def embedding(self) -> BlockTensor:
        return self.matrix(self.spec.vocab_size, self.spec.hidden_size)

    output = embedding

    def final_norm(self) -> np.ndarray:
        return self.vector(self.spec.hidden_size)


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


@pytest.mark.parametrize(
    ("activation", "flags"),
    [
        (Activation.GELU_TANH, {"qk_norm": True, "post_norms": True, "embedding_scale": 8.0}),
        (Activation.CLAMPED_SWIGLU, {"sinks": True}),
    ],
    ids=["gemma", "gpt-oss"],
)
def test_blocks_that_differ_from_layer_to_layer(activation: Activation, flags: dict[str, float]) -> None:
    """Windows, several rotary embeddings or none, further norms, sinks: the same bits as one by one."""
    near, far = RopeSpec(theta=10_000.0, rotary_dim=32), RopeSpec(theta=1e6, rotary_dim=64)
    spec = ModelSpec(
        architecture="any",
        layers=(LayerSpec(near, window=20), LayerSpec(far), LayerSpec(None), LayerSpec(near, window=150)),
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=100,
        max_position=512,
        norm_eps=1e-6,
        tied_embeddings=False,
        activation=activation,
        **flags,  # type: ignore[arg-type]
    )
    device = torch.device("cpu")
    config = AttentionConfig(
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        scale=spec.score_scale,
        num_blocks=60,
        block_size=16,
        dtype=torch.float32,
        device=device,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_blocks_per_seq=32,
        windows=tuple(layer.window for layer in spec.layers),
        sinks=spec.sinks,
    )
    attention = CpuAttention(config)
    policy = LinearPolicy(device, torch.float32, packed_rows=8, dense=False)
    decoder = Decoder(RandomTensors(spec), policy, attention, build_ops(device), max_position=512)
    rows = [
        row([7] * 200, range(1, 20), start=199),
        row(list(range(90)) * 3, range(20, 40), start=240),
        row([3] * 40, range(40, 50)),
    ]
    step = step_geometry(rows, 16, 512)
    ids = torch.tensor([token for r in rows for token in r.token_ids])
    results = []
    assert decoder.blocks is not None
    for blocks in (decoder.blocks, None):
        decoder.blocks = blocks
        attention.kv_cache.copy_(torch.randn(config.kv_shape, generator=torch.Generator().manual_seed(0)))
        attention.begin(step)
        with torch.inference_mode():
            hidden = decoder.hidden(ids, torch.from_numpy(step.positions), torch.arange(len(ids)))
        results.append((hidden, attention.kv_cache.clone()))
        assert hidden.isfinite().all()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


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
