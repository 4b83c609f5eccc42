"""Which implementation multiplies by a model's weights: by encoding, rows and machine; all of them agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.layers import linear_native, native, probe
from engine.layers.linear import (
    DenseLinear,
    Int4PackLinear,
    LinearPolicy,
    PrepackedLinear,
    SplitLinear,
    build_linear,
    decode,
)
from engine.layers.linear_native import NativePackedLinear
from engine.load_runner import load_runner
from engine.quant.blocks import BlockTensor
from tests.engine.models import write_model

T = GGMLQuantizationType
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> BlockTensor:
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    return BlockTensor(quantize(values, kind), kind, (rows, columns))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels are in use, also where the tests run with TIERLINE_NATIVE=0."""
    kernels = native.build()
    monkeypatch.setattr(native, "library", lambda: kernels)


@pytest.mark.usefixtures("compiled")
def test_every_linear_agrees_with_the_weights() -> None:
    tensor = weight(T.Q4_1, 64, 96)
    x, bias = randn(5, 96), randn(64, seed=1)
    dense = decode([tensor], torch.float32)
    want = x @ dense.T + bias
    int4 = tensor.affine()
    assert int4 is not None
    for linear, tolerance in (
        (DenseLinear(dense, bias), 1e-6),
        (PrepackedLinear(dense, bias), 1e-5),
        (Int4PackLinear(int4, torch.float32, bias), 1e-4),
        (build_linear([tensor], LinearPolicy(CPU, torch.float32, packed_rows=2), bias.numpy()), 1e-4),
        (build_linear([tensor], LinearPolicy(CPU, torch.float32, packed_rows=2, dense=False), bias.numpy()), 1e-4),
    ):
        assert float((linear(x) - want).abs().max() / want.abs().max()) < tolerance
        assert (linear.out_features, linear.in_features) == (64, 96)
        assert linear.num_bytes > 0


@pytest.mark.usefixtures("compiled")
def test_rows_choose_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = LinearPolicy(CPU, torch.float32, packed_rows=4)
    parts = [weight(T.Q4_1, 32, 64), weight(T.Q4_1, 16, 64, seed=1)]
    linear = build_linear(parts, policy)
    assert isinstance(linear, SplitLinear)
    assert isinstance(linear.few, NativePackedLinear)
    assert isinstance(linear.many, PrepackedLinear)
    # Parts in different encodings are packed as the widest; others have no packed form.
    mixed = build_linear([parts[0], weight(T.Q8_0, 16, 64)], policy)
    assert isinstance(mixed, SplitLinear)
    assert isinstance(mixed.few, NativePackedLinear)
    assert mixed.few.bits == 8
    assert isinstance(build_linear([parts[0], weight(T.F16, 16, 64)], policy), PrepackedLinear)
    assert isinstance(build_linear([weight(T.BF16, 16, 64)], policy), PrepackedLinear)
    assert isinstance(build_linear(parts, LinearPolicy(CPU, torch.float32, packed_rows=0)), PrepackedLinear)
    alone = LinearPolicy(CPU, torch.float32, packed_rows=4, dense=False)
    assert isinstance(build_linear(parts, alone), NativePackedLinear)
    assert isinstance(build_linear([weight(T.Q5_0, 16, 64)], alone), NativePackedLinear)
    assert isinstance(build_linear([weight(T.F16, 16, 64)], alone), PrepackedLinear)
    monkeypatch.setattr(native, "library", lambda: None)
    fallback = build_linear(parts, LinearPolicy(CPU, torch.bfloat16, packed_rows=4))
    assert isinstance(fallback, SplitLinear)
    assert isinstance(fallback.few, Int4PackLinear)
    assert isinstance(build_linear([weight(T.Q5_0, 16, 64)], LinearPolicy(CPU, torch.float32, 4)), PrepackedLinear)
    monkeypatch.setattr("engine.layers.probe.int4pack_works", lambda dtype: False)
    monkeypatch.setattr("engine.layers.probe.prepacked_works", lambda dtype: False)
    assert isinstance(build_linear(parts, policy), DenseLinear)


@pytest.mark.usefixtures("compiled")
def test_auto_decodes_only_what_the_kernels_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    assert linear_native.prompt_gain() > 0.1
    monkeypatch.setattr(linear_native, "prompt_gain", lambda: 100.0)
    monkeypatch.setattr(probe, "bfloat16_gain", lambda: 0.0)  # dense copies in float32, whatever the processor
    kinds: dict[str, list[type]] = {}
    for encoding in (T.Q4_1, T.Q8_0, T.F16):
        write_model(path, encoding=encoding)
        layer = load_runner(path, device="cpu", max_model_len=64, kv_cache_bytes=1 << 20).decoder.layers[0]
        kinds[encoding.name] = [type(linear) for linear in (layer.qkv, layer.attention_output, layer.mlp.gate_up)]
    assert kinds == {
        "Q4_1": [NativePackedLinear] * 3,
        "Q8_0": [NativePackedLinear] * 3,
        "F16": [PrepackedLinear] * 3,
    }
    # Packed weights that are slow at prompts: a dense copy serves those.
    monkeypatch.setattr(linear_native, "prompt_gain", lambda: 0.5)
    write_model(path, encoding=T.Q4_1)
    qkv = load_runner(path, device="cpu", max_model_len=64, kv_cache_bytes=1 << 20).decoder.layers[0].qkv
    assert isinstance(qkv, SplitLinear)
    assert isinstance(qkv.few, NativePackedLinear)
