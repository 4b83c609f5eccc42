"""How good the routing is, on data that the evaluated model has not seen: held-out folds, sources and benchmarks.

APGR follows RouteLLM (arXiv 2406.18665): route a growing share of the queries to the strong model, those with the
largest predicted gain first; PGR is the part of the gap between weak and strong that is recovered at a share, APGR
its mean over all shares (about 0.5 for a random order), CPT(x) the least share whose PGR reaches x.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tiers import TIERS
from tiers.success import SuccessTable, mixed
from tiers.task import KINDS, TaskClassifier, TaskProfile
from tiers.train import outcomes, training
from tiers.train.corpus import Example
from tiers.train.vectors import PromptVectors

# Sources of the mix of 14 benchmarks.
MIX = "llmrouter/"
WEAK, STRONG = outcomes.REFERENCE["llmrouter"]["medium"], outcomes.REFERENCE["llmrouter"]["xlarge"]


@dataclass(frozen=True, slots=True)
class Deferral:
    """Quality of an order of queries: APGR and CPT at half, 80 % and 95 % of the gap (1.0 where never reached)."""

    apgr: float
    cpt50: float
    cpt80: float
    cpt95: float


def deferral(gain: Sequence[float], weak: Sequence[float], strong: Sequence[float], seed: int = 0) -> Deferral:
    """Evaluate predicted gains [n] against the scores of the weak and the strong model [n].

    Ties are broken at random, by `seed`: the order of the file must not help.

    Raises:
        ValueError: the strong model is not better, so there is no gap to recover.
    """
    low, high = fmean(weak), fmean(strong)
    if high <= low:
        raise ValueError(f"the strong model ({high:.3f}) is not better than the weak one ({low:.3f})")
    noise = np.random.default_rng(seed).random(len(gain))
    order = np.lexsort((noise, -np.asarray(gain)))
    added = np.cumsum((np.asarray(strong) - np.asarray(weak))[order])
    pgr = np.concatenate([[0.0], added / len(gain) / (high - low)])  # [n + 1], at shares 0 .. 1

    def cpt(part: float) -> float:
        reached = np.flatnonzero(pgr >= part)
        return float(reached[0]) / len(gain) if len(reached) else 1.0

    return Deferral(float(np.trapezoid(pgr, dx=1 / len(gain))), cpt(0.5), cpt(0.8), cpt(0.95))


def calibration_error(confidence: Sequence[float], right: Sequence[float], bins: int = 10) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over equal-width bins, by their size."""
    values, truth = np.asarray(confidence), np.asarray(right, float)
    bin_of = np.minimum((values * bins).astype(int), bins - 1)
    total = 0.0
    for b in range(bins):
        inside = bin_of == b
        if inside.any():
            total += inside.sum() * abs(values[inside].mean() - truth[inside].mean())
    return float(total / len(values))


@dataclass(frozen=True, slots=True)
class Trained:
    """A classifier and its table, trained on some of the examples."""

    classifier: TaskClassifier
    table: SuccessTable
    vectors: PromptVectors | None = None

    def profiles(self, examples: Iterable[Example]) -> list[TaskProfile]:
        """What it says of each, by its vector where there are vectors and it has one."""
        if self.vectors is None:
            return [self.classifier.classify(example.messages) for example in examples]
        vectors = self.vectors
        return [self.classifier.classify(e.messages, vector=vectors.asked(e.messages)) for e in examples]

    def judge(self, examples: Sequence[Example]) -> list[HeldOut]:
        """What it says of each by words, and where there are vectors by these, too."""
        by_words = replace(self, vectors=None).profiles(examples)
        found = [judged(e, p, self.table) for e, p in zip(examples, by_words, strict=True)]
        if self.vectors is None:
            return found
        profiles = self.profiles(examples)
        return [
            replace(one, by_vector=judged(one.example, p, self.table)) for one, p in zip(found, profiles, strict=True)
        ]


