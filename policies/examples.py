"""The examples that policies carry, decided and compared with what they expect.

Success is estimated by the shipped table, never by what traffic has taught: an example that passes today passes
tomorrow, until somebody edits the policy or upgrades the program. What is decided is compared, not what is served: a
tier that has no model here is right all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from policies.evaluate import Decision, decide
from policies.facts import Context, Facts, from_chat
from policies.load import Policy, PolicySet, Subject, load
from policies.schema.examples import Example, Expect
from policies.yamlfile import InvalidFile, Problem
from tiers.task import default_classifier


@dataclass(frozen=True, slots=True)
class Result:
    """One example: where it stands, what it expects, what was decided and why. `wrong` is empty where it passes."""

    policy: str
    file: str
    line: int
    column: int
    name: str
    expected: dict[str, str]
    decided: dict[str, str]
    why: str
    wrong: str

    @property
    def passed(self) -> bool:
        return not self.wrong


def run(policies: PolicySet, names: Collection[str] | None = None) -> list[Result]:
    """Decide all examples, or those of the named policies. One whose time is not now is asked as if it were alone."""
    chosen = [policy for policy in policies.written if names is None or policy.name in names]
    now = {(policy.name, policy.version) for policy in policies.policies}
    return [
        result
        for policy in chosen
        for result in run_policy(policy, policies if (policy.name, policy.version) in now else None)
    ]


def run_policy(policy: Policy, among: PolicySet | None = None) -> list[Result]:
    """Decide the examples of one policy. `among`: the policies beside it, one of which may cover the request."""
    placed = zip(policy.document.examples, policy.examples_at, strict=True)
    return [_run(policy, example, place, among) for example, place in placed]


def problems(results: Iterable[Result], policies: Iterable[Policy]) -> list[Problem]:
    """Examples that fail as problems: an error where the policy says that they must pass, else a warning."""
    strict = {policy.name for policy in policies if policy.document.examples_must_pass}
    return [
        Problem(
            result.file,
            result.line,
            result.column,
            f"example '{result.name}' fails: {result.wrong}.",
            "examples",
            severity="error" if result.policy in strict else "warning",
        )
        for result in results
        if not result.passed
    ]


def load_passing(
    directory: Path,
    tiers_served: Collection[str] | None = None,
    models_served: Collection[str] | None = None,
    uncalibrated: Mapping[str, str] | None = None,
) -> PolicySet:
    """As `load`; an example that fails and must pass is an error as well.

    Raises:
        InvalidFile: with every problem.
    """
    found = load(directory, tiers_served, models_served, uncalibrated)
    strict = [policy.name for policy in found.written if policy.document.examples_must_pass]
    failed = problems(run(found, strict), found.written) if strict else []
    if failed:
        raise InvalidFile(failed)
    return found


def _run(policy: Policy, example: Example, place: tuple[int, int], among: PolicySet | None) -> Result:
    expected = {name: str(value) for name, value in example.expect.model_dump().items() if value is not None}
    decided: dict[str, str] = {}
    why = wrong = ""
    try:
        subject = _subject(policy, example)
        decision = decide(policy, _facts(policy, example, subject))
        decided, why = _said(decision), decision.why
        wrong = _elsewhere(policy, subject, among) or _difference(example.expect, decision, why)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # what is no chat request has many forms
        wrong = f"its request cannot be decided: {type(error).__name__}: {error}"
    return Result(policy.name, policy.file, *place, example.name, expected, decided, why, wrong)


def _subject(policy: Policy, example: Example) -> Subject:
    scope = policy.document.applies_to

    def first(given: str | None, listed: tuple[str, ...], otherwise: str = "") -> str:
        return given or (listed[0] if listed else otherwise)

    asked = example.body().get("model")
    return Subject(
        organisation=first(example.organisation, scope.organisations),
        team=first(example.team, scope.teams),
        project=first(example.project, scope.projects),
        key=first(example.key, scope.keys),
        model=first(asked if isinstance(asked, str) else None, scope.models, "auto"),
    )


def _facts(policy: Policy, example: Example, subject: Subject) -> Facts:
    body = {**example.body(), "model": subject.model}
    profile = None
    if policy.needs_profile:
        profile = default_classifier().classify(
            body["messages"],
            tools=bool(body.get("tools")),
            response_format=body.get("response_format"),
            max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        )
    context = Context(
        organisation=subject.organisation,
        team=subject.team,
        project=subject.project,
        key=subject.key,
        tags=example.tags,
        budget_used=example.budget_used,
        pinned_tier=example.pin,
    )
    facts = replace(from_chat(body, context, profile), hour=example.hour, weekday=example.weekday)
    return facts if example.prompt_tokens is None else replace(facts, prompt_tokens=example.prompt_tokens)


def _elsewhere(policy: Policy, subject: Subject, among: PolicySet | None) -> str:
    """That another policy decides such a request. One that is rolled out has its requests from the one it replaces."""
    if policy.document.rollout is not None:
        return ""
    if not policy.matches(subject):
        return "the policy does not apply to it (applies_to)"
    if among is None:
        return ""
    resolved = among.resolve(subject)
    if resolved.name == policy.name or resolved.document.rollout is not None:
        return ""
    return f"policy '{resolved.name}' decides it"


def _said(decision: Decision) -> dict[str, str]:
    said: dict[str, Any] = {"tier": decision.requested_tier, "model": decision.model, "rule": decision.rule}
    said["cache"] = decision.cache.mode
    return {name: str(value) for name, value in said.items() if value is not None}


def _difference(expect: Expect, decision: Decision, why: str) -> str:
    got = _said(decision)
    wanted = {name: value for name, value in expect.model_dump().items() if value is not None}
    wrong = [name for name, value in wanted.items() if got.get(name) != value]
    if not wrong:
        return ""
    parts = [f"expected {name} '{wanted[name]}', got {_got(name, got)}" for name in wrong]
    return f"{'; '.join(parts)}: {why}"


def _got(name: str, got: dict[str, str]) -> str:
    if name in got:
        return f"'{got[name]}'"
    other = "model" if name == "tier" else "tier"
    return f"{other} '{got[other]}'" if other in got else "none"
