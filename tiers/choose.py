"""The choice behind `tier: auto`: the smallest tier that is good enough, or the policy's default where nobody can tell.

"Good enough" is a lower bound of P(success) of at least the policy's quality target: not the hope but what we would bet
three to one on. Where no tier reaches it, the smallest one that is close to the best is taken: paying more would buy
nothing. A request unlike the training data gets the default tier, never silently the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from tiers import TIERS
from tiers.success import SuccessTable, default_table
from tiers.task import TaskProfile

QUALITY_TARGET: Final = 0.8
DEFAULT_TIER: Final = "medium"
# A larger tier must promise at least this much more success to be worth its price where none reaches the target.
WORTHWHILE_GAIN: Final = 0.04
# The smallest models are unreliable at calling tools; the success data holds no tool calls that could say otherwise.
SMALLEST_TIER_FOR_TOOLS: Final = "medium"


@dataclass(frozen=True, slots=True)
class TierChoice:
    """A tier, why in words, and P(success) of every tier that was on offer (empty where nobody could tell).

    Attributes:
        p_success: tier -> mean.
        lower: tier -> lower bound, which is what the choice goes by.
    """

    tier: str
    reason: str
    p_success: dict[str, float]
    lower: dict[str, float] = field(default_factory=dict)


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
    found = {tier: table.p_success(profile, tier) for tier in tiers}
    p_success = {tier: estimate.mean for tier, estimate in found.items()}
    lower = {tier: estimate.lower for tier, estimate in found.items()}
    candidates = _fit_for_tools(tiers) if profile.features.get("tools") else tiers
    what = f"{profile.task} ({profile.confidence:.0%} sure), complexity {profile.complexity:.2f}"
    for tier in candidates:
        if lower[tier] >= quality_target:
            promise = f"P(success), at least {lower[tier]:.2f}, reaches the target {quality_target:.2f}"
            return TierChoice(tier, f"{what}: '{tier}' is the smallest tier whose {promise}", p_success, lower)
    best = max(lower[tier] for tier in candidates)
    tier = next(tier for tier in candidates if lower[tier] >= best - WORTHWHILE_GAIN)
    return TierChoice(
        tier,
        f"{what}: no tier reaches the target {quality_target:.2f}; '{tier}' is the smallest within"
        f" {WORTHWHILE_GAIN:.2f} of the best, with P(success) of at least {lower[tier]:.2f}",
        p_success,
        lower,
    )


def _fit_for_tools(tiers: list[str]) -> list[str]:
    """Tiers large enough to call tools, or the largest on offer."""
    least = TIERS.index(SMALLEST_TIER_FOR_TOOLS)
    return [tier for tier in tiers if TIERS.index(tier) >= least] or tiers[-1:]


def _out_of_distribution(profile: TaskProfile) -> str:
    known = profile.features.get("known_words", 0.0)
    return (
        f"unlike the training data ({known:.0%} of the words known, best guess {profile.task} at"
        f" {profile.confidence:.0%}): the policy's default tier"
    )
