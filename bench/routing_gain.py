"""How well success is predicted: which queries deserve the larger model, from how few labels, and how calibrated.

APGR and CPT as in `tiers/train/evaluate.py`; every figure stands beside a keyword heuristic, a lexical model, random
order and the oracle.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from bench.report import Row
from bench.routing_judges import BASELINE, LEXICAL, OURS, Keywords, lexical, one, text
from tiers.beta import logit
from tiers.task import KINDS
from tiers.train import evaluate
from tiers.train.corpus import Example
from tiers.train.evaluate import HeldOut
from tiers.train.vectors import PromptVectors

_RESAMPLES = 200
# Models of one class of size, of sources where at least three of a class were measured. Base models are left out.
_CLASSES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "zeroeval": {
        "7B to 9B": (
            "Qwen2-7B-Instruct", "Qwen2.5-7B-Instruct", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3.1-8B-Instruct",
            "gemma-2-9b-it", "Yi-1.5-9B-Chat",
        ),
        "70B": (
            "Meta-Llama-3-70B-Instruct", "Meta-Llama-3.1-70B-Instruct", "Qwen2-72B-Instruct", "Qwen2.5-72B-Instruct",
            "Athene-70B",
        ),
    },
    "llmrouter": {
        "7B to 9B": (
            "gemma-2-9b-it", "llama-3.1-8b-instruct", "mistral-7b-instruct-v0.3", "qwen2.5-7b-instruct",
        ),
    },
}  # fmt: skip


def deferral_rows(folds: Sequence[HeldOut], benchmarks: Sequence[HeldOut], tasks: Sequence[HeldOut]) -> list[Row]:
    """APGR of 8B -> 51B on the mix of 14 benchmarks, with 95 % intervals by bootstrap over the queries."""
    rows: list[Row] = []
    words = Keywords()
    for setting, results in (
        ("5 folds", folds),
        ("each benchmark left out", benchmarks),
        ("each task left out", tasks),
    ):
        mix = [r for r in results if r.example.source.startswith(evaluate.MIX)]
        rows += _apgr(OURS, f"llmrouter mix, {setting}", [r.gain for r in mix], mix)
        examples = [r.example for r in mix]
        groups = {
            "5 folds": [str(i % 5) for i in np.random.default_rng(7).permutation(len(mix))],
            "each benchmark left out": [e.source for e in examples],
            "each task left out": [KINDS[e.kind] for e in examples],
        }[setting]
        rows += _apgr(LEXICAL, f"llmrouter mix, {setting}", list(lexical(examples, groups)), mix)
    mix = [r for r in folds if r.example.source.startswith(evaluate.MIX)]
    rows += _apgr(BASELINE, "llmrouter mix", [words.hardness(text(r.example)) for r in mix], mix)
    weak, strong = _scores([r.example for r in mix])
    rows += _apgr("oracle", "llmrouter mix", [s - w for w, s in zip(weak, strong, strict=True)], mix)
    random = [evaluate.deferral([0.0] * len(mix), weak, strong, seed).apgr for seed in range(20)]
    rows.append(Row.of("apgr", "random order", "llmrouter mix", "share", random))
    return rows


def _scores(examples: Sequence[Example]) -> tuple[list[float], list[float]]:
    return [e.scores[evaluate.WEAK] for e in examples], [e.scores[evaluate.STRONG] for e in examples]


def _apgr(system: str, setting: str, gain: Sequence[float], mix: Sequence[HeldOut]) -> list[Row]:
    weak, strong = _scores([r.example for r in mix])
    found = evaluate.deferral(gain, weak, strong)
    rng = np.random.default_rng(0)
    columns = np.array([gain, weak, strong])
    again = []
    for seed in range(_RESAMPLES):
        picked = columns[:, rng.integers(0, len(weak), len(weak))]
        again.append(evaluate.deferral(picked[0], picked[1], picked[2], seed).apgr)
    low, high = np.quantile(again, (0.025, 0.975))
    setting = f"{setting} (n={len(mix)})"
    rows = [Row("apgr", system, setting, "share", found.apgr, float(low), float(high), _RESAMPLES)]
    for metric, value in (("cpt50", found.cpt50), ("cpt80", found.cpt80), ("cpt95", found.cpt95)):
        rows.append(one(metric, system, setting, "share", value))
    return rows


def learning_rows(examples: Sequence[Example], vectors: PromptVectors | None = None) -> list[Row]:
    """APGR after 0, 5, 20 and 50 labelled outcomes per benchmark; `min` and `max` over draws of the labels."""
    rows = []
    for count, found in evaluate.learning(examples, (0, 5, 20, 50), vectors).items():
        setting = f"llmrouter mix, {count} labels per benchmark and tier, no other outcome of the mix"
        rows.append(Row.of("apgr", OURS, setting, "share", [d.apgr for d in found]))
        rows.append(Row.of("cpt80", OURS, setting, "share", [d.cpt80 for d in found]))
    return rows


def calibration_rows(folds: Sequence[HeldOut], benchmarks: Sequence[HeldOut]) -> list[Row]:
    """Expected calibration error of P(success) against right and wrong answers, held out."""
    rows = []
    measured = {
        "all measured prompts and tiers": folds,
        "llmrouter mix, 8B and 51B": [r for r in folds if r.example.source.startswith(evaluate.MIX)],
        "zeroeval, four tiers": [r for r in folds if r.example.source.startswith("zeroeval/")],
        "mmlu_pro, three tiers": [r for r in folds if r.example.source == "mmlu_pro"],
    }
    for setting, results in measured.items():
        error, count = evaluate.success_calibration(results)
        rows.append(one("success_calibration_error", OURS, f"5 folds, {setting} (n={count})", "share", error))
    error, count = evaluate.success_calibration(benchmarks)
    setting = f"each benchmark left out, llmrouter mix (n={count})"
    rows.append(one("success_calibration_error", OURS, setting, "share", error))
    return rows


def spread_rows(examples: Sequence[Example]) -> list[Row]:
    """Standard deviation, in log-odds of success at a benchmark, between models of one class of size.

    And the number of trials whose own chance is as large: what a public measurement of another model is worth.
    """
    by_source: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        by_source[example.source].append(example)
    spreads, worth = [], []
    for source, inside in by_source.items():
        for models in _CLASSES.get(source.partition("/")[0], {}).values():
            rates = [
                statistics.fmean(e.scores[m] for e in inside) for m in models if all(m in e.scores for e in inside)
            ]
            if len(rates) >= 3 and all(0.05 < rate < 0.95 for rate in rates):
                spread = statistics.stdev(map(logit, rates))
                mean = statistics.fmean(rates)
                spreads.append(spread)
                worth.append(1 / (mean * (1 - mean) * spread**2))
    return [
        Row.of("spread_between_models", "models of one size", "by benchmark and class", "log-odds", spreads),
        Row.of("worth_of_another_model", "models of one size", "by benchmark and class", "outcomes", worth),
    ]
