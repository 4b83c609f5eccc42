"""From a folder of YAML files to a `PolicySet`: every fault with its position, conditions compiled, conflicts refused.

A set is all or nothing: one bad file and the whole folder is refused, so that what is in force is always a state that
somebody wrote and that was checked. Read next: `evaluate.py`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from policies import yamlfile
from policies.leftovers import Leftover, without_leftovers
from policies.rules import Rule, compile_rules
from policies.schema.cache import CachePolicy
from policies.schema.document import NOT_YET, PolicyDocument
from policies.schema.limits import Budget, Limits
from policies.schema.routes import AppliesTo
from policies.yamlfile import Document, InvalidFile, Problem
from policies.yamlread import Location
from tiers import TIERS

SUFFIXES: Final = (".yaml", ".yml")
_MOST_RESOLVED: Final = 10_000  # subjects whose policy is remembered, about one per key and model
# The fields of `applies_to`, most specific first, with the field of `Subject` that each one matches.
_SCOPES: Final = (
    ("keys", "key"),
    ("projects", "project"),
    ("teams", "team"),
    ("organisations", "organisation"),
    ("models", "model"),
)


class Subject(msgspec.Struct, frozen=True):
    """Who asks for which model: what policies are chosen by."""

    organisation: str = ""
    team: str = ""
    project: str = ""
    key: str = ""
    model: str = "auto"


@dataclass(frozen=True, slots=True)
class Policy:
    """A checked policy. `version` is a hash of its text; `tiers_served` are the tiers that have a model, or None
    where that is not known (then all count as served: `served`, smallest first). `budget_nanousd` is the monthly
    budget, if there is one."""

    document: PolicyDocument
    file: str
    version: str
    rules: tuple[Rule, ...]
    tiers_served: tuple[str, ...] | None = None
    variables: frozenset[str] = field(init=False)
    served: tuple[str, ...] = field(init=False)
    needs_profile: bool = field(init=False)
    budget_nanousd: int | None = field(init=False)

    def __post_init__(self) -> None:
        budget = self.document.budget
        # Exact: the schema allows nine decimals.
        object.__setattr__(self, "budget_nanousd", None if budget is None else int(budget.monthly_usd * 10**9))
        conditions = [rule.condition for rule in self.rules if rule.condition]
        object.__setattr__(self, "variables", frozenset().union(*(c.variables for c in conditions)))
        served = tuple(tier for tier in TIERS if self.tiers_served is None or tier in self.tiers_served)
        object.__setattr__(self, "served", served)
        auto = any(rule.route.tier == "auto" for rule in self.rules)
        object.__setattr__(self, "needs_profile", auto or any(c.needs_profile for c in conditions))

    @property
    def name(self) -> str:
        return self.document.name

    @property
    def cache(self) -> CachePolicy:
        return self.document.cache

    @property
    def limits(self) -> Limits:
        return self.document.limits

    @property
    def budget(self) -> Budget | None:
        return self.document.budget

    def matches(self, subject: Subject) -> bool:
        """Whether `applies_to` admits the subject."""
        scope = self.document.applies_to
        return all(
            not getattr(scope, plural) or getattr(subject, single) in getattr(scope, plural)
            for plural, single in _SCOPES
        )

    def specificity(self) -> tuple[bool, ...]:
        """Larger is more specific: names keys, projects, teams, organisations, models."""
        return tuple(bool(getattr(self.document.applies_to, plural)) for plural, _ in _SCOPES)


@dataclass(frozen=True, slots=True)
class PolicySet:
    """All policies of a folder. `version` is a hash over all files; `warnings` are worth a look and block nothing."""

    policies: tuple[Policy, ...]
    version: str
    warnings: tuple[Problem, ...] = ()
    _resolved: dict[Subject, Policy] = field(default_factory=dict, init=False, repr=False, compare=False)

    def resolve(self, subject: Subject) -> Policy:
        """The policy for a subject: the most specific one that matches, then its rollout.

        Raises:
            LookupError: none matches; a loaded folder always has one that applies to everybody.
        """
        found = self._resolved.get(subject)
        if found is None:
            if len(self._resolved) >= _MOST_RESOLVED:
                self._resolved.clear()
            found = self._resolved[subject] = self._resolve(subject)
        return found

    def _resolve(self, subject: Subject) -> Policy:
        found = [p for p in self.policies if p.document.rollout is None and p.matches(subject)]
        if not found:
            raise LookupError(f"no policy applies to {subject}")
        chosen = max(found, key=Policy.specificity)
        for candidate in self.policies:
            rollout = candidate.document.rollout
            if rollout and rollout.instead_of == chosen.name and bucket(candidate.name, subject.key) < rollout.percent:
                return candidate
        return chosen

    def named(self, name: str) -> Policy:
        """The policy of a name.

        Raises:
            KeyError: there is none.
        """
        for policy in self.policies:
            if policy.name == name:
                return policy
        raise KeyError(name)


def bucket(policy: str, key: str) -> float:
    """Where a key falls in a rollout, in [0, 100): the same on every replica and after every restart."""
    digest = hashlib.sha256(f"{policy}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * 100


def files_in(directory: Path) -> list[Path]:
    """Policy files of a folder, by name; hidden files and subfolders do not count.

    Raises:
        InvalidFile: the folder cannot be read.
    """
    try:
        return sorted(
            path
            for path in directory.iterdir()
            if path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()
        )
    except OSError as error:
        raise InvalidFile([Problem(str(directory), 1, 1, f"the policy folder cannot be read: {error}.")]) from error


def load(
    directory: Path,
    tiers_served: Collection[str] | None = None,
    models_served: Collection[str] | None = None,
) -> PolicySet:
    """Load and check a folder.

    Args:
        directory: folder with `*.yaml` files, one policy each.
        tiers_served: tiers that have a model; None: unknown, nothing is warned about.
        models_served: names of the models; None: unknown, `model:` is not checked.

    Raises:
        InvalidFile: with every problem of every file, by file and line.
    """
    paths = files_in(directory)
    if not paths:
        raise InvalidFile([Problem(str(directory), 1, 1, "no policy here: the folder holds no *.yaml file.")])
    problems: list[Problem] = []
    loaded: list[tuple[Policy, Document]] = []
    warnings: list[Problem] = []
    for path in paths:
        try:
            policy, document, found = load_file(path, tiers_served, models_served)
        except InvalidFile as error:
            problems += error.problems
            continue
        loaded.append((policy, document))
        warnings += found
    # A file that could not be read may be the very policy that others name, so these are checked on whole sets only.
    if not problems:
        problems += _conflicts(loaded)
    if problems:
        raise InvalidFile(problems)
    policies = tuple(policy for policy, _ in loaded)
    return PolicySet(policies, _hash(f"{p.name} {p.version}" for p in policies), tuple(warnings))


def load_file(
    path: Path,
    tiers_served: Collection[str] | None = None,
    models_served: Collection[str] | None = None,
) -> tuple[Policy, Document, list[Problem]]:
    """Load and check one file: the policy, its positions, and warnings.

    Raises:
        InvalidFile: with every problem of the file.
    """
    if not path.name.isprintable():
        raise InvalidFile([Problem(yamlfile.one_line(str(path)), 1, 1, "a file's name must be readable text.")])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile([Problem(str(path), 1, 1, f"cannot be read as UTF-8 text: {error}.")]) from error
    document = yamlfile.parse(text, str(path))
    problems = _not_yet(document)
    kept = replace(document, data=_without(document.data, NOT_YET)) if problems else document
    try:
        schema = yamlfile.validate(kept, PolicyDocument)
    except InvalidFile as error:
        raise InvalidFile(_in_order(problems + error.problems)) from error
    schema, leftovers = without_leftovers(schema)
    rules, faults = compile_rules(document, schema.routes)
    problems += faults
    problems += _unknown_models(document, schema, models_served)
    if problems:
        raise InvalidFile(_in_order(problems))
    served = None if tiers_served is None else tuple(tiers_served)
    policy = Policy(schema, str(path), _hash([text]), tuple(rules), served)
    return policy, document, _in_order(_warnings(document, policy, leftovers))


def _hash(texts: Iterable[str]) -> str:
    """Twelve hexadecimal digits that change with the texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


