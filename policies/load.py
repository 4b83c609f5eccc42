"""From a folder of YAML files to a `PolicySet`: every fault with its position, conditions compiled, conflicts refused.

A set is all or nothing: one bad file and the whole folder is refused, so that what is in force is always a state that
somebody wrote and that was checked. Read next: `evaluate.py`.
"""

from __future__ import annotations

import difflib
import hashlib
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from policies import yamlfile
from policies.advice import left_out, warnings_of
from policies.confidence import without_curve
from policies.conflicts import conflicts
from policies.guards import compile_guards
from policies.leftovers import without_leftovers
from policies.policy import Policy, Subject
from policies.policyset import PolicySet, bucket
from policies.rules import compile_rules
from policies.schema.document import NOT_YET, PolicyDocument
from policies.yamlfile import Document, InvalidFile, Problem

__all__ = ["Policy", "PolicySet", "Subject", "bucket", "files_in", "load", "load_file", "load_files"]

SUFFIXES: Final = (".yaml", ".yml")


def files_in(directory: Path) -> list[Path]:
    """Whatever has the name of a policy file in a folder, by name; hidden ones do not count.

    What is no file after all (`not_a_file`) is among them: whoever gave it that name meant it to be in force.

    Raises:
        InvalidFile: the folder cannot be read.
    """
    try:
        return sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))
    except OSError as error:
        raise InvalidFile([Problem(str(directory), 1, 1, f"the policy folder cannot be read: {error}.")]) from error


def not_a_file(path: Path) -> str | None:
    """What is wrong with something that has the name of a policy file; None: it is one, and may be read.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link to a file that is not there" if path.is_symlink() else "not there any more"
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a device, pipe or socket"


def load(
    directory: Path,
    tiers_served: Collection[str] | None = None,
    models_served: Collection[str] | None = None,
    uncalibrated: Mapping[str, str] | None = None,
) -> PolicySet:
    """Load and check a folder: the set as it holds now, and `PolicySet.at` another time.

    Args:
        directory: folder with `*.yaml` files, one policy each.
        tiers_served: tiers that have a model; None: unknown, nothing is warned about.
        models_served: names of the models; None: unknown, `model:` is not checked.
        uncalibrated: see `confidence.without_curve`; None: unknown, no confidence is checked.

    Raises:
        InvalidFile: with every problem of every file, by file and line.
    """
    paths = files_in(directory)
    if not paths:
        raise InvalidFile([Problem(str(directory), 1, 1, "no policy here: the folder holds no *.yaml file.")])
    return load_files(paths, tiers_served, models_served, uncalibrated)


def load_files(
    paths: Sequence[Path],
    tiers_served: Collection[str] | None = None,
    models_served: Collection[str] | None = None,
    uncalibrated: Mapping[str, str] | None = None,
) -> PolicySet:
    """Load and check files as if they were all of a folder. Arguments and errors as of `load`."""
    problems: list[Problem] = []
    loaded: list[tuple[Policy, Document]] = []
    warnings: list[Problem] = []
    for path in paths:
        try:
            _expect_file(path)
            policy, document, found = load_file(path, tiers_served, models_served, uncalibrated)
        except InvalidFile as error:
            problems += error.problems
            continue
        loaded.append((policy, document))
        warnings += found
    # A file that could not be read may be the very policy that others name, so these are checked on whole sets only.
    if not problems:
        problems += conflicts(loaded)
    if problems:
        raise InvalidFile(problems)
    warnings += left_out(loaded)
    policies = tuple(policy for policy, _ in loaded)
    version = _hash(f"{p.name} {p.version}" for p in policies)
    return PolicySet(policies, version, tuple(warnings), written=policies).at(datetime.now(UTC))


def _expect_file(path: Path) -> None:
    """Look before it is opened: to open a pipe would wait for who writes to it. Raises InvalidFile: it is no file."""
    try:
        found = not_a_file(path)
    except OSError as error:
        raise InvalidFile([Problem(str(path), 1, 1, f"cannot be read: {error}.")]) from error
    if found is not None:
        raise InvalidFile([Problem(str(path), 1, 1, f"no policy: this is {found}. Mend it, or give it another name.")])


def load_file(
    path: Path,
    tiers_served: Collection[str] | None = None,
    models_served: Collection[str] | None = None,
    uncalibrated: Mapping[str, str] | None = None,
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
    rules, faults = compile_rules(document, schema.routes, schema.escalate)
    problems += faults
    guards, faults = compile_guards(document, schema.guardrails)
    problems += faults
    problems += _unknown_models(document, schema, models_served)
    if problems:
        raise InvalidFile(_in_order(problems))
    served = None if tiers_served is None else tuple(tiers_served)
    places = tuple(document.position(("examples", index)) for index in range(len(schema.examples)))
    policy = Policy(schema, str(path), _hash([text]), tuple(rules), served, text, places, guards=guards)
    if uncalibrated and (problems := without_curve(document, policy, uncalibrated)):
        raise InvalidFile(_in_order(problems))
    return policy, document, _in_order(warnings_of(document, policy, leftovers))


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
