"""`make bench-routing`: how good task and tier decisions are, by words and by vectors, a keyword heuristic beside them.

Everything is judged by models that have not seen the prompt: five folds, whole sources, benchmarks or tasks left out.
Needs the data sets that the training needs (`--data DIR` or TIERLINE_DATA) and the extra [train].
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.prompt_vectors import embed
from bench.report import Row, report
from bench.routing_gain import calibration_rows, deferral_rows, learning_rows, spread_rows
from bench.routing_judges import BASELINE, OURS, Judge, Keywords, WithVectors, of_vectors, one, text
from bench.routing_strange import gaming_rows, unknown_rows
from bench.routing_tier import four_tier_rows, sheet_rows
from cache.embedding.embedder import Embedder
from tiers.choose import choose
from tiers.features import bare
from tiers.success import default_table
from tiers.task import KINDS, TaskClassifier
from tiers.train import corpus, evaluate, sheet
from tiers.train.corpus import HAND_LABELLED, Example
from tiers.train.evaluate import HeldOut, with_vectors
from tiers.train.vectors import PromptVectors
from tiers.vector import MODEL


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
        rows.append(one("task_accuracy", OURS, setting, "share", evaluate.task_accuracy(results)))
        known = [r for r in results if r.profile.in_distribution]
        rows.append(one("in_distribution", OURS, setting, "share", len(known) / len(results)))
        rows.append(
            one("task_accuracy", f"{OURS}, where in distribution", setting, "share", evaluate.task_accuracy(known))
        )
        right = statistics.fmean(words.task(text(r.example)) == KINDS[r.example.kind] for r in results)
        rows.append(one("task_accuracy", BASELINE, setting, "share", right))
    for setting, results in (("5 folds, all sources", folds), ("sources left out: hand-labelled", left_out)):
        confidence = [r.profile.confidence for r in results]
        right_ones = [r.profile.task == KINDS[r.example.kind] for r in results]
        rows.append(
            one("calibration_error", OURS, setting, "share", evaluate.calibration_error(confidence, right_ones))
        )
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
        one(
            "complexity_rank_correlation",
            OURS,
            setting,
            "rho",
            correlation(scored, [r.profile.complexity for r in scored]),
        ),
        Row.of("complexity_rank_correlation", OURS, "5 folds, within a kind (over kinds)", "rho", within),
        one(
            "complexity_rank_correlation",
            BASELINE,
            setting,
            "rho",
            correlation(scored, [words.hardness(text(r.example)) for r in scored]),
        ),
    ]


def time_rows(classifier: Judge, examples: Sequence[Example]) -> list[Row]:
    """CPU time of one decision (features, kinds, tier), over prompts of the corpus; `max` is the 95th percentile.

    Of each the least of five: what else runs on the machine is not meant. Vectors are at hand.
    """
    picked = examples[:: max(1, len(examples) // 400)]
    times = []
    for example in picked:
        took = []
        for _ in range(5):
            bare.cache_clear()  # as in a request that nobody asked before
            started = time.process_time()
            choose(classifier.classify(example.messages))
            took.append((time.process_time() - started) * 1e6)
        times.append(min(took))
    times.sort()
    return [
        Row(
            "decide_cpu_time",
            OURS,
            f"prompts of the corpus (n={len(times)})",
            "us",
            statistics.median(times),
            times[0],
            times[int(0.95 * len(times))],
            len(times),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="default: $TIERLINE_DATA")
    parser.add_argument(
        "--vectors", type=Path, help="of the prompts, as bench.prompt_vectors wrote them; default: made"
    )
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("give the folder of the data sets with --data or $TIERLINE_DATA (see tiers/DATA.md)")
    examples = corpus.load(options.data)
    embedder = Embedder(MODEL)
    vectors = PromptVectors() if options.vectors is None else PromptVectors.load(options.vectors)
    embed([*(e.messages for e in examples), *(item.messages for item in sheet.load())], vectors, embedder)
    table, classifier = default_table(), TaskClassifier.load()
    folds = evaluate.cross_validate(examples, 5, vectors)
    mix = {e.source for e in examples if e.source.startswith(evaluate.MIX)}
    benchmarks = evaluate.leave_out(examples, mix, vectors)
    tasks = evaluate.leave_tasks_out(examples, vectors)
    models = {name: evaluate.train([e for e in examples if e.source != name], vectors) for name in HAND_LABELLED}
    # Success by the shipped table: what is judged here are kinds.
    left_out = [
        one
        for name, model in models.items()
        for one in replace(model, table=table).judge([e for e in examples if e.source == name])
    ]
    by_words = {**{name: model.classifier for name, model in models.items()}, "own": classifier}
    by_vector = {name: WithVectors(trained, vectors, embedder) for name, trained in by_words.items()}
    rows = [
        *task_rows(examples, folds, left_out),
        *sheet_rows(by_words, table),
        *deferral_rows(folds, benchmarks, tasks),
        *learning_rows(examples),
        *calibration_rows(folds, benchmarks),
        *complexity_rows(folds),
        *four_tier_rows(folds, table),
        *gaming_rows(classifier),
        *time_rows(classifier, examples),
    ]
    folds, benchmarks, tasks, left_out = map(with_vectors, (folds, benchmarks, tasks, left_out))
    beside = [
        *task_rows(examples, folds, left_out),
        *sheet_rows(by_vector, table),
        *deferral_rows(folds, benchmarks, tasks),
        *learning_rows(examples, vectors),
        *calibration_rows(folds, benchmarks),
        *complexity_rows(folds),
        *four_tier_rows(folds, table),
        *gaming_rows(by_vector["own"]),
        *time_rows(by_vector["own"], examples),
    ]
    # How unfamiliar a text is its words say either way.
    strange = unknown_rows(classifier, left_out, options.data)
    report("routing", [*rows, *of_vectors(beside), *spread_rows(examples), *strange])
    return 0


if __name__ == "__main__":
    sys.exit(main())
