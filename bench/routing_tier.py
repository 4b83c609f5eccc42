"""Which tier is chosen: against a sheet labelled by hand, and for what it buys where all four tiers were measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from bench.report import Row
from bench.routing_judges import BASELINE, OURS, Judge, Keywords, interval, one, text
from tiers import TIERS
from tiers.choose import choose
from tiers.success import SuccessTable
from tiers.train import outcomes, sheet
from tiers.train.evaluate import HeldOut


def sheet_rows(models: Mapping[str, Judge], table: SuccessTable) -> list[Row]:
    """Tiers of the hand-labelled sheet; `models` holds by collection a classifier that has not seen it."""
    labelled = sheet.load()
    words = Keywords()
    profiles = [models[item.collection].classify(item.messages) for item in labelled]
    tiers = {
        OURS: [choose(profile, table=table).tier for profile in profiles],
        BASELINE: [words.tier(item.prompt) for item in labelled],
        "always medium": ["medium"] * len(labelled),
    }
    wanted = [item.tier for item in labelled]
    parts = {
        "all": [True] * len(labelled),
        "prompts of others": [item.collection != "own" for item in labelled],
        **{name: [item.collection == name for item in labelled] for name in models},
    }
    rows = []
    for part, inside in parts.items():
        setting = f"sheet, collection left out, {part} (n={sum(inside)})"
        for system, found in tiers.items():
            if part not in ("all", "prompts of others") and system != OURS:
                continue
            exact = [a == b for a, b, i in zip(found, wanted, inside, strict=True) if i]
            near = [
                abs(TIERS.index(a) - TIERS.index(b)) <= 1 for a, b, i in zip(found, wanted, inside, strict=True) if i
            ]
            rows.append(interval("tier_accuracy", system, setting, exact))
            rows.append(interval("tier_within_one", system, setting, near))
    right = [profile.task == item.task for profile, item in zip(profiles, labelled, strict=True)]
    rows.append(interval("task_accuracy", OURS, f"sheet, collection left out (n={len(right)})", right))
    for label in TIERS:
        for chosen in TIERS:
            count = sum(a == label and b == chosen for a, b in zip(wanted, tiers[OURS], strict=True))
            rows.append(one("confusion", OURS, f"sheet, labelled {label}, chosen {chosen}", "prompts", count))
    return rows


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
    choices[BASELINE] = [words.tier(text(r.example)) for r in measured]
    rows = []
    setting = f"zeroeval, 5 folds (n={len(measured)})"
    points: list[tuple[float, float]] = []
    for system, tiers in choices.items():
        success = statistics.fmean(map(won, measured, tiers))
        mean_size = statistics.fmean(size[tier] for tier in tiers)
        rows.append(one("success", system, setting, "share", success))
        rows.append(one("mean_model_size", system, setting, "billion", mean_size))
        if system.startswith("always"):
            points.append((mean_size, success))
        else:
            # What mixing two fixed tiers at random buys for the same mean size: the line that a router must beat.
            mixed = float(np.interp(mean_size, [x for x, _ in points], [y for _, y in points]))
            rows.append(one("success", f"random mix, size of {system}", setting, "share", mixed))
        of = {id(r): t for r, t in zip(measured, tiers, strict=True)}
        exact = statistics.fmean(of[id(r)] == smallest(r) for r in solvable)
        rows.append(one("smallest_sufficient_tier", system, f"zeroeval, 5 folds (n={len(solvable)})", "share", exact))
    return rows