def _not_yet(document: Document) -> list[Problem]:
    return [
        document.problem(path, f"'{'.'.join(path)}' is not supported yet: {why}. Remove it.")
        for path, why in NOT_YET.items()
        if path in document.keys
    ]


def _without(data: Any, paths: Iterable[tuple[str, ...]]) -> Any:
    """A copy of the data without these keys: they are reported already."""
    if not isinstance(data, dict):
        return data
    copy = dict(data)
    for head, *rest in paths:
        if rest:
            copy = {k: _without(v, [tuple(rest)]) if k == head else v for k, v in copy.items()}
        else:
            copy.pop(head, None)
    return copy


def _unknown_models(document: Document, schema: PolicyDocument, known: Collection[str] | None) -> list[Problem]:
    if known is None:
        return []
    found = []
    for index, route in enumerate(schema.routes):
        if route.model is not None and route.model not in known:
            close = difflib.get_close_matches(route.model, known, n=1)
            message = f"no model '{route.model}' in tierline.yaml."
            found.append(document.problem(("routes", index, "model"), message, close[0] if close else None))
    return found


def _warnings(document: Document, policy: Policy, leftovers: Sequence[Leftover]) -> list[Problem]:
    found: list[Problem] = []

    def warn(path: Location, message: str) -> None:
        found.append(replace(document.problem(path, message), severity="warning"))

    for place, message in leftovers:
        warn(place, message)
    always: Rule | None = None
    seen: dict[str, Rule] = {}
    for rule in policy.rules:
        path: Location = ("routes", rule.index)
        source = " ".join(rule.route.when.split()) if rule.route.when else ""
        if always is not None:
            warn(path, f"never reached: '{always.name}' (line {always.line}) always matches.")
        elif source and source in seen:
            earlier = seen[source]
            warn(path, f"never reached: '{earlier.name}' (line {earlier.line}) has the same condition.")
        elif rule.condition and rule.condition.constant is False:
            warn((*path, "when"), "the condition is never true.")
        elif rule.condition is None or rule.condition.constant:
            always = rule
        seen.setdefault(source, rule)
    judges = policy.cache.judge_tier
    if policy.tiers_served is not None and judges is not None and judges not in policy.tiers_served:
        warn(("cache", "judge_tier"), f"tier '{judges}' has no model: no answer is judged, and no promise certified.")
    if policy.tiers_served is not None:
        told: set[str] = set()
        for rule in policy.rules:
            tier = rule.route.tier
            if tier and tier != "auto" and tier not in policy.tiers_served and tier not in told:
                told.add(tier)
                warn(("routes", rule.index, "tier"), f"tier '{tier}' has no model: requests for it fall back.")
    return found


