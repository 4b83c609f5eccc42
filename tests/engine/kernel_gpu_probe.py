"""Runs in a process of its own (test_kernel_gpu.py starts it): steps of many shapes, and the compilations they cause.

Prints the names of kernels that were compiled after the attention backend had been built, as a JSON list.
"""

from __future__ import annotations

import json
import sys

import torch

from engine.geometry import step_geometry
from engine.kernels.jit_monitor import monitor
from engine.layers.attention import AttentionConfig
from engine.layers.attention_triton import TritonAttention
from engine.types import SamplingParams, StepRow
from tests.engine.kernel_support import kernel_device

STEPS = (
    [(1, 1)],
    [(1, 500)],
    [(300, 300)],
    [(1, 100), (1, 17), (1, 16)],
    [(1, 40), (7, 7), (100, 260)],
    [(1, 900)] * 7,
    [(2, 2)] * 5,
)  # rows as (new tokens, keys)


def main() -> list[str]:
    monitor.install()
    device = kernel_device()
    config = AttentionConfig(
        num_layers=1,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        scale=0.125,
        num_blocks=600,
        block_size=16,
        dtype=torch.float16,
        device=device,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_blocks_per_seq=64,
    )
    attention = TritonAttention(config)
    monitor.mark_warm()
    for rows in STEPS:
        step_rows = [
            StepRow(i, [0] * new, keys - new, range(1 + 64 * i, 65 + 64 * i), False, SamplingParams(), [0] * keys, keys)
            for i, (new, keys) in enumerate(rows)
        ]
        step = step_geometry(step_rows, config.block_size, 1024)
        attention.begin(step)
        qkv = torch.randn(step.num_tokens, 15, 64, device=device).to(config.dtype)
        out = attention.forward(0, qkv[:, :9], qkv[:, 9:12], qkv[:, 12:])
        assert torch.isfinite(out).all()
    return list(monitor.late_kernels)


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
