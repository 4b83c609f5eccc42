"""What serving compiles: every kernel launch of a model, described without a GPU and without memory.

`model_launches` goes through the same host functions as serving, with tensors on the "meta" device, for the shapes of
real models. Ahead-of-time compilation, its report and its tests take their work from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.kernels import heuristics
from engine.kernels.attn_decode import decode_launches
from engine.kernels.attn_prefill import prefill_launch
from engine.kernels.expert_table import tiles_for
from engine.kernels.gated import gated_launch
from engine.kernels.kv_write import kv_write_launch
from engine.kernels.launch import Launch
from engine.kernels.moe_gemm import GROUP, ExpertWeights, expert_launch
from engine.kernels.moe_routing import Routing, combine_launch, routing_launches
from engine.kernels.penalise import SETTINGS as PENALTY_SETTINGS
from engine.kernels.penalise import penalise_launch
from engine.kernels.rms_norm import rms_norm_launch
from engine.kernels.rotary import rotary_launch
from engine.kernels.sample import SETTINGS, DrawBuffers, draw_launches
from engine.models.spec import Activation

_TOKENS, _SEQS, _TABLE_WIDTH, _MAX_POSITION = 24, 8, 64, 8192


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture of experts in each block. `encoding`: of the weights, as `moe_gemm.ExpertWeights` has it."""

    count: int
    top_k: int
    inner: int
    renormalise: bool
    encoding: str = "dense"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that kernels are specialised by."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    activation: Activation = Activation.SILU
    block_size: int = 16
    experts: ExpertShape | None = None
    vocab: int = 128_256


# One model per head size and group that the engine is meant for.
MODEL_SHAPES = (
    ModelShape("smollm2-135m", heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536),
    ModelShape("llama-3.2-1b", heads=32, kv_heads=8, head_dim=64, hidden=2048, intermediate=8192),
    ModelShape("phi-2", heads=32, kv_heads=32, head_dim=80, hidden=2560, intermediate=10240),
    ModelShape("phi-3-mini", heads=32, kv_heads=32, head_dim=96, hidden=3072, intermediate=8192, window=2047),
    ModelShape("llama-3.1-8b", heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336),
    ModelShape("llama-3.1-70b", heads=64, kv_heads=8, head_dim=128, hidden=8192, intermediate=28672),
    ModelShape(
        "gemma-2-9b",
        heads=16,
        kv_heads=8,
        head_dim=256,
        hidden=3584,
        intermediate=14336,
        softcap=50.0,
        activation=Activation.GELU_TANH,
    ),
    ModelShape(
        "gpt-oss-20b",
        heads=64,
        kv_heads=8,
        head_dim=64,
        hidden=2880,
        intermediate=2880,
        window=128,
        sinks=True,
        activation=Activation.CLAMPED_SWIGLU,
        experts=ExpertShape(32, 4, 2880, renormalise=True, encoding="mxfp4", bias=True),
    ),
    ModelShape(
        "qwen3-30b-a3b",
        heads=32,
        kv_heads=4,
        head_dim=128,
        hidden=2048,
        intermediate=6144,
        experts=ExpertShape(128, 8, 768, renormalise=True),
    ),
    ModelShape(
        "mixtral-8x7b-awq",
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=4096,
        intermediate=14336,
        experts=ExpertShape(8, 2, 14336, renormalise=True, encoding="int4"),
    ),
)


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One launch and its role in the model: "decode", "decode_direct", "decode_combine", "prefill", ..."""

    role: str
    launch: Launch

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether the kernel multiplies matrices."""
        return self.role in ("decode", "decode_direct", "prefill", "prefill_short") or self.role.startswith(
            ("experts_", "packed_gemm", "fp8_gemm")
        )


def model_launches(
    shape: ModelShape, arch: int, dtype: torch.dtype = torch.bfloat16, *, deterministic: bool = False
) -> Iterator[Specialisation]:
    """Every kernel launch of a model of `shape` on compute capability `arch`, in `dtype`."""
    yield from attention_launches(shape, arch, dtype, deterministic=deterministic)
    yield from _small_launches(shape, dtype)
    yield from _sampling_launches(shape.vocab)
    if shape.experts is not None:
        yield from _expert_launches(shape, shape.experts, dtype)


