"""`make bench-routing`: how good task and tier decisions are, with a keyword heuristic beside them.

Everything is judged by models that have not seen the prompt: five folds, whole sources left out, whole benchmarks left
out. Needs the data sets that the training needs (`--data DIR` or TIERLINE_DATA) and the extra [train].
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bench.report import Row, report
from tiers import TIERS
from tiers.choose import choose
from tiers.features import text_of
from tiers.success import SuccessTable, default_table
from tiers.task import KINDS, TASKS, TaskClassifier, TaskProfile
from tiers.train import corpus, evaluate, outcomes
from tiers.train.corpus import HAND_LABELLED, Example
from tiers.train.evaluate import HeldOut

OURS, BASELINE = "tierline", "keyword heuristic"

_WORDS = {
    "coding": ("code", "function", "python", "javascript", "sql", "bug", "error", "script", "class", "program"),
    "math": ("solve", "equation", "calculate", "how many", "sum of", "percent", "prove", "integral", "probability"),
    "reasoning": ("analyze", "analyse", "compare", "step by step", "trade-off", "strategy", "why", "evaluate"),
    "translation": ("translate", "translation"),
    "summarisation": ("summarize", "summarise", "summary", "tl;dr"),
    "classification": ("classify", "category", "sentiment", "label", "spam", "true or false"),
    "extraction": ("extract", "find all", "list all", "entities"),
    "rewriting": ("rewrite", "rephrase", "paraphrase", "grammar", "correct the"),
    "brainstorming": ("ideas", "suggest", "brainstorm", "recommend"),
    "writing": ("write a", "compose", "essay", "story", "poem", "email"),
    "question_answering": ("what is", "who", "when", "where", "which", "explain"),
    "chat": ("hello", "hi ", "thanks", "how are you"),
}
_HARD = (
    "prove",
    "algorithm",
    "architecture",
    "analyze",
    "analyse",
    "step by step",
    "optimize",
    "theorem",
    "complex",
)


class Keywords:
    """The usual regex router: counts of telling words decide the task, their number and the length the tier."""

    def task(self, text: str) -> str:
        lowered = text.lower()
        scores = {task: sum(word in lowered for word in words) for task, words in _WORDS.items()}
        best = max(scores, key=lambda task: scores[task])
        return best if scores[best] else "chat"

    def hardness(self, text: str) -> float:
        """0 and more: telling words and length."""
        lowered = text.lower()
        return sum(word in lowered for word in _HARD) + min(2.0, len(text) / 1500)

    def tier(self, text: str) -> str:
        hardness = self.hardness(text)
        return TIERS[sum(hardness >= bound for bound in (0.15, 1.0, 2.0))]


def _text(example: Example) -> str:
    return "\n".join(text_of(message) for message in example.messages)


def _one(metric: str, system: str, setting: str, unit: str, value: float) -> Row:
    return Row.of(metric, system, setting, unit, [value])


def task_rows(examples: Sequence[Example], folds: Sequence[HeldOut], left_out: Sequence[HeldOut]) -> list[Row]:
    """Accuracy over twelve tasks: of held-out folds, and of prompts whose whole source was left out of the training."""
    words = Keywords()
    rows = []
    for setting, results in (
        ("5 folds, all sources", folds),
        ("5 folds, hand-labelled", [r for r in folds if r.example.source in HAND_LABELLED]),
        *((f"source left out: {name}", [r for r in left_out if r.example.source == name]) for name in HAND_LABELLED),
        ("sources left out: hand-labelled", left_out),
    ):
        setting = f"{setting} (n={len(results)})"
        rows.append(_one("task_accuracy", OURS, setting, "share", evaluate.task_accuracy(results)))
        known = [r for r in results if r.profile.in_distribution]
        rows.append(_one("in_distribution", OURS, setting, "share", len(known) / len(results)))
        rows.append(
            _one("task_accuracy", f"{OURS}, where in distribution", setting, "share", evaluate.task_accuracy(known))
        )
        right = statistics.fmean(words.task(_text(r.example)) == KINDS[r.example.kind] for r in results)
        rows.append(_one("task_accuracy", BASELINE, setting, "share", right))
    for setting, results in (("5 folds, all sources", folds), ("sources left out: hand-labelled", left_out)):
        confidence = [r.profile.confidence for r in results]
        right_ones = [r.profile.task == KINDS[r.example.kind] for r in results]
        rows.append(
            _one("calibration_error", OURS, setting, "share", evaluate.calibration_error(confidence, right_ones))
        )
    return rows


def deferral_rows(
    folds: Sequence[HeldOut], benchmarks: Sequence[HeldOut], sources: dict[str, list[HeldOut]]
) -> list[Row]:
    """APGR of 8B -> 51B on the 14-benchmark mix."""
    words = Keywords()
    rows: list[Row] = []

    def add(system: str, setting: str, found: evaluate.Deferral) -> None:
        for metric, value in (
            ("apgr", found.apgr),
            ("cpt50", found.cpt50),
            ("cpt80", found.cpt80),
            ("cpt95", found.cpt95),
        ):
            rows.append(_one(metric, system, setting, "share", value))

    add(OURS, "llmrouter mix, 5 folds", evaluate.mix_deferral(folds))
    add(OURS, "llmrouter mix, each benchmark left out", evaluate.mix_deferral(benchmarks))
    mix = sources["mix"]
    weak = [r.example.scores[evaluate.WEAK] for r in mix]
    strong = [r.example.scores[evaluate.STRONG] for r in mix]
    add(BASELINE, "llmrouter mix", evaluate.deferral([words.hardness(_text(r.example)) for r in mix], weak, strong))
    add("oracle", "llmrouter mix", evaluate.deferral([s - w for w, s in zip(weak, strong, strict=True)], weak, strong))
    random = [evaluate.deferral([0.0] * len(mix), weak, strong, seed).apgr for seed in range(20)]
    rows.append(Row.of("apgr", "random order", "llmrouter mix", "share", random))
    return rows


def complexity_rows(folds: Sequence[HeldOut]) -> list[Row]:
    """Rank correlation of complexity with the share of models that failed, over all prompts and within a kind."""

    def correlation(results: Sequence[HeldOut], value: Iterable[float]) -> float:
        failed = [1 - statistics.fmean(r.example.scores.values()) for r in results]
        return evaluate.rank_correlation(list(value), failed)

    words = Keywords()
    scored = [r for r in folds if r.example.scores]
    within = [
        correlation(group, [r.profile.complexity for r in group])
        for kind in KINDS
        if len(group := [r for r in scored if r.example.kind == kind]) >= 100
    ]
    setting = f"5 folds (n={len(scored)})"
    return [
        _one(
            "complexity_rank_correlation",
            OURS,
            setting,
            "rho",
            correlation(scored, [r.profile.complexity for r in scored]),
        ),
        Row.of("complexity_rank_correlation", OURS, "5 folds, within a kind (over kinds)", "rho", within),
        _one(
            "complexity_rank_correlation",
            BASELINE,
            setting,
            "rho",
            correlation(scored, [words.hardness(_text(r.example)) for r in scored]),
        ),
    ]


def four_tier_rows(folds: Sequence[HeldOut], table: SuccessTable) -> list[Row]:
    """What `tier: auto` buys where all four tiers were measured: success and mean model size against fixed tiers."""
    words = Keywords()
    size = {"small": 2.6, "medium": 8.0, "large": 30.0, "xlarge": 71.0}
    measured = [r for r in folds if r.example.source.startswith("zeroeval/")]

    def won(result: HeldOut, tier: str) -> float:
        return result.example.scores[outcomes.reference(result.example.source)[tier]]

    def smallest(result: HeldOut) -> str | None:
        return next((tier for tier in TIERS if won(result, tier) >= 1), None)

    solvable = [r for r in measured if smallest(r)]
    choices: dict[str, list[str]] = {f"always {tier}": [tier] * len(measured) for tier in TIERS}
    for target in (0.8, 0.6):
        choices[f"{OURS}, target {target}"] = [choose(r.profile, TIERS, target, table=table).tier for r in measured]
    choices[BASELINE] = [words.tier(_text(r.example)) for r in measured]
    rows = []
    setting = f"zeroeval, 5 folds (n={len(measured)})"
    points: list[tuple[float, float]] = []
    for system, tiers in choices.items():
        success = statistics.fmean(map(won, measured, tiers))
        mean_size = statistics.fmean(size[tier] for tier in tiers)
        rows.append(_one("success", system, setting, "share", success))
        rows.append(_one("mean_model_size", system, setting, "billion", mean_size))
        if system.startswith("always"):
            points.append((mean_size, success))
        else:
            # What mixing two fixed tiers at random buys for the same mean size: the line that a router must beat.
            mixed = float(np.interp(mean_size, [x for x, _ in points], [y for _, y in points]))
            rows.append(_one("success", f"random mix, size of {system}", setting, "share", mixed))
        of = {id(r): t for r, t in zip(measured, tiers, strict=True)}
        exact = statistics.fmean(of[id(r)] == smallest(r) for r in solvable)
        rows.append(_one("smallest_sufficient_tier", system, f"zeroeval, 5 folds (n={len(solvable)})", "share", exact))
    return rows


def label_tier_rows(left_out: Sequence[HeldOut], table: SuccessTable) -> list[Row]:
    """Whether the tier is the one that the true kind of a hand-labelled prompt would get; its source left out."""
    words = Keywords()

    def ideal(result: HeldOut) -> str:
        kinds = {kind: float(kind == result.example.kind) for kind in KINDS}
        task = KINDS[result.example.kind]
        profile = TaskProfile(
            task, 1, table.complexity[result.example.kind], True, {}, dict.fromkeys(TASKS, 0.0), kinds
        )
        return choose(profile, table=table).tier

    wanted = [ideal(r) for r in left_out]
    setting = f"hand-labelled, source left out (n={len(left_out)})"
    rows = []
    for system, tiers in (
        (OURS, [choose(r.profile, table=table).tier for r in left_out]),
        (BASELINE, [words.tier(_text(r.example)) for r in left_out]),
        ("always medium", ["medium"] * len(left_out)),
    ):
        exact = [a == b for a, b in zip(tiers, wanted, strict=True)]
        near = [abs(TIERS.index(a) - TIERS.index(b)) <= 1 for a, b in zip(tiers, wanted, strict=True)]
        rows.append(_one("tier_as_labelled", system, setting, "share", statistics.fmean(exact)))
        rows.append(_one("tier_as_labelled_within_one", system, setting, "share", statistics.fmean(near)))
    return rows


def unknown_rows(classifier: TaskClassifier, data: Path) -> list[Row]:
    """How much of what it cannot know (Chinese sentences) the shipped classifier takes for known."""
    import gzip

    with gzip.open(data / "pawsx_zh/dev_2k.tsv.gz", "rt", encoding="utf-8") as file:
        texts = [line.split("\t")[1] for line in file][1:]
    known = [classifier.classify([{"role": "user", "content": text}]).in_distribution for text in texts]
    return [_one("in_distribution", OURS, f"Chinese sentences (n={len(texts)})", "share", statistics.fmean(known))]


def time_rows(classifier: TaskClassifier, examples: Sequence[Example]) -> list[Row]:
    """CPU time of one classification, over prompts of the mix."""
    picked = examples[:: max(1, len(examples) // 400)]
    times = []
    for example in picked:
        started = time.process_time()
        classifier.classify(example.messages)
        times.append((time.process_time() - started) * 1e6)
    times.sort()
    return [
        Row(
            "classify_cpu_time",
            OURS,
            f"prompts of the corpus (n={len(times)})",
            "us",
            statistics.median(times),
            times[0],
            times[int(0.99 * len(times))],
            len(times),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="default: $TIERLINE_DATA")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("give the folder of the data sets with --data or $TIERLINE_DATA (see tiers/DATA.md)")
    examples = corpus.load(options.data)
    table, classifier = default_table(), TaskClassifier.load()
    folds = evaluate.cross_validate(examples, 5, table.slope)
    benchmarks = evaluate.leave_out(
        examples, {e.source for e in examples if e.source.startswith("llmrouter/")}, table.slope
    )
    left_out = evaluate.leave_out(examples, HAND_LABELLED, table.slope)
    mix = [r for r in folds if r.example.source.startswith("llmrouter/")]
    report(
        "routing",
        [
            *task_rows(examples, folds, left_out),
            *label_tier_rows(left_out, table),
            *deferral_rows(folds, benchmarks, {"mix": mix}),
            *complexity_rows(folds),
            *four_tier_rows(folds, table),
            *unknown_rows(classifier, options.data),
            *time_rows(classifier, examples),
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
