"""Builds the success table from right and wrong answers of reference models, one model per tier and source.

Tiers are classes of size: 1B-3B, 7B-8B, 13B-20B, 70B. Public per-question outcomes exist for neighbouring sizes, so
the reference models are the nearest ones of one family or generation (an older 13B is worse than a newer 8B and would
say nothing about size).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from scipy.optimize import brentq

from tiers import TIERS
from tiers.beta import logit, lower_bound, sigmoid
from tiers.success import PRIOR_WEIGHT, Cell, Source, SuccessTable
from tiers.task import KINDS
from tiers.train.corpus import Example

_QWEN = {
    "small": "Qwen2.5-3B-Instruct",
    "medium": "Qwen2.5-7B-Instruct",
    "large": "Qwen2.5-32B-Instruct",
    "xlarge": "Qwen2.5-72B-Instruct",
}
REFERENCE: dict[str, dict[str, str]] = {
    "zeroeval/gsm": {
        "small": "gemma-2-2b-it",
        "medium": "gemma-2-9b-it",
        "large": "gemma-2-27b-it",
        "xlarge": "Meta-Llama-3.1-70B-Instruct",
    },
    "zeroeval/crux": _QWEN,
    "zeroeval/math-l5": _QWEN,
    "mmlu_pro": {
        "small": "Phi-3-mini-4k-instruct",
        "medium": "Llama-3.1-8B-Instruct",
        "xlarge": "Llama-3.1-70B-Instruct",
    },
    "llmrouter": {"medium": "llama-3.1-8b-instruct", "xlarge": "llama-3.1-nemotron-51b-instruct"},
}
# Judgement, not measurement: kinds without public outcomes per model size. Small, medium, large, xlarge. Each number is
# what we would bet three to one on, so that it is the lower bound that the choice goes by; the mean lies above it.
PRIORS: dict[str, tuple[float, float, float, float]] = {
    "label_text": (0.86, 0.92, 0.94, 0.95),
    "extract_fields": (0.83, 0.91, 0.93, 0.95),
    "summarise_text": (0.74, 0.88, 0.91, 0.93),
    "rewrite_text": (0.77, 0.89, 0.92, 0.93),
    "translate_text": (0.62, 0.82, 0.88, 0.92),
    "explain_topic": (0.62, 0.84, 0.89, 0.92),
    "small_talk": (0.76, 0.90, 0.92, 0.93),
    "write_text": (0.66, 0.85, 0.89, 0.92),
    "list_ideas": (0.72, 0.87, 0.90, 0.92),
    "software_work": (0.35, 0.66, 0.81, 0.87),
    "analyse_situation": (0.35, 0.64, 0.82, 0.88),
}


def reference(source: str) -> dict[str, str]:
    """Reference model per tier of a source, empty where it has none."""
    return REFERENCE.get(source) or REFERENCE.get(source.partition("/")[0], {})


def build(examples: Sequence[Example]) -> SuccessTable:
    """The table over `examples`, in which complexity shifts nothing yet.

    A kind without outcomes and without a prior gets the mean of all cells of its tier.
    """
    counts: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for example in examples:
        for tier, model in reference(example.source).items():
            if model in example.scores:
                counts[example.kind][example.source][tier].append(example.scores[model])
    small_gap, large_share = _typical_steps(counts)
    cells: dict[str, dict[str, Cell]] = {}
    for kind, sources in counts.items():
        cells[kind] = _pool([_complete(outcomes, small_gap, large_share) for outcomes in sources.values()])
    for kind, prior in PRIORS.items():
        cells.setdefault(kind, {t: Cell(_mean_of(p), 0, "prior") for t, p in zip(TIERS, prior, strict=True)})
    means = {tier: fmean(row[tier].p for row in cells.values()) for tier in TIERS}
    for kind in KINDS:
        cells.setdefault(kind, {tier: Cell(means[tier], 0, "prior") for tier in TIERS})
    return SuccessTable(cells, dict.fromkeys(KINDS, 0.5), {})


def _mean_of(bound: float) -> float:
    """The mean of a judgement whose lower bound is `bound`."""
    return float(brentq(lambda mean: lower_bound(mean, PRIOR_WEIGHT["prior"]) - bound, bound, 0.999))


def _rate(outcomes: list[float]) -> float:
    """Posterior mean under a uniform Beta(1, 1) prior."""
    return (sum(outcomes) + 1) / (len(outcomes) + 2)


def _typical_steps(counts: dict[str, dict[str, dict[str, list[float]]]]) -> tuple[float, float]:
    """Mean log-odds from small to medium, and where large lies between medium and xlarge (0 to 1), where measured."""
    gaps, shares = [], []
    for sources in counts.values():
        for outcomes in sources.values():
            odds = {tier: logit(_rate(values)) for tier, values in outcomes.items()}
            if "small" in odds and "medium" in odds:
                gaps.append(odds["medium"] - odds["small"])
            if {"medium", "large", "xlarge"} <= set(odds) and odds["xlarge"] > odds["medium"]:
                shares.append((odds["large"] - odds["medium"]) / (odds["xlarge"] - odds["medium"]))
    return (fmean(gaps) if gaps else 0.9), (min(1.0, max(0.0, fmean(shares))) if shares else 0.6)


def _complete(outcomes: dict[str, list[float]], small_gap: float, large_share: float) -> dict[str, Cell]:
    """All four tiers of one source: those that nobody measured by the typical steps of the others."""
    cells = {tier: Cell(_rate(values), len(values), "measured") for tier, values in outcomes.items()}
    medium, xlarge = logit(cells["medium"].p), logit(cells["xlarge"].p)
    cells.setdefault("small", Cell(sigmoid(medium - small_gap), 0, "interpolated"))
    cells.setdefault("large", Cell(sigmoid(medium + large_share * (xlarge - medium)), 0, "interpolated"))
    return cells


def _pool(sources: Iterable[dict[str, Cell]]) -> dict[str, Cell]:
    """Mean over sources, weighted by the outcomes of the medium tier; then made monotone from small to xlarge."""
    rows = list(sources)
    weights = [row["medium"].trials for row in rows]
    pooled: dict[str, Cell] = {}
    floor = 0.0
    for tier in TIERS:
        p = sum(w * row[tier].p for w, row in zip(weights, rows, strict=True)) / sum(weights)
        trials = sum(row[tier].trials for row in rows)
        # Called measured only where at least half of what it is made of was measured.
        source: Source = "measured" if 2 * trials >= sum(weights) else "interpolated"
        floor = max(floor, p)
        pooled[tier] = Cell(floor, trials, source)
    return pooled
