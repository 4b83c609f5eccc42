"""What policies of one folder may not say of each other: the checks across files."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from policies.policy import SCOPES, Policy
from policies.schema.routes import AppliesTo
from policies.yamlfile import Document, Problem
from policies.yamlread import Location


def conflicts(loaded: Sequence[tuple[Policy, Document]]) -> list[Problem]:
    """Names given twice, policies that tie for a subject, rollouts that point nowhere, and a missing catch-all."""
    problems: list[Problem] = []
    by_name: dict[str, Policy] = {}
    plain: list[tuple[Policy, Document]] = []
    replaced: dict[str, str] = {}
    for index, (policy, document) in enumerate(loaded):
        for earlier, _ in loaded[:index]:
            if earlier.name == policy.name and not _takes_over(policy, earlier):
                where = Path(earlier.file).name
                problems.append(document.problem(("name",), f"the name '{policy.name}' is taken by {where}."))
                break
        by_name.setdefault(policy.name, policy)
    for policy, document in loaded:
        if policy.document.rollout:
            problems += _rollout_problems(policy, document, by_name, replaced)
            continue
        for other_policy, _ in plain:
            if policy.name != other_policy.name and _tie(policy, other_policy) and _overlap(policy, other_policy):
                where = Path(other_policy.file).name
                problems.append(
                    document.problem(
                        ("applies_to",), f"as specific as '{other_policy.name}' ({where}): who should win?"
                    )
                )
        plain.append((policy, document))
    if not any(policy.document.applies_to == AppliesTo() and _is_lasting(policy) for policy, _ in plain):
        folder = str(Path(loaded[0][0].file).parent)
        always = " at all times" if any(policy.document.applies_to == AppliesTo() for policy, _ in plain) else ""
        without = "'applies_to'" + (", 'valid_from' and 'valid_until'" if always else "")
        message = (
            f"no policy applies to everybody{always}: add one without {without}, for requests that no other covers."
        )
        problems.append(Problem(folder, 1, 1, message))
    return problems


def _rollout_problems(
    policy: Policy, document: Document, by_name: dict[str, Policy], replaced: dict[str, str]
) -> list[Problem]:
    assert policy.document.rollout is not None
    target = policy.document.rollout.instead_of
    where: Location = ("rollout", "instead_of")
    if target not in by_name:
        close = difflib.get_close_matches(target, [name for name in by_name if name != policy.name], n=1)
        return [document.problem(where, f"there is no policy '{target}'.", close[0] if close else None)]
    if by_name[target].document.rollout:
        return [document.problem(where, f"'{target}' is itself being rolled out: finish that first.")]
    other = replaced.setdefault(target, policy.name)
    if other != policy.name:
        return [document.problem(where, f"'{other}' is being rolled out instead of '{target}' already.")]
    return []


def _tie(one: Policy, other: Policy) -> bool:
    """Whether some subject matches both and neither is more specific."""
    if one.specificity() != other.specificity():
        return False
    pairs = [(getattr(one.document.applies_to, f), getattr(other.document.applies_to, f)) for f, _ in SCOPES]
    return all(not a or set(a) & set(b) for a, b in pairs)


def _takes_over(one: Policy, other: Policy) -> bool:
    """Whether two policies of one name are versions that begin at different times."""
    plain = one.document.rollout is None and other.document.rollout is None
    return plain and one.document.valid_from != other.document.valid_from


def _is_lasting(policy: Policy) -> bool:
    return policy.document.valid_from is None and policy.document.valid_until is None


def _overlap(one: Policy, other: Policy) -> bool:
    """Whether both are valid at some moment."""
    return _ends_after(one, other) and _ends_after(other, one)


def _ends_after(one: Policy, other: Policy) -> bool:
    """Whether one policy ends, if ever, after the other has begun."""
    ends, begins = one.document.valid_until, other.document.valid_from
    return ends is None or begins is None or ends > begins
