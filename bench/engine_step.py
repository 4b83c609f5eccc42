"""Where an engine step's time goes: milliseconds in linears, attention, small operations, sampling and on the host.

    python -m bench.engine_step MODEL.gguf --rows 1,2,4,8 --context 128
    python -m bench.engine_step MODEL.gguf --prefill 512
    python -m bench.engine_step MODEL.gguf --whole

Runs the model runner alone, no scheduler and no HTTP. With `--whole` a step runs as it does in service, where one call
does all blocks that it can: then there is only a total. With `--clock cpu` the figures are CPU time of all threads,
which other programs on the machine disturb little; with `--clock wall` they are what a user waits, if the machine is
quiet.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import Row, report
from engine import threads as engine_threads
from engine.types import SamplingParams, StepPlan, StepRow

if TYPE_CHECKING:
    import torch

    from engine.layers.linear import Linear
    from engine.layers.mlp import GatedMlp
    from engine.layers.moe import Experts
    from engine.runner import ModelRunner

PARTS = ("linears", "output", "attention", "small_ops", "sampling", "host")
_CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


class Stopwatch:
    """Sums the time spent in wrapped calls, by part. Nested calls count for the outermost part only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = False
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `part`."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._running:
                return function(*arguments, **keywords)
            self._running = True
            start = self._clock()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds[part] += self._clock() - start
                self._running = False

        return timed


