"""Whether the confidence that a policy asks for can be told: of each model that may answer first, by its curve.

A log-probability says little by itself: one model is right nine times in ten where another is right half the time. So
`low_confidence` with a probability needs a curve of each such model, measured with its own answers; without one the
policy is refused rather than go by a number that means nothing. A raw threshold is the owner's own judgement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from policies.schema.escalation import Escalate
from policies.yamlfile import Document, Problem
from policies.yamlread import Location
from tiers import TIERS

if TYPE_CHECKING:
    from policies.load import Policy


def without_curve(document: Document, policy: Policy, uncalibrated: Mapping[str, str]) -> list[Problem]:
    """A problem for each place that asks for a probability which some model behind it has no curve for.

    Args:
        uncalibrated: the models that report log-probabilities and have no curve, with their tiers.
    """
    missing: dict[Location, dict[str, None]] = {}
    for where, escalate, tiers, model in _asking(document, policy):
        if escalate.mean_logprob is not None:
            continue
        names = (name for name, tier in uncalibrated.items() if name == model or (model is None and tier in tiers))
        missing.setdefault(where, {}).update(dict.fromkeys(names))
    return [document.problem(where, _message(list(names))) for where, names in missing.items() if names]


def never_told(document: Document, policy: Policy, reporting: Mapping[str, str | None]) -> list[Problem]:
    """A problem for each place that asks for confidence where no model behind it reports log-probabilities.

    Args:
        reporting: the models that report them, with their tiers.
    """
    told: dict[Location, bool] = {}
    for where, _, tiers, model in _asking(document, policy):
        anywhere = bool(tiers) and tiers[0] not in policy.served  # it falls back to any other
        some = any(name == model or (model is None and (anywhere or tier in tiers)) for name, tier in reporting.items())
        told[where] = told.get(where, False) or some
    text = (
        "'low_confidence' has no effect: of the models that may answer first none reports log-probabilities"
        " (capability 'logprobs' in tierline.yaml)."
    )
    return [document.problem(where, text) for where, some in told.items() if not some]


def _asking(document: Document, policy: Policy) -> Iterator[tuple[Location, Escalate, tuple[str, ...], str | None]]:
    """The places that ask for confidence, by where the file says so; with the tiers or the model checked."""
    for path, escalate, tiers, model in _places(policy):
        if escalate.asks_confidence:
            where: Location = (*path, "when")
            yield where if where in document.keys else ("escalate", "when"), escalate, tiers, model


def _message(names: list[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names)
    return (
        f"'low_confidence' needs a curve of each model that may answer first, and {listed} "
        f"{'has' if len(names) == 1 else 'have'} none: measure it with 'tierline tiers calibrate', or give "
        "'mean_logprob', a threshold of your own."
    )


def _places(policy: Policy) -> Iterator[tuple[Location, Escalate, tuple[str, ...], str | None]]:
    """Each place where answers are checked, with the tiers that are then not the last, or the model."""
    served = policy.served
    for rule in policy.rules:
        escalate, route = rule.escalate, rule.route
        if escalate is None:
            continue
        path: Location = ("routes", rule.index, "escalate")
        if route.model is not None:
            yield path, escalate, (), route.model
        elif route.cascade is not None:
            yield path, escalate, route.cascade[:-1], None
        else:
            yield path, escalate, served[:-1] if route.tier == "auto" else _before_last(escalate, str(route.tier)), None
    general = policy.document.escalate
    decided = any(rule.condition is None or rule.condition.constant for rule in policy.rules)
    if general is not None and general.when and not decided:
        yield ("escalate",), general, _before_last(general, policy.document.default), None


def _before_last(escalate: Escalate, first: str) -> tuple[str, ...]:
    """The tiers whose answers may lead to another step, from the first on."""
    if escalate.to == "next":
        at = TIERS.index(first)
        return tuple(TIERS[at : at + escalate.at_most])
    steps = (escalate.to,) if isinstance(escalate.to, str) else escalate.to
    later = [tier for tier in steps if TIERS.index(tier) > TIERS.index(first)][: escalate.at_most]
    return (first, *later[:-1])
