"""YAML files that are checked with their line numbers: the base of `tierline.yaml` and of the policies.

A file is read into plain data and positions (`yamlread.py`), validated by a pydantic model, and every fault is reported
as `FILE:LINE:COLUMN: message` with a suggestion where a known name is close.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from policies import yamlread
from policies.yamlread import Location

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault in one file. `line` and `column` start at 1."""

    file: str
    line: int
    column: int
    message: str
    path: str = ""
    suggestion: str | None = None
    severity: str = "error"

    def __str__(self) -> str:
        hint = f" Did you mean '{self.suggestion}'?" if self.suggestion else ""
        return one_line(f"{self.file}:{self.line}:{self.column}: {self.message}{hint}")


def one_line(text: str) -> str:
    """The text with line breaks and other control characters written as escapes."""
    return text if text.isprintable() else "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])


class InvalidFile(ValueError):
    """The file cannot be used; `problems` says why, in the order of the file."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Document:
    """Parsed data and, for each path into it, where its key and its value stand: `(line, column)` from 1."""

    file: str
    data: Any
    keys: Mapping[Location, tuple[int, int]]
    values: Mapping[Location, tuple[int, int]]
    lines: tuple[str, ...] = ()

    def position(self, path: Location) -> tuple[int, int]:
        """Where `path` stands, or the nearest parent that exists in the file."""
        for end in range(len(path), -1, -1):
            found = self.keys.get(path[:end]) or self.values.get(path[:end])
            if found:
                return found
        return (1, 1)

    def position_inside(self, path: Location, text: str, offset: int) -> tuple[int, int]:
        """Where the character at `offset` of the scalar `text` at `path` stands in the file.

        Counts the characters that are not blank, from the start of the value: right for plain, quoted, literal and
        folded scalars alike; escapes inside double quotes shift it by their length.
        """
        start = self.values.get(path)
        if start is None or not self.lines:
            return self.position(path)
        wanted = len("".join(text[:offset].split()))
        line, column = start[0] - 1, start[1] - 1
        first = self.lines[line][column : column + 1]
        if first in ("|", ">"):
            line, column = line + 1, 0
        elif first in ("'", '"'):
            column += 1
        while line < len(self.lines):
            for index in range(column, len(self.lines[line])):
                if self.lines[line][index].isspace():
                    continue
                if wanted == 0:
                    return (line + 1, index + 1)
                wanted -= 1
            line, column = line + 1, 0
        return start

    def problem(self, path: Location, message: str, suggestion: str | None = None) -> Problem:
        line, column = self.position(path)
        return Problem(self.file, line, column, message, ".".join(str(p) for p in path), suggestion)


def parse(text: str, file: str) -> Document:
    """Parse YAML text.

    Raises:
        InvalidFile: the text is not YAML, or holds what no configuration needs (`yamlread.py`).
    """
    try:
        tree = yamlread.read(text)
    except yamlread.Unreadable as error:
        raise InvalidFile([Problem(file, *error.position, f"{error.what}.")]) from error
    return Document(file, tree.data, tree.keys, tree.values, tuple(text.split("\n")))


def validate(document: Document, model: type[ModelT]) -> ModelT:
    """Turn a document into its model.

    Raises:
        InvalidFile: one problem per fault, each with its position.
    """
    if not isinstance(document.data, dict):
        raise InvalidFile([document.problem((), "expected a mapping of keys to values.")])
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems = [_problem(document, model, dict(item)) for item in error.errors(include_url=False)]
        # A misspelt key is also a missing key: one report is enough.
        meant = {
            (*_parent(problem.path), problem.suggestion) for problem in problems if "unknown key" in problem.message
        }
        problems = [p for p in problems if (*_parent(p.path), p.path.rpartition(".")[2]) not in meant]
        raise InvalidFile(sorted(problems, key=lambda p: (p.line, p.column))) from error


def load(path: Path, model: type[ModelT]) -> tuple[ModelT, Document]:
    """Read, parse and validate one file.

    Raises:
        InvalidFile: the file is missing, unreadable, not YAML or does not fit the model.
    """
    document = parse(read(path), str(path))
    return validate(document, model), document


def read(path: Path) -> str:
    """The text of a file.

    Raises:
        InvalidFile: the file is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFile([Problem(str(path), 1, 1, f"cannot be read: {error}.")]) from error


