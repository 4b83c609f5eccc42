"""Whole models on the kernels, with every kind of weights and of KV cache: the CPU's numbers, and tokens.

Where nothing is rounded on the way, the reference is the CPU's own path in float32. Where eight-bit floats are, it is
the same path with the same roundings in plain torch; how far they lead from whole floats is bounded beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from bench.gpu.engines import triton_runner
from engine.kernels.fp8_gemm import fp8_gemm_reference
from engine.kernels.fp8_pages import Fp8Pages, kv_write_fp8_reference, page_bytes
from engine.kernels.fp8_rows import fp8_rows_reference
from engine.layers import linear
from engine.layers.attention import AttentionConfig
from engine.layers.attention_cpu import CpuAttention
from engine.layers.linear import LinearPolicy
from engine.layers.linear_fp8 import Fp8Linear
from engine.layers.linear_triton import TritonPackedLinear
from engine.layers.moe_triton import FusedExperts
from engine.layers.ops_torch import TorchOps
from engine.loader import open_model
from engine.loader.safetensors import SINGLE_FILE
from engine.models.decoder import Decoder
from engine.quant.fp8 import Fp8Matrix
from engine.quant.matrix import WeightMatrix
from engine.runner import ModelRunner
from engine.sampler import Sampler
from tests.engine.hf_models import write_folder
from tests.engine.kernel_support import kernel_device
from tests.engine.models import all_logits, generate, write_model

CPU = torch.device("cpu")
FEW: dict[str, Any] = {"num_hidden_layers": 2, "num_experts_per_tok": 3, "head_dim": 32}
QWEN3_MOE = FEW | {"num_experts": 6, "moe_intermediate_size": 40}
GPT_OSS = FEW | {"num_local_experts": 5, "sliding_window": 12}
TOKENS = [int(token) for token in np.random.default_rng(4).integers(3, 320, 10)]
PAGES = [7, 3, 9, 5]


class RoundedAttention(CpuAttention):
    """Plain attention over keys and values that have been through eight-bit floats, a scale per token and head."""

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().forward(layer, q, rounded(k), rounded(v), sinks)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, head_dim]` as a page gives it back."""
    tokens, heads, head_dim = x.shape
    pages = Fp8Pages.of(torch.zeros(tokens, page_bytes(1, heads, head_dim), dtype=torch.uint8), 1, heads, head_dim)
    kv_write_fp8_reference(x, pages, torch.arange(tokens))
    return pages.dequantize()[:, 0]


class ReferenceFp8:
    """`Linear`: rows and weights in eight-bit floats, decoded and multiplied by plain torch."""

    def __init__(self, parts: Sequence[WeightMatrix], bias: torch.Tensor | None) -> None:
        matrices = [part for part in parts if isinstance(part, Fp8Matrix)]
        self._codes = torch.from_numpy(np.concatenate([one.codes for one in matrices])).view(torch.float8_e4m3fn)
        self._scale = torch.from_numpy(np.concatenate([one.scale for one in matrices])).T.contiguous()
        self._bias = bias
        self.out_features, self.in_features = self._codes.shape
        self.num_bytes = self._codes.nbytes + self._scale.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = fp8_rows_reference(x, len(self._scale))
        return fp8_gemm_reference(rows, self._codes, self._scale, self._bias)


def plain_runner(
    path: Path, *, attention: Callable[[AttentionConfig], CpuAttention] = CpuAttention, packed: bool = False
) -> ModelRunner:
    """On a CPU, operation by operation, in float32. `packed`: with eight-bit weights by `ReferenceFp8`."""
    source = open_model(path).tensors()
    spec = source.spec
    config = AttentionConfig(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.score_scale,
        num_blocks=16,
        block_size=16,
        dtype=torch.float32,
        device=CPU,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        max_blocks_per_seq=32,
        windows=tuple(layer.window for layer in spec.layers),
        sinks=spec.sinks,
    )
    backend = attention(config)
    policy = LinearPolicy(CPU, torch.float32, packed_rows=64 if packed else 0, dense=False)
    decoder = Decoder(source, policy, backend, TorchOps(), max_position=512)
    return ModelRunner(decoder, backend, Sampler(frozenset()), max_model_len=512)


