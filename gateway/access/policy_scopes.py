"""What the limits and the budget of a policy mean for one key."""

from __future__ import annotations

from gateway.access.limits import Scope
from gateway.access.principal import Principal
from policies.load import Policy


def scopes_of(principal: Principal, policy: Policy) -> tuple[Scope, ...]:
    """Everything that a request counts against: its key, project, team and organisation, the policy's ceilings of that
    key, the policy's budget."""
    scopes = *principal.scopes, budget_scope(policy, enforced=True)
    ceilings = ceilings_of(policy, principal.key_id)
    return scopes if ceilings is None else (*scopes, ceilings)


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
