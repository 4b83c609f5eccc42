"""What the limits and the budget of a policy mean for one key."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.access.limits import Scope
from gateway.access.principal import Principal
from policies.load import Policy

_MOST_KNOWN: Final = 10_000


class Terms(msgspec.Struct, frozen=True, eq=False):
    """What a key's requests count against under a policy: its key, project, team and organisation, the policy's
    ceilings of that key, the policy's budget.

    `budgets` are those of which the spent share is a fact for rules, the policy's own among them even where it refuses
    nobody.
    """

    principal: Principal
    policy: Policy
    scopes: tuple[Scope, ...]
    budgets: tuple[Scope, ...]


_known: dict[tuple[str, str], Terms] = {}  # by key and policy


def terms_of(principal: Principal, policy: Policy) -> Terms:
    """The terms, which stay the same until the key or the policy is changed: each is another object then."""
    at = principal.key_id, policy.name
    known = _known.get(at)
    if known is None or known.principal is not principal or known.policy is not policy:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[at] = _terms(principal, policy)
    return known


def _terms(principal: Principal, policy: Policy) -> Terms:
    scopes = (*principal.scopes, budget_scope(policy, enforced=True))
    if (ceilings := ceilings_of(policy, principal.key_id)) is not None:
        scopes = (*scopes, ceilings)
    counted = (*principal.scopes, budget_scope(policy, enforced=False))
    return Terms(principal, policy, scopes, tuple(scope for scope in counted if scope.budget_nanousd is not None))


def ceilings_of(policy: Policy, key_id: str) -> Scope | None:
    """The policy's ceilings of a key; None where it has none."""
    limits = policy.limits
    if (limits.requests_per_minute or limits.tokens_per_minute or limits.parallel) is None:
        return None
    return Scope(
        f"policy:{policy.name}/key:{key_id}",
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.parallel,
        label=f"For each key, the policy '{policy.name}'",
    )


def budget_scope(policy: Policy, *, enforced: bool) -> Scope:
    """The policy's monthly budget. One that downgrades counts as well, but refuses nobody."""
    budget = policy.budget
    limit = None if budget is None or (enforced and budget.when_exhausted == "downgrade") else policy.budget_nanousd
    return Scope(f"policy:{policy.name}", budget_nanousd=limit, label=f"The policy '{policy.name}'")