def kernel_runner(path: Path, *, kv_fp8: bool = False) -> ModelRunner:
    """On the kernels, in float32, every page but the null page holding what is no number."""
    source = open_model(path).tensors()
    runner = triton_runner(source, kernel_device(), max_num_seqs=1, dtype=torch.float32, kv_fp8=kv_fp8)
    runner.attention.kv_cache[:, :, 1:] = 0xFF if kv_fp8 else torch.nan
    return runner


def compare(runner: ModelRunner, reference: ModelRunner, *, most: float = 1e-5) -> None:
    """A prompt in one step and a token in another: the same tokens, and logits that differ by `most` of the largest."""
    expected = generate(reference, TOKENS, 3, pages=PAGES)
    assert len(set(expected)) > 1, "the model repeats itself and proves nothing"
    text = TOKENS + expected[:-1]
    actual, want = (all_logits(one, text, PAGES, chunk=len(text) - 1) for one in (runner, reference))
    assert torch.isfinite(actual).all()
    assert float((actual - want).abs().max() / want.abs().max()) < most
    assert actual[len(TOKENS) - 1 :].argmax(1).tolist() == expected


def distance(one: ModelRunner, other: ModelRunner) -> float:
    """Of the logits of a prompt, as a share of their size."""
    left, right = (all_logits(runner, TOKENS, PAGES, chunk=len(TOKENS)) for runner in (one, other))
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize(("family", "options"), [("Qwen3Moe", QWEN3_MOE), ("GptOss", GPT_OSS)])
def test_mixtures_of_experts(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    write_folder(tmp_path, family, **options)
    runner, reference = kernel_runner(tmp_path), plain_runner(tmp_path)
    assert all(isinstance(layer.mlp, FusedExperts) for layer in runner.decoder.layers)
    compare(runner, reference)


@pytest.mark.parametrize(("encoding", "bits"), [("Q4_1", 4), ("Q8_0", 8)])
def test_packed_weights(encoding: str, bits: int, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, encoding=GGMLQuantizationType[encoding], architecture="qwen3")
    runner, reference = kernel_runner(path), plain_runner(path)
    products = [layer.qkv for layer in runner.decoder.layers]
    assert all(isinstance(one, TritonPackedLinear) and one._weight.bits == bits for one in products)
    compare(runner, reference)


def write_fp8(path: Path, side: int | None) -> None:
    """A Llama's folder with its blocks' matrices in eight-bit floats, a scale per output, or per `side` x `side`."""
    write_folder(path, "Llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    tensors = load_file(path / SINGLE_FILE)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        if side is None:
            scale = weight.abs().amax(1, keepdim=True) / 448
            spread = scale
        else:
            blocks = weight.unflatten(0, (-1, min(side, len(weight)))).unflatten(2, (-1, side))
            scale = blocks.abs().amax((1, 3)) / 448
            spread = scale.repeat_interleave(blocks.shape[1], 0).repeat_interleave(side, 1)
        tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
        tensors[name + ("_scale" if side is None else "_scale_inv")] = scale
    save_file(tensors, path / SINGLE_FILE, {"format": "pt"})
    block = {} if side is None else {"weight_block_size": [side, side]}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"} | block
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("side", [None, 128], ids=["by output", "by block"])
def test_weights_of_eight_bit_floats(side: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fp8(tmp_path, side)
    runner, whole = kernel_runner(tmp_path), plain_runner(tmp_path)
    assert all(isinstance(layer.attention_output, Fp8Linear) for layer in runner.decoder.layers)
    monkeypatch.setattr(
        linear,
        "_packed_linear",
        lambda parts, policy, bias, out_dtype: (
            ReferenceFp8(parts, bias) if all(isinstance(part, Fp8Matrix) for part in parts) else None
        ),
    )
    reference = plain_runner(tmp_path, packed=True)
    assert all(isinstance(layer.attention_output, ReferenceFp8) for layer in reference.decoder.layers)
    # Nearly always equal to the last digits; but sums in another order can turn a code that lies just between two, and
    # a random model magnifies that.
    compare(runner, reference, most=0.05)
    assert distance(reference, whole) < 0.2


def test_a_cache_of_eight_bit_floats(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path)
    runner, reference = kernel_runner(path, kv_fp8=True), plain_runner(path, attention=RoundedAttention)
    compare(runner, reference, most=0.05)
    assert distance(reference, plain_runner(path)) < 0.1
