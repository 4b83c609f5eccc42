"""The attention kernels alone, in the shape of Llama-3.1-8B, against the copy and the matrix rate of the card."""

from __future__ import annotations

import torch

from bench.gpu.card import Card
from bench.gpu.engines import BLOCK_SIZE, decode_plan, prefill_plan
from bench.gpu.figures import Figure, seconds
from engine.geometry import step_geometry
from engine.layers.attention import AttentionConfig
from engine.layers.attention_triton import TritonAttention
from engine.types import StepPlan

_GOAL_DECODE, _GOAL_PREFILL = 0.75, 0.55


def attention(device: torch.device, card: Card, *, dry: bool) -> list[Figure]:
    """Decode at some batch sizes and contexts as a share of the copy; prefill as a share of the matrix rate."""
    heads, kv_heads, head_dim = (4, 2, 32) if dry else (32, 8, 128)
    decodes = ((2, 40),) if dry else ((1, 4096), (1, 16384), (16, 4096), (64, 4096), (64, 1024), (16, 16384))
    prefills = (24,) if dry else (2048, 8192)
    longest = max(*(context for _, context in decodes), *prefills)
    most_tokens = max(rows * context for rows, context in decodes)
    config = AttentionConfig(
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        num_blocks=1 + -(-max(most_tokens, longest) // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        dtype=torch.float32 if dry else torch.bfloat16,
        device=device,
        max_num_seqs=64,
        max_num_batched_tokens=longest,
        max_blocks_per_seq=-(-longest // BLOCK_SIZE),
    )
    backend = TritonAttention(config)
    backend.kv_cache.normal_()
    figures = []
    for rows, context in decodes:
        took = _seconds(backend, decode_plan([context] * rows, 128), device, dry=dry)
        read = 2 * rows * context * kv_heads * head_dim * config.dtype.itemsize
        figures.append(
            Figure(
                "decode_attention",
                f"batch={rows} context={context}",
                "TB/s",
                read / took / 1e12,
                card.copy / 1e12,
                _GOAL_DECODE * card.copy / 1e12 if context >= 4096 else None,
            )
        )
    for length in prefills:
        took = _seconds(backend, prefill_plan(length, 128), device, dry=dry)
        operations = 2 * heads * head_dim * length**2  # two products, half of each under the diagonal
        setting = f"prompt={length}"
        figures.append(Figure("prefill_attention", setting, "TFLOP/s", operations / took / 1e12, card.bf16 / 1e12))
    return figures


def _seconds(backend: TritonAttention, plan: StepPlan, device: torch.device, *, dry: bool) -> float:
    """Of one layer's attention. Launches are queued faster than they run, so the host does not count."""
    config = backend.config
    longest = config.max_blocks_per_seq * config.block_size
    step = step_geometry(plan.rows, config.block_size, longest)
    backend.begin(step)
    width = config.num_heads + 2 * config.num_kv_heads
    qkv = torch.randn(step.num_tokens, width, config.head_dim, device=device).to(config.dtype)
    q, k, v = qkv.split_with_sizes((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    if dry:
        return seconds(lambda: backend.forward(0, q, k, v), device, repeats=1, warm=0)
    return _recorded_seconds(backend, q, k, v, device)


def _recorded_seconds(
    backend: TritonAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: torch.device
) -> float:
    """Twenty launches in one recording, so that starting them from Python is left out."""
    from engine.graphs import CudaRecorder

    times = 20

    def work() -> None:
        for _ in range(times):
            backend.forward(0, q, k, v)

    return seconds(CudaRecorder(device).record(work), device) / times
