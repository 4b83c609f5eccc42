"""What `tierline.yaml` says of things outside it: the folder of the policies, the embedding model, and variables that
somebody hoped would be put in. Found when the file is read, not when a process fails over it later.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.embedding.folder import BUNDLED
from policies.yamlfile import Document, InvalidFile, Problem
from policies.yamlread import Location

if TYPE_CHECKING:
    from gateway.settings.platform_file import Settings

_VARIABLE = re.compile(r"\$\{[^{}]*\}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADVICE = (
    "environment variables are not put into this file: write the value. Keys come from the environment by the name of "
    "their variable, as in api_key_env"
)


def unexpanded(document: Document) -> list[Problem]:
    """Every `${...}` in a key or value."""
    return [
        document.problem(path, f"'{found[0]}' stands for itself: {_ADVICE}.")
        for path, text in _texts(document.data, ())
        if (found := _VARIABLE.search(text))
    ]


def with_hint(error: InvalidFile, lines: list[str]) -> InvalidFile:
    """The same, and what is meant where `${...}` is what is no YAML: `{host: ${HOST}}`."""

    def hinted(problem: Problem) -> Problem:
        near = lines[problem.line - 1] if problem.line <= len(lines) else ""
        return replace(problem, message=f"{problem.message} By the way: {_ADVICE}.") if "${" in near else problem

    return InvalidFile([hinted(problem) for problem in error.problems])


def missing(settings: Settings, document: Document, root: Path) -> Iterator[Problem]:
    """What the file names and is not there. Paths are relative to `root`; a folder of policies that the file does not
    name is looked for when it is needed."""
    policies = root / settings.policies_dir
    if ("policies_dir",) in document.keys and not policies.is_dir():
        text = f"policies_dir: {policies} is {'no folder' if policies.exists() else 'not there'}."
        yield document.problem(("policies_dir",), text, _near(policies.name, _folders(policies.parent)))
    name = settings.cache.embedder
    if settings.cache.enabled and not (name in BUNDLED or _is_there(root, name) or _HUB_NAME.fullmatch(name)):
        text = (
            f"cache.embedder: '{name}' is neither a bundled model ({', '.join(BUNDLED)}) nor a folder, nor a name of "
            "the Hugging Face hub (ORGANISATION/NAME)."
        )
        yield document.problem(("cache", "embedder"), text, _near(name, BUNDLED))


def embedder(settings: Settings, root: Path) -> str:
    """The embedding model, absolute where it is a folder beside the file."""
    name = settings.cache.embedder
    return str(root / name) if name not in BUNDLED and (root / name).is_dir() else name


def _is_there(root: Path, name: str) -> bool:
    # A folder may also be named from where the program was started, which the cache process does.
    return bool(name) and ((root / name).is_dir() or Path(name).is_dir())


def _folders(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []


def _near(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, whatever its case."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def _texts(data: Any, path: Location) -> Iterator[tuple[Location, str]]:
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key), str(key)
            yield from _texts(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _texts(value, (*path, index))