# In place of the library's words for Python's types.
_WANTED: Final = {
    "tuple_type": "a list, such as [one, other]",
    "list_type": "a list, such as [one, other]",
    "model_type": "keys with values, such as {key: value}",
    "dict_type": "keys with values, such as {key: value}",
    "string_type": "text, in quotes where it looks like something else",
    "decimal_parsing": "a number",
    "decimal_type": "a number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
}


def _problem(document: Document, model: type[BaseModel], item: dict[str, Any]) -> Problem:
    # A check of the whole that knows which part is at fault names it.
    raw: Location = (*item["loc"], *item.get("ctx", {}).get("path", ()))
    path = _existing(document, raw)
    name = ".".join(str(part) for part in path)
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, path[:-1])
        close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        allowed = "" if close or not known else f" Known keys here: {', '.join(sorted(known))}."
        message = f"unknown key '{path[-1]}'.{_foreign(str(path[-1]))}{allowed}"
        return document.problem(path, message, close[0] if close else None)
    if item["type"] == "missing":
        line, column = document.position(path[:-1])
        return Problem(document.file, line, column, f"'{name}' is missing.", name)
    message = str(item["msg"]).removeprefix("Value error, ").rstrip(".")
    if item["type"] in ("literal_error", "enum"):
        expected = str(item["ctx"]["expected"])
        options = [option.strip("' ") for option in expected.replace(" or ", ",").split(",")]
        close = difflib.get_close_matches(str(item["input"]), options, n=1, cutoff=0.5)
        message = f"'{name}' must be one of {expected}, got {item['input']!r}"
        return document.problem(path, message + ".", close[0] if close else None)
    if wanted := _WANTED.get(item["type"]):
        message = f"it must be {wanted}"
    if wrong := _wrong_length(item):
        message = wrong
    message = message.replace("Input should be", "it must be").replace("String should match", "it must match")
    problem = document.problem(path, f"'{name}': {message}." if name else f"{message}.")
    if item.get("ctx", {}).get("at_value") and (at := document.values.get(path)):
        return replace(problem, line=at[0], column=at[1])
    return problem


def _wrong_length(item: Mapping[str, Any]) -> str | None:
    """What is wrong with the length of a text or a list; None: something else is wrong."""
    kind, ctx = item["type"], item.get("ctx", {})
    if kind not in ("string_too_long", "string_too_short", "too_long", "too_short"):
        return None
    has = f"{len(item['input']):,}"
    if kind.endswith("too_short") and ctx["min_length"] == 1:
        return "it must not be empty"
    one, many = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
    bound = ctx["max_length"] if kind.endswith("long") else ctx["min_length"]
    what = f"{bound:,} {one if bound == 1 else many}"
    return f"it must have at {'most' if kind.endswith('long') else 'least'} {what}, and has {has}"


def _foreign(key: str) -> str:
    """Names the first letter of a key that is none of English: it may look like one."""
    for character in key:
        if not character.isascii():
            named = unicodedata.name(character, "")
            return f" It holds U+{ord(character):04X}{f' ({named})' if named else ''}."
    return ""


def _parent(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")[:-1])


def _existing(document: Document, raw: Location) -> Location:
    """Drop the parts that pydantic adds for unions and aliases, which are not keys of the file."""
    path: list[str | int] = []
    data = document.data
    for i, part in enumerate(raw):
        if part == "[key]":  # the key that was just added is at fault
            break
        last = i == len(raw) - 1
        if isinstance(data, dict) and (part in data or last):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return tuple(path)


def _fields_at(model: type[BaseModel], path: Location) -> list[str]:
    """Names that a mapping at `path` may hold, found by walking the model's annotations."""
    models: list[type[BaseModel]] = [model]
    for part in path:
        found: list[type[BaseModel]] = []
        for candidate in models:
            if isinstance(part, str) and part in candidate.model_fields:
                found += _models_in(candidate.model_fields[part].annotation)
        # A list index or a free mapping key keeps the models that its container holds.
        models = found or models
    return [field for candidate in models for field in candidate.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models_in(arg)]