class _TimedLinear:
    """A `Linear` whose calls are timed."""

    def __init__(self, linear: Linear, stopwatch: Stopwatch, part: str) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.num_bytes = linear.num_bytes
        self._call = stopwatch.wrap(part, linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._call(x)
        return result


class _Wrapped:
    """An object whose named methods are timed and whose other attributes are the original's."""

    def __init__(self, inner: object, stopwatch: Stopwatch, part: str, methods: tuple[str, ...]) -> None:
        self._inner = inner
        for method in methods:
            setattr(self, method, stopwatch.wrap(part, getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def instrument(runner: ModelRunner, stopwatch: Stopwatch) -> None:
    """Time the runner's parts from here on. They are called one by one, also where one call would do all blocks."""
    decoder = runner.decoder
    decoder.blocks = None
    decoder.layers = [
        dataclasses.replace(
            layer,
            qkv=_TimedLinear(layer.qkv, stopwatch, "linears"),
            attention_output=_TimedLinear(layer.attention_output, stopwatch, "linears"),
            mlp=_timed_mlp(layer.mlp, stopwatch),
        )
        for layer in decoder.layers
    ]
    if decoder.output is not None:
        decoder.output = _TimedLinear(decoder.output, stopwatch, "output")
    small = ("rms_norm", "add_rms_norm", "rotary", "gated")
    decoder.ops = _Wrapped(decoder.ops, stopwatch, "small_ops", small)
    attention: Any = _Wrapped(runner.attention, stopwatch, "attention", ("begin", "forward"))
    decoder.attention = runner.attention = attention
    runner.sampler.sample = stopwatch.wrap("sampling", runner.sampler.sample)  # type: ignore[method-assign]


def _timed_mlp(mlp: GatedMlp | Experts, stopwatch: Stopwatch) -> GatedMlp | Experts:
    """The same network with timed products; of experts, each one's."""
    from engine.layers.mlp import GatedMlp
    from engine.layers.moe import MixtureOfExperts

    if isinstance(mlp, MixtureOfExperts):
        return dataclasses.replace(mlp, experts=[_timed_network(expert, stopwatch) for expert in mlp.experts])
    return _timed_network(mlp, stopwatch) if isinstance(mlp, GatedMlp) else mlp  # fused experts are one product


def _timed_network(mlp: GatedMlp, stopwatch: Stopwatch) -> GatedMlp:
    return dataclasses.replace(
        mlp,
        gate_up=_TimedLinear(mlp.gate_up, stopwatch, "linears"),
        down=_TimedLinear(mlp.down, stopwatch, "linears"),
    )


def decode_plan(runner: ModelRunner, rows: int, context: int, params: SamplingParams) -> StepPlan:
    """A step of `rows` sequences, each `context` tokens long, that want their next token."""
    pages_each = -(-context // runner.geometry.block_size)
    if rows * pages_each >= runner.geometry.num_blocks:
        raise SystemExit(f"{rows} rows of {context} tokens need more KV pages than {runner.geometry.num_blocks}")
    tokens = [(7 * i) % runner.spec.vocab_size for i in range(context)]
    return StepPlan(
        [
            StepRow(
                row,
                tokens[-1:],
                context - 1,
                range(1 + row * pages_each, 1 + (row + 1) * pages_each),
                True,
                params,
                tokens,
                context,
            )
            for row in range(rows)
        ]
    )


def prefill_plan(runner: ModelRunner, length: int, params: SamplingParams) -> StepPlan:
    """A step that computes one prompt of `length` tokens."""
    tokens = [(7 * i) % runner.spec.vocab_size for i in range(length)]
    pages = range(1, 1 - (-length // runner.geometry.block_size))
    return StepPlan([StepRow(0, tokens, 0, pages, True, params, tokens, length)])


def measure(
    runner: ModelRunner, plan: StepPlan, stopwatch: Stopwatch, clock: str, steps: int
) -> dict[str, list[float]]:
    """Milliseconds per step in `total`, and by part if the runner is instrumented, for each of `steps` steps."""
    read = _CLOCKS[clock]
    samples: dict[str, list[float]] = defaultdict(list)
    for step in range(steps + 2):
        stopwatch.seconds.clear()
        start = read()
        errors = [result.error for result in runner.execute(plan) if result.error]
        total = read() - start
        if errors:
            raise SystemExit(f"the step failed: {errors[0]}")
        if step < 2:  # warm-up
            continue
        if stopwatch.seconds:
            stopwatch.seconds["host"] = total - sum(stopwatch.seconds.values())
            for part in PARTS:
                samples[part].append(1000 * stopwatch.seconds[part])
        samples["total"].append(1000 * total)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,2,4,8", help="decode batch sizes")
    parser.add_argument("--context", type=int, default=192, help="tokens per sequence")
    parser.add_argument("--prefill", type=int, default=0, help="also one prompt of this length")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--whole", action="store_true", help="time whole steps, as they run in service")
    parser.add_argument("--clock", choices=sorted(_CLOCKS), default="cpu")
    arguments = parser.parse_args()
    threads = engine_threads.configure(arguments.threads)
    from engine.load_runner import load_runner

    runner = load_runner(
        arguments.model,
        precision=arguments.precision,
        threads=threads,
        max_num_batched_tokens=max(512, arguments.prefill),
    )
    stopwatch = Stopwatch(_CLOCKS[arguments.clock])
    if not arguments.whole:
        instrument(runner, stopwatch)
    params = SamplingParams(temperature=arguments.temperature)
    plans = {
        f"rows={rows} context={arguments.context}": decode_plan(runner, int(rows), arguments.context, params)
        for rows in arguments.rows.split(",")
    }
    if arguments.prefill:
        plans[f"prefill={arguments.prefill}"] = prefill_plan(runner, arguments.prefill, params)
    table = []
    for setting, plan in plans.items():
        setting = f"{setting} {arguments.precision} threads={threads} clock={arguments.clock}"
        samples = measure(runner, plan, stopwatch, arguments.clock, arguments.steps)
        table += [Row.of(f"step_{part}", "tierline", setting, "ms", values) for part, values in samples.items()]
        rates = [1000 * plan.num_tokens / total for total in samples["total"]]
        table.append(Row.of("step_tokens_per_second", "tierline", setting, "1/s", rates))
    report("engine_step", table)


if __name__ == "__main__":
    main()