def train(examples: Sequence[Example], vectors: PromptVectors | None = None) -> Trained:
    """As `python -m tiers.train`."""
    weights, table = training.train(examples, vectors)
    return Trained(TaskClassifier(weights), table, vectors)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One example and what a model that had not seen it said; `p_success` is the mean by tier.

    `by_vector` is what it said with the vector at hand, where vectors were evaluated.
    """

    example: Example
    profile: TaskProfile
    p_success: dict[str, float]
    by_vector: HeldOut | None = None

    @property
    def gain(self) -> float:
        """Predicted gain of the strong over the weak tier of the llmrouter set."""
        return self.p_success["xlarge"] - self.p_success["medium"]


def with_vectors(results: Iterable[HeldOut]) -> list[HeldOut]:
    """The same examples as they were judged with their vectors."""
    return [result.by_vector for result in results if result.by_vector is not None]


def judged(example: Example, profile: TaskProfile, table: SuccessTable) -> HeldOut:
    """What `table` says of an example with this profile."""
    by_kind = table.by_kind(profile)
    return HeldOut(example, profile, {tier: mixed(by_kind, tier).mean for tier in TIERS})


def cross_validate(examples: Sequence[Example], folds: int, vectors: PromptVectors | None = None) -> list[HeldOut]:
    """Every example judged by a model trained without its fold; folds are by random permutation, fixed seed."""
    fold = np.random.default_rng(7).permutation(len(examples)) % folds
    return _by_group(examples, [str(f) for f in fold], lambda group: True, vectors)


def leave_out(
    examples: Sequence[Example], groups: Iterable[str], vectors: PromptVectors | None = None
) -> list[HeldOut]:
    """Every example of the named sources judged by a model that never saw that source."""
    wanted = set(groups)
    return _by_group(examples, [e.source for e in examples], wanted.__contains__, vectors)


def leave_tasks_out(examples: Sequence[Example], vectors: PromptVectors | None = None) -> list[HeldOut]:
    """Every query of the mix judged by a model that saw nothing of its task: no prompt, no label, no outcome."""
    found: list[HeldOut] = []
    for task in sorted({KINDS[e.kind] for e in examples if e.source.startswith(MIX)}):
        model = train([e for e in examples if KINDS[e.kind] != task], vectors)
        found += model.judge([e for e in examples if KINDS[e.kind] == task and e.source.startswith(MIX)])
    return found


def learning(
    examples: Sequence[Example],
    labels: Sequence[int],
    vectors: PromptVectors | None = None,
    folds: int = 3,
    draws: int = 10,
) -> dict[int, list[Deferral]]:
    """The mix after so many labelled outcomes per benchmark and tier, and no other outcome of the mix.

    The classifier knows the prompts of the other folds, but their scores are taken away, also from its complexity; the
    labels are drawn from the other folds as well, anew in each draw.
    """
    blind = [replace(e, scores={}) if e.source.startswith(MIX) else e for e in examples]
    fold = np.random.default_rng(8).permutation(len(examples)) % folds
    parts = []
    for number in range(folds):
        model = train([e for e, f in zip(blind, fold, strict=True) if f != number], vectors)
        seen = [e for e, f in zip(examples, fold, strict=True) if f != number and e.source.startswith(MIX)]
        inside = [e for e, f in zip(examples, fold, strict=True) if f == number and e.source.startswith(MIX)]
        parts.append((model, seen, model.profiles(seen), inside, model.profiles(inside)))
    found: dict[int, list[Deferral]] = {}
    for count in labels:
        found[count] = []
        for draw in range(draws if count else 1):
            results: list[HeldOut] = []
            for model, seen, profiles, inside, to_judge in parts:
                table = model.table.learned(_labelled(seen, profiles, count, np.random.default_rng(draw)))
                results += [judged(e, p, table) for e, p in zip(inside, to_judge, strict=True)]
            found[count].append(mix_deferral(results))
    return found


def _labelled(
    examples: Sequence[Example], profiles: Sequence[TaskProfile], count: int, rng: np.random.Generator
) -> dict[tuple[str, str], tuple[float, float]]:
    """Wins and losses of `count` queries per benchmark, shared out by what the classifier takes each for."""
    counts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_source: dict[str, list[int]] = defaultdict(list)
    for number, example in enumerate(examples):
        by_source[example.source].append(number)
    for numbers in by_source.values():
        for number in rng.choice(numbers, min(count, len(numbers)), replace=False):
            for tier, model in outcomes.reference(MIX).items():
                won = examples[number].scores[model]
                for kind, share in profiles[number].kinds.items():
                    counts[kind, tier][0] += share * won
                    counts[kind, tier][1] += share * (1 - won)
    return {cell: (wins, losses) for cell, (wins, losses) in counts.items()}


def success_calibration(results: Iterable[HeldOut], tiers: Iterable[str] = TIERS) -> tuple[float, int]:
    """Calibration error of the predicted success over all measured (prompt, tier), and their number."""
    predicted, won = [], []
    for item in results:
        reference = outcomes.reference(item.example.source)
        for tier in tiers:
            if reference.get(tier) in item.example.scores:
                predicted.append(item.p_success[tier])
                won.append(item.example.scores[reference[tier]])
    return calibration_error(predicted, won), len(won)


def _by_group(
    examples: Sequence[Example],
    group_of: Sequence[str],
    wanted: Callable[[str], bool],
    vectors: PromptVectors | None,
) -> list[HeldOut]:
    found: list[HeldOut] = []
    for group in sorted({g for g in group_of if wanted(g)}):
        inside = [e for e, g in zip(examples, group_of, strict=True) if g == group]
        model = train([e for e, g in zip(examples, group_of, strict=True) if g != group], vectors)
        found += model.judge(inside)
    return found


def task_accuracy(results: Iterable[HeldOut]) -> float:
    """Share of the examples whose task was named right."""
    return fmean(item.profile.task == KINDS[item.example.kind] for item in results)


def mix_deferral(results: Iterable[HeldOut]) -> Deferral:
    """`deferral` over the examples of the llmrouter mix among `results`."""
    mix = [item for item in results if item.example.source.startswith(MIX)]
    return deferral(
        [item.gain for item in mix],
        [item.example.scores[WEAK] for item in mix],
        [item.example.scores[STRONG] for item in mix],
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank."""

    def ranks(values: Sequence[float]) -> NDArray[np.float64]:
        array = np.asarray(values)
        _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        result: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
        return result

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])
