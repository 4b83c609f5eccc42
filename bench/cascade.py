"""Cascades against fixed tiers, and what a curve makes of the engine's log-probabilities.

    python -m bench.cascade --data DIR [--model var/models/smollm2-135m] [--prompts 800] [--without-engine]

The first part plays cascades over public answers that are known to be right or wrong (`zeroeval_correctness`: GSM8K,
CRUXEval, MATH level 5; 2B to 72B): begin at the smallest, stop at the first answer that the check lets pass. The check
is ideal, noisy (it overlooks a share of the wrong answers and rejects a share of the right ones), or none, which goes
up at random as often as the noisy one. Cost counts parameters: a model of 9B costs 9 a request. It is a bound of what
checks can buy, not a measurement of ours: which answers ours would find wrong is not in the data.

The second part is measured: the bundled engine labels headlines (`frugalgpt_headlines`, four examples in each prompt),
and its log-probabilities become a curve, as by `tierline tiers calibrate`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from bench.engine import DEFAULT_MODEL, EngineProcess
from bench.report import Row, report
from gateway.escalating.calibrating import Example, Observed, measure, observe

# Per benchmark: the models of a cascade with their billions of parameters.
_QWEN: Final = tuple((f"Qwen2.5-{size}B-Instruct", real) for size, real in ((3, 3.1), (7, 7.6), (32, 32.5), (72, 72.7)))
_GEMMA: Final = tuple((f"gemma-2-{size}b-it", real) for size, real in ((2, 2.6), (9, 9.2), (27, 27.2)))
LADDERS: Final = {"gsm": (*_GEMMA, ("Meta-Llama-3.1-70B-Instruct", 70.6)), "crux": _QWEN, "math-l5": _QWEN}
ROUNDS: Final = 20  # of a check that errs at random
SEED: Final = 11


@dataclass(frozen=True, slots=True)
class Check:
    """A check of answers by how it errs: shares of the wrong answers that it overlooks, and of the right ones that it
    rejects. `blind`: it rejects so many of either kind."""

    name: str
    overlooks: float = 0.0
    rejects: float = 0.0
    blind: float | None = None

    def passes(self, right: bool, dice: random.Random) -> bool:
        if self.blind is not None:
            return dice.random() >= self.blind
        return dice.random() >= self.rejects if right else dice.random() < self.overlooks


CHECKS: Final = (
    Check("ideal check"),
    Check("check with errors (10 % / 10 %)", 0.1, 0.1),
    Check("check with errors (30 % / 20 %)", 0.3, 0.2),
)


def answers(data: Path, benchmark: str) -> list[list[bool]]:
    """For each question, whether each model of the ladder answers it rightly; questions that all have answers to."""
    names = [name for name, _ in LADDERS[benchmark]]
    with gzip.open(data / f"zeroeval_correctness/{benchmark}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = [[row[name] for name in names] for row in csv.DictReader(file)]
    return [[value == "1" for value in row] for row in rows if "" not in row]


def play(
    questions: Sequence[Sequence[bool]], costs: Sequence[float], check: Check, dice: random.Random
) -> tuple[float, float, float]:
    """Share of right answers, mean cost, and the share of requests that went beyond the first model."""
    right = cost = climbed = 0.0
    for question in questions:
        for place, good in enumerate(question):
            cost += costs[place]
            if place == len(question) - 1 or check.passes(good, dice):
                right += good
                climbed += place > 0
                break
    count = len(questions)
    return right / count, cost / count, climbed / count


def simulated(data: Path) -> list[Row]:
    rows: list[Row] = []
    for benchmark, ladder in LADDERS.items():
        questions, costs = answers(data, benchmark), [size for _, size in ladder]
        setting = f"zeroeval/{benchmark}, {len(questions)} questions"

        def add(system: str, accuracy: Sequence[float], cost: Sequence[float], setting: str = setting) -> None:
            rows.append(Row.of("accuracy", system, setting, "%", [100 * value for value in accuracy]))
            rows.append(Row.of("cost_per_request", system, setting, "billion parameters", cost))

        for place, (name, size) in enumerate(ladder):
            add(f"always {name}", [float(np.mean([question[place] for question in questions]))], [size])
        dice = random.Random(SEED)
        for steps in (len(ladder), 2):
            name = f"cascade of {steps}"
            # Of two: the smallest, then the largest.
            few = questions if steps == len(ladder) else [[question[0], question[-1]] for question in questions]
            prices = costs if steps == len(ladder) else [costs[0], costs[-1]]
            for check in CHECKS:
                rounds = 1 if check is CHECKS[0] else ROUNDS
                played = [play(few, prices, check, dice) for _ in range(rounds)]
                add(f"{name}, {check.name}", [item[0] for item in played], [item[1] for item in played])
            up = float(np.mean([item[2] for item in played]))
            blind = Check("no check", blind=up)
            played = [play(few, prices, blind, dice) for _ in range(ROUNDS)]
            add(f"{name}, none: up at random ({up:.0%})", [item[0] for item in played], [item[1] for item in played])
    return rows


def headlines(data: Path, count: int) -> list[Example]:
    """Headlines to be labelled, each after the same four with their labels; the two common kinds in equal numbers."""
    with gzip.open(data / "frugalgpt_headlines/train.csv.gz", "rt", encoding="utf-8", newline="") as file:
        labelled = [(row[0].removeprefix("Q: ").split("\n")[0], row[1]) for row in csv.reader(file) if len(row) > 1]
    dice = random.Random(SEED)
    dice.shuffle(labelled)
    kinds = {kind: [text for text, label in labelled if label == kind] for kind in ("up", "down")}
    asked = "Does the price of gold go up or down in this headline? Answer with one word.\n\n{}"
    shots: list[dict[str, Any]] = []
    for number, kind in ((0, "up"), (0, "down"), (1, "down"), (1, "up")):
        shots.append({"role": "user", "content": asked.format(kinds[kind][number])})
        shots.append({"role": "assistant", "content": kind})
    found = []
    for number in range(count):
        kind = ("up", "down")[number % 2]
        question = {"role": "user", "content": asked.format(kinds[kind][2 + number // 2])}
        found.append(Example([*shots, question], (kind,)))
    dice.shuffle(found)
    return found


async def measured(data: Path, model: Path, count: int) -> list[Row]:
    """The engine's own confidence, bare and by a curve."""
    engine = EngineProcess(model, ["--max-num-seqs", "8"])
    try:
        async with aiohttp.ClientSession() as session:
            await engine.wait_ready(session)
        examples = headlines(data, count)
        options: dict[str, Any] = {"match": "exact", "max_tokens": 2, "concurrency": 8}
        observed = await observe(engine.url, None, "bench", examples, **options)
    finally:
        engine.stop()
    return told(observed, f"{model.name}, {len(observed)} headlines")


