"""Is it right on this card? Recorded steps against eager ones, and compilations counted. Kernels: `parity.py`."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.gpu.engines import GREEDY, decode_plan, prefill_plan, triton_runner
from bench.gpu.figures import Figure
from bench.gpu.shapes import SHAPES, RandomTensors, tiny
from engine.graphs import CudaRecorder, Recorder
from engine.kernels.jit_monitor import monitor
from engine.piecewise import MOST_TOKENS
from engine.runner import ModelRunner
from engine.types import RowResult, StepPlan

# bfloat16 sums in another order: natural logarithms of the same token's probability.
_CLOSE = 0.05


class CheckFailed(Exception):
    """Something is not right on this card."""


def recorded(device: torch.device, *, dry: bool) -> list[Figure]:
    """Replayed steps equal eager ones, within rounding where libraries choose other kernels; how many to the last bit
    is a figure of its own."""
    shape, most = tiny(SHAPES["llama-3.1-8b"]), 4 if dry else 24
    eager, replaying = (triton_runner(RandomTensors(shape), device, max_num_seqs=most) for _ in range(2))
    replaying.record(_recorder(device), most_tokens=16 if dry else MOST_TOKENS)
    params, vocabulary = replace(GREEDY, logprobs=5), shape.spec.vocab_size
    worst, compared, equal = 0.0, 0, 0
    for rows in (1, 3) if dry else (1, 2, 3, 5, 8, 11, 16, 23, 24):
        lengths = [1 + (3 if dry else 37) * i % 90 for i in range(rows)]
        each = 512 // 16
        for runner in (eager, replaying):
            for row, length in enumerate(lengths):
                if length > 1:
                    prompt = prefill_plan(length - 1, vocabulary, first_page=1 + row * each)
                    _results(runner, prompt)
        plan = decode_plan(lengths, vocabulary, params, pages_each=each)
        one, other = _results(eager, plan), _results(replaying, plan)
        worst = max(worst, _difference(one, other))
        equal += sum(left == right for left, right in zip(one, other, strict=True))
        compared += rows
    if worst > _CLOSE:
        raise CheckFailed(f"log-probabilities of recorded steps differ by {worst}")
    return [
        Figure("recorded_rows_close", str(device), "rows", compared),
        Figure("recorded_rows_equal", str(device), "rows", equal, compared),
    ]


def compiled(device: torch.device, *, dry: bool) -> list[Figure]:
    """No kernel is compiled once an engine is warm, whatever sizes its steps have."""
    shape = tiny(SHAPES["qwen3-8b"])
    monitor.install()
    runner = triton_runner(RandomTensors(shape), device, max_num_seqs=8)
    vocabulary = shape.spec.vocab_size
    for plan in (prefill_plan(40, vocabulary), decode_plan([41], vocabulary)):
        _results(runner, plan)
    runner.record(_recorder(device), most_tokens=16 if dry else MOST_TOKENS)
    monitor.mark_warm()
    decodes = ([5], [2, 9, 33]) if dry else ([500], [3, 100, 17, 16], [400] * 8, [1, 2, 3, 511, 5])
    plans = [decode_plan(lengths, vocabulary) for lengths in decodes]
    plans += [prefill_plan(length, vocabulary) for length in ((7,) if dry else (2, 16, 33, 300, 511))]
    for plan in plans:
        _results(runner, plan)
    if monitor.late_kernels:
        raise CheckFailed(f"compiled after warm-up: {', '.join(monitor.late_kernels)}")
    count = monitor.compilations
    return [Figure("kernels_built_before_the_first_request", str(device), "kernels", count)]


def _recorder(device: torch.device) -> Recorder:
    if device.type == "cuda":
        return CudaRecorder(device)
    from bench.gpu.tape import TapeRecorder

    return TapeRecorder()


def _results(runner: ModelRunner, plan: StepPlan) -> list[RowResult]:
    results = runner.execute(plan)
    faults = [result.error for result in results if result.error is not None]
    if faults:
        raise CheckFailed(f"a step failed: {faults[0]}")
    return results


def _difference(one: list[RowResult], other: list[RowResult]) -> float:
    """The most by which the log-probability of a token that both rank differs."""
    worst = 0.0
    for left, right in zip(one, other, strict=True):
        known = dict(right.logprobs[0].top)
        worst = max([worst, *(abs(value - known[t]) for t, value in left.logprobs[0].top if t in known)])
    return worst
