"""Runs in a process of its own (test_kernel_compile.py starts it): Triton's just-in-time path without a GPU.

A stand-in for the driver says "compute capability 9.0" and launches are stopped after compilation, so that what the
serving path would compile, and when, can be observed on any machine. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.kernels import heuristics
from engine.kernels.attn_decode import decode_launches
from engine.kernels.attn_prefill import prefill_launch
from engine.kernels.compile import compile_kernel
from engine.kernels.jit_monitor import JitMonitor
from engine.kernels.kv_write import kv_write_launch
from engine.kernels.launch import FP_FUSION, Launch
from engine.kernels.penalise import SETTINGS as PENALTY_SETTINGS
from engine.kernels.penalise import penalise_launch
from engine.kernels.rms_norm import rms_norm_launch
from engine.kernels.rotary import rotary_launch
from engine.kernels.sample import SETTINGS, DrawBuffers, draw_launches
from engine.kernels.specialisations import MODEL_SHAPES, model_launches

ARCH = 90
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
VOCAB = 5000


class DriverWithoutDevice:
    """The few answers that Triton's launcher needs before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCH, 32)


def jit(launch: Launch) -> None:
    """As `Launch.run`, up to and including compilation."""
    launch.kernel.run(
        grid=launch.grid,
        warmup=True,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=FP_FUSION,
        **launch.args,
        **launch.constants,
    )


def identity(source: Any, metadata: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one compiled kernel from another, without the empty entries that Triton's releases write or not."""
    attributes = {path: value for path, value in source.attrs.items() if value}
    options = {name: metadata[name] for name in ("num_warps", "num_stages", "enable_fp_fusion", "target")}
    return source.name, dict(source.signature), source.constants, attributes, str(options)


def serving_launches(seqs: int, tokens: int, width: int, max_splits: int, shift: int) -> Iterable[Launch]:
    """A step's launches with these sizes. Metadata starts `shift` elements into its buffer: aligned or not."""
    cache = torch.empty(2, 8, 16, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    qkv = torch.empty(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    q, k, v = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    out = torch.empty(q.shape, dtype=q.dtype)
    tables = torch.zeros(seqs * width + shift, dtype=torch.int32)[shift:].view(seqs, width)
    seq_lens = torch.zeros(seqs + shift, dtype=torch.int32)[shift:]
    starts = torch.zeros(seqs + 1 + shift, dtype=torch.int32)[shift:]
    slots = torch.zeros(tokens + shift, dtype=torch.int64)[shift:]
    scratch = torch.empty(seqs * HEADS * max_splits * HEAD_DIM), torch.empty(seqs * HEADS * max_splits)
    tiles = heuristics.attention_tiles(ARCH, HEAD_DIM, q.dtype)
    pages = (cache[0], cache[1], tables)
    yield kv_write_launch(k, v, cache[0], cache[1], slots)
    yield rotary_launch(q, k, torch.empty(64, HEAD_DIM), slots)
    yield rms_norm_launch(
        qkv.view(tokens, -1), torch.empty(15 * HEAD_DIM), 1e-5, torch.empty_like(qkv).view(tokens, -1)
    )
    yield from decode_launches(
        q[:seqs],
        *pages,
        seq_lens,
        out[:seqs],
        *scratch,
        scale=0.125,
        max_splits=max_splits,
        tile=tiles.decode,
        split_rule=heuristics.SPLIT_AT_LEAST,
    )
    yield prefill_launch(q, *pages, starts, seq_lens, out, scale=0.125, tile=tiles.prefill_short)
    settings = torch.zeros(seqs, SETTINGS.value, dtype=torch.float64)
    buffers = DrawBuffers.empty(seqs, VOCAB, torch.device("cpu"))
    yield from draw_launches(torch.zeros(seqs, VOCAB), settings, torch.zeros(seqs, dtype=torch.int64), buffers)
    counts, in_prompt = torch.zeros(9, VOCAB, dtype=torch.int32), torch.zeros(9, VOCAB, dtype=torch.uint8)
    yield penalise_launch(torch.zeros(seqs, VOCAB), counts, in_prompt, torch.zeros(seqs, PENALTY_SETTINGS.value))


def main() -> dict[str, Any]:
    triton.runtime.driver.set_active(DriverWithoutDevice())
    seen: list[tuple[Any, ...]] = []
    triton.knobs.compilation.listener = lambda *, src, metadata, **_: seen.append(identity(src, metadata))

    # 1. What is compiled ahead of time is what the just-in-time path asks for.
    ahead = [part.launch for part in model_launches(MODEL_SHAPES[0], ARCH)]
    for launch in ahead:
        compile_kernel(launch, ARCH)
    compiled_ahead, seen[:] = list(seen), []
    for launch in ahead:
        jit(launch)
    differing = [one[0] for one, other in zip(compiled_ahead, seen, strict=True) if one != other]
    listened = len(seen)

    # 2. After one step has been compiled, steps of other sizes compile nothing; another head size is noticed.
    monitor = JitMonitor()
    monitor.install()
    for launch in serving_launches(seqs=2, tokens=2, width=2, max_splits=2, shift=0):
        jit(launch)
    monitor.mark_warm()
    for sizes in ((1, 1, 1, 3, 0), (16, 16, 16, 16, 4), (17, 40, 33, 5, 1), (3, 48, 7, 32, 3)):
        for launch in serving_launches(*sizes):
            jit(launch)
    late = monitor.late_compilations
    jit(rms_norm_launch(torch.empty(2, 80), torch.empty(80), 1e-5, torch.empty(2, 80)))
    monitor.uninstall()
    jit(rms_norm_launch(torch.empty(2, 160), torch.empty(160), 1e-5, torch.empty(2, 160)))
    return {
        "ahead": len(ahead),
        "differing": differing,
        "late": late,
        "noticed": monitor.late_kernels[late:],
        "counted": monitor.compilations,
        "passed_on": len(seen) - listened,
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