def told(observed: Sequence[Observed], setting: str) -> list[Row]:
    """What a curve makes of these answers."""
    found = measure("bench", observed)
    curve = found.curve
    accuracy = 100 * curve.right / curve.examples
    rows = [
        Row.of("accuracy", "engine", setting, "%", [accuracy]),
        Row.of("calibration_error", "bare probability", setting, "ece", [curve.ece_before]),
        Row.of("calibration_error", "curve, on unseen answers", setting, "ece", [curve.ece_after]),
    ]
    for kept in found.kept:
        least = f"{setting}, confidence >= {kept['confidence']}"
        rows.append(Row.of("answers_that_pass", "curve, on unseen answers", least, "%", [100 * (kept["pass"] or 0.0)]))
        if kept["right"] is not None:
            rows.append(Row.of("accuracy", "curve, on unseen answers", least, "%", [100 * kept["right"]]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="default: $TIERLINE_DATA")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--without-engine", action="store_true", help="the simulated part only")
    options = parser.parse_args()
    if options.data is None:
        parser.error("give the folder of the data sets with --data or $TIERLINE_DATA (see tiers/DATA.md)")
    rows = simulated(options.data)
    if not options.without_engine:
        model = next(options.model.glob("*.gguf")) if options.model.is_dir() else options.model
        rows += asyncio.run(measured(options.data, model, options.prompts))
    report("cascade", rows)


if __name__ == "__main__":
    main()
