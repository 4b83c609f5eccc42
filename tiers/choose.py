"""The choice behind `tier: auto`: the smallest tier that is good enough, or the policy's default where nobody can tell.

A tier is good enough for a kind of request if the lower bound of P(success) reaches the policy's quality target: not
the hope but what we would bet three to one on. Where no tier reaches it, the smallest one close to the best is enough:
paying more would buy nothing. A request may be one of several kinds; the smallest tier that is enough for most of them
is taken, so that a small chance of something hopeless does not buy the largest model. A request unlike the training
data gets the default tier, never silently the cheapest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tiers import TIERS
from tiers.success import Estimate, SuccessTable, default_table, mixed
from tiers.task import TaskProfile

QUALITY_TARGET: Final = 0.8
DEFAULT_TIER: Final = "medium"
# A larger tier must promise at least this much more success to be worth its price where none reaches the target.
WORTHWHILE_GAIN: Final = 0.06
# The smallest models are unreliable at calling tools; the success data holds no tool calls that could say otherwise.
SMALLEST_TIER_FOR_TOOLS: Final = "medium"


@dataclass(frozen=True, slots=True)
class TierChoice:
    """A tier, why in words, and P(success) of every tier that was on offer (empty where nobody could tell).

    Attributes:
        p_success: tier -> mean.
        lower: tier -> lower bound; over all kinds that the request may be, as `p_success`.
        by_kind: what the choice went by: for each kind that it may be its share, and the estimate of each tier.
    """

    tier: str
    reason: str
    p_success: dict[str, float]
    lower: dict[str, float] = field(default_factory=dict)
    by_kind: Sequence[tuple[float, Mapping[str, Estimate]]] = ()


def choose(
    profile: TaskProfile,
    tiers_available: Iterable[str] = TIERS,
    quality_target: float = QUALITY_TARGET,
    default_tier: str = DEFAULT_TIER,
    table: SuccessTable | None = None,
) -> TierChoice:
    """Choose a tier for a request.

    Args:
        profile: what the classifier said.
        tiers_available: tiers that have a model.
        quality_target: P(success) that is good enough, in (0, 1]; the lower bound must reach it.
        default_tier: for a request out of distribution; it may be one without a model (the caller falls back).
        table: success table; default: the shipped one.

    Raises:
        ValueError: no tier is available, one is unknown, or the target is not in (0, 1].
    """
    offered = set(tiers_available)
    unknown = offered.difference(TIERS)
    if unknown:
        raise ValueError(f"unknown tier {', '.join(sorted(unknown))}; tiers are {', '.join(TIERS)}")
    if not offered:
        raise ValueError("no tier is available: tierline.yaml names no model")
    if not 0 < quality_target <= 1:
        raise ValueError(f"quality_target must be above 0 and at most 1, got {quality_target}")
    if not profile.in_distribution:
        return TierChoice(default_tier, _out_of_distribution(profile), {})
    table = table or default_table()
    tiers: list[str] = [tier for tier in TIERS if tier in offered]
    by_kind = table.by_kind(profile)
    found = {tier: mixed(by_kind, tier) for tier in tiers}
    candidates = _fit_for_tools(tiers) if profile.features.get("tools") else tiers
    needed = dict.fromkeys(candidates, 0.0)
    reached = 0.0
    for share, estimates in by_kind:
        tier, reaches = _enough(estimates, candidates, quality_target)
        needed[tier] += share
        reached += share * reaches
    tier = _most(needed)
    what = f"{profile.task} ({profile.confidence:.0%} sure), complexity {profile.complexity:.2f}"
    return TierChoice(
        tier,
        f"{what}: {_why(tier, found[tier].lower, quality_target, reached)}",
        {name: estimate.mean for name, estimate in found.items()},
        {name: estimate.lower for name, estimate in found.items()},
        by_kind,
    )


def _enough(estimates: Mapping[str, Estimate], candidates: Sequence[str], target: float) -> tuple[str, bool]:
    """The smallest tier whose bound reaches the target, else the smallest close to the best; and which of both."""
    for tier in candidates:
        if estimates[tier].lower >= target:
            return tier, True
    best = max(estimates[tier].lower for tier in candidates)
    return next(tier for tier in candidates if estimates[tier].lower >= best - WORTHWHILE_GAIN), False


def _most(needed: Mapping[str, float]) -> str:
    """The smallest tier that is enough for at least half of what the request may be."""
    covered = itertools.accumulate(needed.values())
    return next(tier for tier, share in zip(needed, covered, strict=True) if share >= 0.5 - 1e-9)


def bound_text(lower: float, target: float | None) -> str:
    """A bound with two digits, or with as many more as it takes to see whether it reaches the target."""
    for digits in range(2, 6):
        text = f"{lower:.{digits}f}"
        if target is None or (float(text) >= target) == (lower >= target):
            break
    return text


def target_text(target: float) -> str:
    """A target with two digits, or all that it has."""
    return f"{target:.2f}" if round(target, 2) == target else f"{target:g}"


def _why(tier: str, lower: float, target: float, reached: float) -> str:
    promise = f"P(success) of at least {bound_text(lower, target)}"
    if lower >= target:
        return f"'{tier}' is the smallest tier whose {promise} reaches the target {target_text(target)}"
    if reached >= 0.5:
        return (
            f"'{tier}' is enough for most of what this may be; {promise} over all, the target is {target_text(target)}"
        )
    return (
        f"no tier reaches the target {target_text(target)}; '{tier}' is the smallest within {WORTHWHILE_GAIN:.2f} of"
        f" the best, with {promise}"
    )


def _fit_for_tools(tiers: list[str]) -> list[str]:
    """Tiers large enough to call tools, or the largest on offer."""
    least = TIERS.index(SMALLEST_TIER_FOR_TOOLS)
    return [tier for tier in tiers if TIERS.index(tier) >= least] or tiers[-1:]


def _out_of_distribution(profile: TaskProfile) -> str:
    known = profile.features.get("known_words", 0.0)
    return (
        f"unlike the training data (score {profile.unfamiliarity:.2f}: {known:.0%} of the words known, best guess"
        f" {profile.task} at {profile.confidence:.0%}): the policy's default tier"
    )
