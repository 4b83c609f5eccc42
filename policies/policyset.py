"""All policies of a folder as they hold at a moment: which are valid, with which raises, how far each rollout has come.

A set never changes. `at` makes that of another moment or of other standings; `until` says when the next one is due, so
that nothing of this is looked at for a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

import msgspec

from policies.policy import Policy, Subject
from policies.schema.limits import Limits
from policies.yamlfile import Problem

_MOST_RESOLVED: Final = 10_000  # subjects whose policy is remembered, about one per key and model
_BEGINNING: Final = datetime.min.replace(tzinfo=UTC)


class Standing(msgspec.Struct, frozen=True):
    """How far a rollout has come: the step it is at, and whether it was rolled back."""

    step: int = 0
    rolled_back: bool = False


# By name and version of the policy that is rolled out: a changed file begins anew.
Standings = Mapping[tuple[str, str], Standing]


@dataclass(frozen=True, slots=True)
class Trial:
    """A policy that is rolled out, and the percentage that it has now."""

    policy: Policy
    share: float

    @property
    def by_request(self) -> bool:
        rollout = self.policy.document.rollout
        return rollout is not None and rollout.by == "request"

    def takes(self, subject: Subject, request_id: str) -> bool:
        """Whether a request is on the side of the new policy."""
        return self.names(subject) or bucket(self.policy.name, self.unit(subject, request_id)) < self.share

    def names(self, subject: Subject) -> bool:
        """Whether the rollout names the key or its team."""
        rollout = self.policy.document.rollout
        assert rollout is not None
        return subject.key in rollout.keys or subject.team in rollout.teams

    def unit(self, subject: Subject, request_id: str) -> str:
        """What stays on one side."""
        rollout = self.policy.document.rollout
        assert rollout is not None
        if rollout.by == "request":
            return request_id
        return subject.key if rollout.by == "key" else f"{subject.organisation}\0{subject.team}"


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policies in force. `version` is a hash over all files; `warnings` are worth a look and block nothing.

    Attributes:
        policies: in force, rollouts included.
        written: all of the folder, also those whose time is not now.
        made, until: the moment it is of, and when something of it ends by itself; None: never.
        canaries, shadows: rollouts, by the name of the policy that they stand in for.
    """

    policies: tuple[Policy, ...]
    version: str
    warnings: tuple[Problem, ...] = ()
    written: tuple[Policy, ...] = ()
    made: datetime = _BEGINNING
    until: datetime | None = None
    canaries: Mapping[str, Trial] = field(default_factory=dict)
    shadows: Mapping[str, Trial] = field(default_factory=dict)
    _resolved: dict[Subject, tuple[Policy, Trial | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def resolve(self, subject: Subject, request_id: str = "") -> Policy:
        """The policy for a subject: the most specific one that matches, then its rollout. `request_id` decides where a
        rollout goes by requests.

        Raises:
            LookupError: none matches; a loaded folder always has one that applies to everybody.
        """
        found = self._resolved.get(subject)
        if found is None:
            if len(self._resolved) >= _MOST_RESOLVED:
                self._resolved.clear()
            found = self._resolved[subject] = self._resolve(subject)
        policy, open_trial = found
        if open_trial is not None and bucket(open_trial.policy.name, request_id) < open_trial.share:
            return open_trial.policy
        return policy

    def _resolve(self, subject: Subject) -> tuple[Policy, Trial | None]:
        """The policy, and the rollout that each request decides anew."""
        found = [p for p in self.policies if p.document.rollout is None and p.matches(subject)]
        if not found:
            raise LookupError(f"no policy applies to {subject}")
        chosen = max(found, key=Policy.specificity)
        trial = self.canaries.get(chosen.name)
        if trial is None:
            return chosen, None
        if trial.by_request and not trial.names(subject):
            return chosen, trial
        return (trial.policy if trial.takes(subject, "") else chosen), None

    def shadow(self, policy: Policy, subject: Subject, request_id: str) -> Policy | None:
        """The policy that decides a request in silence as well, if there is one."""
        trial = self.shadows.get(policy.name)
        return trial.policy if trial is not None and trial.takes(subject, request_id) else None

    def named(self, name: str) -> Policy:
        """The policy of a name.

        Raises:
            KeyError: there is none.
        """
        for policy in self.policies:
            if policy.name == name:
                return policy
        raise KeyError(name)

    def at(self, now: datetime, standings: Standings | None = None) -> PolicySet:
        """The set of the same folder as it holds at a moment.

        Args:
            standings: of the rollouts; one that is not among them serves nobody yet. None: as the files say, each at
                its first step.
        """
        valid = [policy for policy in self.written if is_valid(policy, now)]
        plain: dict[str, Policy] = {}
        for policy in valid:
            # Of several with one name that have begun, the one that began last has taken over.
            if policy.document.rollout is None:
                other = plain.get(policy.name)
                if other is None or _began(other) < _began(policy):
                    plain[policy.name] = policy
        canaries: dict[str, Trial] = {}
        shadows: dict[str, Trial] = {}
        rolled_out = []
        for policy in valid:
            rollout = policy.document.rollout
            if rollout is None or rollout.instead_of not in plain:
                continue
            scope = plain[rollout.instead_of].document.applies_to
            scoped = replace(policy, document=policy.document.model_copy(update={"applies_to": scope}))
            raised = _raised(scoped, now)
            if rollout.mode == "shadow":
                shadows[rollout.instead_of] = Trial(raised, rollout.share())
            else:
                standing = Standing() if standings is None else standings.get((policy.name, policy.version))
                if standing is None or standing.rolled_back:
                    continue
                canaries[rollout.instead_of] = Trial(raised, rollout.share(standing.step))
            rolled_out.append(raised)
        kept = [policy for policy in valid if plain.get(policy.name) is policy]
        return replace(
            self,
            policies=(*(_raised(policy, now) for policy in kept), *rolled_out),
            made=now,
            until=min((moment for moment in _moments(self.written) if moment > now), default=None),
            canaries=canaries,
            shadows=shadows,
        )


def bucket(policy: str, unit: str) -> float:
    """Where a key, a team or a request falls in a rollout, in [0, 100): the same on every replica and after every
    restart."""
    digest = hashlib.sha256(f"{policy}\0{unit}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * 100


def is_valid(policy: Policy, now: datetime) -> bool:
    """Whether the policy's time is now."""
    document = policy.document
    begun = document.valid_from is None or document.valid_from <= now
    return begun and (document.valid_until is None or now < document.valid_until)


def _began(policy: Policy) -> datetime:
    return policy.document.valid_from or _BEGINNING


def _moments(policies: Iterable[Policy]) -> Iterable[datetime]:
    """When something of these policies begins or ends."""
    for policy in policies:
        document = policy.document
        yield from (moment for moment in (document.valid_from, document.valid_until) if moment is not None)
        yield from (one.until for one in document.raises)


def _raised(policy: Policy, now: datetime) -> Policy:
    """The policy with its limits and budget as they are raised at a moment; of several raises the highest counts."""
    document = policy.document
    active = [one for one in document.raises if now < one.until]
    if not active:
        return policy
    limits = {
        name: max(value for value in values if value is not None)
        for name in Limits.model_fields
        if (values := [getattr(given, name) for given in (document.limits, *(one.limits for one in active))])
        and values[0] is not None
    }
    update: dict[str, object] = {"limits": document.limits.model_copy(update=limits)}
    if document.budget is not None:
        amounts = [one.budget.monthly_usd for one in active if one.budget is not None]
        most = max((document.budget.monthly_usd, *amounts))
        update["budget"] = document.budget.model_copy(update={"monthly_usd": most})
    said = "; ".join(f"{one.reason} (until {one.until:%Y-%m-%d %H:%M:%S} UTC)" for one in active)
    return replace(policy, document=document.model_copy(update=update), raised=said)
