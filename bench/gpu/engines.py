"""Engines of random weights on the device of the check: as in service, and on the Triton kernels wherever they run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.gpu.shapes import RandomModel, Shape
from engine.kernels.product_table import CUBLAS_ABOVE_ROWS
from engine.layers.attention import AttentionConfig
from engine.layers.attention_triton import TritonAttention
from engine.layers.linear import LinearPolicy
from engine.layers.ops_triton import TritonOps
from engine.load_runner import load_runner
from engine.models.decoder import Decoder
from engine.models.tensors import TensorSource
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.sampling.on_device import DeviceSampling
from engine.types import SamplingParams, StepPlan, StepRow

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16


def serving_runner(
    shape: Shape, device: torch.device, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> ModelRunner:
    """As `tierline engine` builds it."""
    return load_runner(
        RandomModel(shape),
        device=str(device),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_cache_bytes=None if device.type == "cuda" else 8 << 20,
    )


def triton_runner(
    source: TensorSource,
    device: torch.device,
    *,
    max_num_seqs: int,
    dtype: torch.dtype | None = None,
    deterministic: bool = False,
    kv_fp8: bool = False,
) -> ModelRunner:
    """A small engine on the Triton kernels, compiled on a GPU, interpreted elsewhere, on the weights as they are.

    `dtype` None: bfloat16 on a GPU, else float32.
    """
    spec, length = source.spec, 512
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = AttentionConfig(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.score_scale,
        num_blocks=1 + max_num_seqs * (length // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=length,
        max_blocks_per_seq=length // BLOCK_SIZE,
        windows=tuple(layer.window for layer in spec.layers),
        softcap=spec.attention_softcap,
        sinks=spec.sinks,
        fp8=kv_fp8,
    )
    attention = TritonAttention(config, deterministic=deterministic)
    policy = LinearPolicy(
        device, dtype, packed_rows=CUBLAS_ABOVE_ROWS, dense=False, triton=True, deterministic=deterministic
    )
    decoder = Decoder(source, policy, attention, TritonOps(), max_position=length)
    sampler = Sampler(frozenset(), DeviceSampling(max_num_seqs, spec.vocab_size, device))
    return ModelRunner(decoder, attention, sampler, max_model_len=length)


def decode_plan(
    lengths: Sequence[int], vocabulary: int, params: SamplingParams = GREEDY, *, pages_each: int | None = None
) -> StepPlan:
    """Rows of one new token, each the last of so many; row `i` has `pages_each` pages of its own."""
    each = pages_each or -(-max(lengths) // BLOCK_SIZE)
    rows = []
    for i, length in enumerate(lengths):
        tokens = [(7 * i + 13 * j) % vocabulary for j in range(length)]
        pages = range(1 + i * each, 1 + (i + 1) * each)
        rows.append(StepRow(i, tokens[-1:], length - 1, pages, True, params, tokens, length))
    return StepPlan(rows)


def prefill_plan(length: int, vocabulary: int, params: SamplingParams = GREEDY, *, first_page: int = 1) -> StepPlan:
    """One prompt of `length` tokens."""
    tokens = [13 * j % vocabulary for j in range(length)]
    pages = range(first_page, first_page - (-length // BLOCK_SIZE))
    return StepPlan([StepRow(0, tokens, 0, pages, True, params, tokens, length)])
