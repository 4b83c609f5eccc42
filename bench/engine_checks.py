"""What the engine's speed costs: agreement with float32, perplexity, and the time of a step that is not computing.

    python -m bench.engine_checks MODEL.gguf [--threads 2]

No HTTP. Prints one line of JSON rows: `bench.engine` runs it in a process of its own. `auto` is compared with float32
on the same weights: which token each would take after every token of the reference answers that the tests have for
SmolLM2-135M (left out for other models), and how likely each finds a text that anyone has, this project's licence and
README.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engine_step import Stopwatch, decode_plan, measure
from bench.report import Row
from engine import threads as engine_threads
from engine.types import SamplingParams, StepRow

if TYPE_CHECKING:
    import torch

    from engine.runner import ModelRunner

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "tests" / "engine" / "data" / "smollm2_greedy.json"
REFERENCE_MODEL = "SmolLM2-135M"
TEXTS = (ROOT / "LICENSE", ROOT / "README.md")
TEXT_TOKENS = 512
OVERHEAD_ROWS = (1, 32)


def logits_after(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """float32 `[tokens, vocab]`, computed in one step."""
    import torch

    from engine.geometry import step_geometry

    pages = range(1, 2 + len(tokens) // runner.geometry.block_size)
    row = StepRow(0, list(tokens), 0, pages, True, SamplingParams(temperature=0.0), list(tokens), len(tokens))
    step = step_geometry([row], runner.geometry.block_size, runner.max_model_len)
    with torch.inference_mode():
        runner.attention.begin(step)
        every = torch.arange(len(tokens))
        return runner.decoder.logits(
            runner.decoder.hidden(torch.tensor(tokens), torch.from_numpy(step.positions), every)
        )


def quality(path: Path, threads: int | None) -> list[Row]:
    """Rows of `auto` beside float32: the share of tokens that agree, and how much perplexity grows."""
    import torch

    from engine.load_runner import load_runner
    from engine.loader import open_model
    from engine.text.tokenizer import Tokenizer

    model = open_model(path)
    tokenizer = Tokenizer(model.info)
    texts = [tokenizer.encode(text.read_text(encoding="utf-8"))[:TEXT_TOKENS] for text in TEXTS]
    cases = json.loads(REFERENCE.read_text())["cases"] if path.name.startswith(REFERENCE_MODEL) else []
    choices: dict[str, list[int]] = {}
    losses: dict[str, float] = {}
    for precision in ("float32", "auto"):
        runner = load_runner(path, precision=precision, threads=threads, max_model_len=1024, kv_cache_bytes=128 << 20)
        choices[precision] = []
        for case in cases:
            tokens, start = case["prompt_ids"] + case["greedy_ids"], len(case["prompt_ids"])
            choices[precision] += logits_after(runner, tokens)[start - 1 : -1].argmax(dim=-1).tolist()
        loss = [
            torch.nn.functional.cross_entropy(logits_after(runner, text)[:-1], torch.tensor(text[1:])).item()
            for text in texts
        ]
        losses[precision] = sum(loss) / len(loss)
    growth = 100 * (torch.tensor(losses["auto"] - losses["float32"]).exp().item() - 1)
    rows = [
        Row.of("perplexity_difference", "tierline", f"auto against float32, tokens={TEXT_TOKENS * 2}", "%", [growth])
    ]
    if cases:
        same = sum(a == b for a, b in zip(choices["auto"], choices["float32"], strict=True))
        count = len(choices["auto"])
        share = 100 * same / count
        rows.append(Row.of("greedy_agreement", "tierline", f"auto against float32, tokens={count}", "%", [share]))
    return rows


def overhead(path: Path, threads: int | None) -> list[Row]:
    """Rows of the time of a decode step that is neither forward pass nor output product."""
    from engine.load_runner import load_runner

    runner = load_runner(path, threads=threads, max_model_len=1024, max_num_seqs=max(OVERHEAD_ROWS))
    stopwatch = Stopwatch(time.perf_counter)
    decoder = runner.decoder
    decoder.hidden = stopwatch.wrap("forward", decoder.hidden)  # type: ignore[method-assign]
    decoder.logits = stopwatch.wrap("forward", decoder.logits)  # type: ignore[method-assign]
    rows = []
    for count in OVERHEAD_ROWS:
        plan = decode_plan(runner, count, 192, SamplingParams(temperature=0.0))
        host = measure(runner, plan, stopwatch, "wall", 20)["host"]
        rows.append(Row.of("host_overhead", "tierline", f"step of streams={count}, context=192", "ms", host))
    return rows


def main() -> None:
    """Parse the command line, measure, print the rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_checks")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    threads = engine_threads.configure(options.threads)
    rows = quality(options.model, threads) + overhead(options.model, threads)
    sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")


if __name__ == "__main__":
    main()