def _conflicts(loaded: Sequence[tuple[Policy, Document]]) -> list[Problem]:
    """Names given twice, policies that tie for a subject, rollouts that point nowhere, and a missing catch-all."""
    problems: list[Problem] = []
    by_name: dict[str, Policy] = {}
    plain: list[tuple[Policy, Document]] = []
    replaced: dict[str, str] = {}
    for policy, document in loaded:
        if policy.name in by_name:
            other = Path(by_name[policy.name].file).name
            problems.append(document.problem(("name",), f"the name '{policy.name}' is taken by {other}."))
        by_name.setdefault(policy.name, policy)
    for policy, document in loaded:
        if policy.document.rollout:
            problems += _rollout_problems(policy, document, by_name, replaced)
            continue
        for other_policy, _ in plain:
            if _tie(policy, other_policy):
                where = Path(other_policy.file).name
                problems.append(
                    document.problem(
                        ("applies_to",), f"as specific as '{other_policy.name}' ({where}): who should win?"
                    )
                )
        plain.append((policy, document))
    if not any(policy.document.applies_to == AppliesTo() for policy, _ in plain):
        folder = str(Path(loaded[0][0].file).parent)
        message = "no policy applies to everybody: add one without 'applies_to', for requests that no other covers."
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
    pairs = [(getattr(one.document.applies_to, f), getattr(other.document.applies_to, f)) for f, _ in _SCOPES]
    return all(not a or set(a) & set(b) for a, b in pairs)