def attention_launches(
    shape: ModelShape, arch: int, dtype: torch.dtype = torch.bfloat16, *, deterministic: bool = False
) -> Iterator[Specialisation]:
    """The attention kernels' launches: decode (split and direct), combine, prefill (both tiles)."""
    tiles = heuristics.attention_tiles(arch, shape.head_dim, dtype)
    rule = heuristics.SPLIT_FIXED if deterministic else heuristics.SPLIT_AT_LEAST
    cache = _meta((2, 64, shape.block_size, shape.kv_heads, shape.head_dim), dtype)
    tables = _meta((_SEQS, _TABLE_WIDTH), torch.int32)
    seq_lens = _meta((_SEQS,), torch.int32)
    scale, window, softcap = shape.head_dim**-0.5, shape.window, shape.softcap
    sinks = _meta((shape.heads,), torch.float32) if shape.sinks else None
    for max_splits in (8, 1):
        q, _, _ = _projection(shape, _SEQS, dtype)
        launches = decode_launches(
            q,
            cache[0],
            cache[1],
            tables,
            seq_lens,
            _meta(tuple(q.shape), dtype),
            _meta((_SEQS * shape.heads * max_splits * shape.head_dim,), torch.float32),
            _meta((_SEQS * shape.heads * max_splits,), torch.float32),
            scale=scale,
            max_splits=max_splits,
            tile=tiles.decode,
            split_rule=rule,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        roles = ("decode_direct",) if max_splits == 1 else ("decode", "decode_combine")
        for role, launch in zip(roles, launches, strict=True):
            yield Specialisation(role, launch)
    for role, tile in (("prefill", tiles.prefill), ("prefill_short", tiles.prefill_short)):
        q, _, _ = _projection(shape, _TOKENS, dtype)
        launch = prefill_launch(
            q,
            cache[0],
            cache[1],
            tables,
            _meta((_SEQS + 1,), torch.int32),
            seq_lens,
            _meta(tuple(q.shape), dtype),
            scale=scale,
            tile=tile,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        yield Specialisation(role, launch)


def _small_launches(shape: ModelShape, dtype: torch.dtype) -> Iterator[Specialisation]:
    q, k, v = _projection(shape, _TOKENS, dtype)
    cache = _meta((2, 64, shape.block_size, shape.kv_heads, shape.head_dim), dtype)
    positions = _meta((_TOKENS,), torch.int64)
    yield Specialisation("kv_write", kv_write_launch(k, v, cache[0], cache[1], positions))
    yield Specialisation(
        "rotary", rotary_launch(q, k, _meta((_MAX_POSITION, shape.head_dim), torch.float32), positions)
    )
    x = _meta((_TOKENS, shape.hidden), dtype)
    weight = _meta((shape.hidden,), torch.float32)
    yield Specialisation("rms_norm", rms_norm_launch(x, weight, 1e-5, torch.empty_like(x)))
    yield Specialisation("add_rms_norm", rms_norm_launch(x, weight, 1e-5, torch.empty_like(x), torch.empty_like(x)))
    gate_up = _meta((_TOKENS, 2 * shape.intermediate), dtype)
    gated = gated_launch(gate_up, _meta((_TOKENS, shape.intermediate), dtype), shape.activation)
    yield Specialisation("gated", gated)


def _sampling_launches(vocab: int) -> Iterator[Specialisation]:
    settings = _meta((_SEQS, SETTINGS.value), torch.float64)
    buffers = DrawBuffers.empty(_SEQS, vocab, torch.device("meta"))
    launches = draw_launches(_meta((_SEQS, vocab), torch.float32), settings, _meta((_SEQS,), torch.int64), buffers)
    for role, launch in zip(("maximum", "weigh", "compact", "draw"), launches, strict=True):
        yield Specialisation(f"sample_{role}", launch)
    counts, in_prompt = _meta((_SEQS, vocab), torch.int32), _meta((_SEQS, vocab), torch.uint8)
    penalties = _meta((_SEQS, PENALTY_SETTINGS.value), torch.float32)
    launch = penalise_launch(_meta((_SEQS, vocab), torch.float32), counts, in_prompt, penalties)
    yield Specialisation("sample_penalise", launch)


def _expert_launches(shape: ModelShape, experts: ExpertShape, dtype: torch.dtype) -> Iterator[Specialisation]:
    """The routing once, the products by every tile: "experts_up_16", "experts_down_16", ..."""
    slots = _TOKENS * experts.top_k
    x, inner = _meta((_TOKENS, shape.hidden), dtype), _meta((slots, experts.inner), dtype)
    y = _meta((slots, shape.hidden), dtype)
    gate_up = _expert_weights(experts, 2 * experts.inner, shape.hidden, dtype)
    down = _expert_weights(experts, shape.hidden, experts.inner, dtype)
    for index, tile in enumerate(tiles_for(dtype, experts.encoding)):
        block_m = tile.block_m
        routing = Routing.empty(_TOKENS, experts.top_k, experts.count, block_m, torch.device("meta"))
        scores = _meta((_TOKENS, experts.count), torch.float32)
        route, permute = routing_launches(scores, routing, renormalise=experts.renormalise, block_m=block_m)
        if index == 0:
            yield Specialisation("route", route)
        yield Specialisation(f"permute_{block_m}", permute)
        for role, source, weights, out, activation in (
            ("up", x, gate_up, inner, shape.activation),
            ("down", inner, down, y, None),
        ):
            launch = expert_launch(
                source,
                weights,
                routing.blocks,
                routing.order,
                out,
                top_k=experts.top_k,
                tile=tile,
                activation=activation,
            )
            yield Specialisation(f"experts_{role}_{block_m}", launch)
    yield Specialisation("combine", combine_launch(y, routing, x))


def _expert_weights(experts: ExpertShape, rows: int, columns: int, dtype: torch.dtype) -> ExpertWeights:
    bias = _meta((experts.count, rows), torch.float32) if experts.bias else None
    if experts.encoding == "dense":
        return ExpertWeights("dense", _meta((experts.count, rows, columns), dtype), bias=bias)
    groups = (experts.count, columns // GROUP, rows)
    codes = _meta((*groups, GROUP // 2), torch.uint8)
    if experts.encoding == "mxfp4":
        return ExpertWeights("mxfp4", codes, _meta(groups, torch.uint8), bias=bias)
    return ExpertWeights("int4", codes, _meta(groups, torch.float16), _meta(groups, torch.float16), bias)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _projection(shape: ModelShape, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as views of one fused projection."""
    heads, kv_heads = shape.heads, shape.kv_heads
    qkv = _meta((tokens, heads + 2 * kv_heads, shape.head_dim), dtype)
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
