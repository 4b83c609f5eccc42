"""The facts of a request as they are put on record, and the facts made from a record again.

A record holds numbers and labels, never what people wrote: the texts among the facts come back empty, so a rule that
looks at them (`TEXT_VARIABLES`) cannot be decided again. All else comes back as it was, to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, itemgetter
from typing import Any, Final

from policies.facts import PLAIN_VARIABLES, TEXT_VARIABLES, VARIABLES, Facts
from tiers.task import TaskProfile

# Kinds less likely than this are left out: the success table does not ask about them either.
NEGLIGIBLE: Final = 0.005
_PLAIN: Final = tuple(name for name in VARIABLES if name in PLAIN_VARIABLES and name not in TEXT_VARIABLES)
_plain = attrgetter(*_PLAIN)
_value = itemgetter(1)


def recorded(facts: Facts) -> dict[str, Any]:
    """The variables and their values, and what the classifier saw. Made for every request.

    Beside the variables: `kinds` (weight of each kind that is not negligible), `seen` (the classifier's features that
    are not 0) and `pinned_tier`, each where there is one.
    """
    values = dict(zip(_PLAIN, _plain(facts), strict=True))
    values["tags"] = list(facts.tags)
    values["budget"] = {"used": facts.budget_used}
    if facts.pinned_tier is not None:
        values["pinned_tier"] = facts.pinned_tier
    profile = facts.profile
    if profile is not None:
        values["task"] = profile.task
        values["task_confidence"] = profile.confidence
        values["complexity"] = profile.complexity
        values["in_distribution"] = profile.in_distribution
        values["kinds"] = {kind: weight for kind, weight in profile.kinds.items() if weight >= NEGLIGIBLE}
        values["seen"] = dict(filter(_value, profile.features.items()))
    return values


def facts_of(record: Mapping[str, Any]) -> Facts:
    """The facts that `recorded` was given, without texts and without the probabilities of tasks.

    Raises:
        KeyError, TypeError: this is no such record, or one of an earlier version that lacks something.
    """
    values = {name: record[name] for name in _PLAIN if name != "language"}
    profile = None
    if "kinds" in record:
        seen = record["seen"]
        profile = TaskProfile(
            task=record["task"],
            confidence=record["task_confidence"],
            complexity=record["complexity"],
            in_distribution=record["in_distribution"],
            features=dict(seen),
            probabilities={},
            kinds=dict(record["kinds"]),
        )
    return Facts(
        **values,
        language=record.get("language", ""),  # which records of earlier versions do not have
        tags=tuple(record["tags"]),
        budget_used=record["budget"]["used"],
        profile=profile,
        pinned_tier=record.get("pinned_tier"),
    )
