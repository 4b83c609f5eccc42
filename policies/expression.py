"""Conditions of rules: CEL, checked at load, compiled once, and never able to kill a request.

`compile_condition` turns text into a `Condition` or says what is wrong and where; `Condition.holds` evaluates it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from policies import cel, cost, syntax, typecheck
from policies.facts import PROFILE_VARIABLES, VARIABLES
from policies.syntax import Fault

MAX_LENGTH = 2000  # characters; the parser recurses, and a longer condition is not read by anybody

_SYNTAX = re.compile(r"<input>:(\d+):(\d+): (?:Syntax error: )?(.*)")
# Words of other languages that CEL does not have.
_HINTS = (
    (re.compile(r"\band\b"), "CEL writes '&&' for and."),
    (re.compile(r"\bor\b"), "CEL writes '||' for or."),
    (re.compile(r"\bnot\b"), "CEL writes '!' for not."),
    (re.compile(r"(?<![=!<>])=(?!=)"), "compare with '=='."),
)


class InvalidCondition(ValueError):
    """The condition cannot be used; `faults` says why, with offsets into its text."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled condition. `constant` is its value where it does not depend on the request; `steps` is what it can
    cost at most (`cost.py`)."""

    source: str
    variables: frozenset[str]
    constant: bool | None
    steps: int
    _program: cel.Program = field(repr=False)

    @property
    def needs_profile(self) -> bool:
        """Whether it looks at what the task classifier says."""
        return not PROFILE_VARIABLES.isdisjoint(self.variables)

    def holds(self, context: cel.Context) -> bool:
        """Whether the condition is true.

        Raises:
            ConditionError: it failed on this request (a missing element, a division by zero, ...).
        """
        try:
            result: Any = self._program.execute(context)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # The library raises many types, from KeyError to its own, and a panic in it is no Exception; each means
            # that this rule cannot be decided.
            raise ConditionError(f"{type(error).__name__}: {error}") from error
        if not isinstance(result, bool):
            raise ConditionError(f"the result is {result!r}, not true or false")
        return result


class ConditionError(Exception):
    """A condition failed while it was evaluated."""


def compile_condition(source: str) -> Condition:
    """Check and compile a condition.

    Raises:
        InvalidCondition: wrong syntax, unknown names, wrong types, too costly, or a constant expression that fails.
    """
    if len(source) > MAX_LENGTH:
        raise InvalidCondition([Fault(0, f"the condition is longer than {MAX_LENGTH} characters.")])
    try:
        program = cel.compile(source)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what the library's parser panics with is no Exception
        raise InvalidCondition([_syntax_fault(source, str(error))]) from error
    try:
        root = syntax.parse(source)
    except syntax.CannotParse as error:
        raise InvalidCondition([error.fault]) from error
    faults = typecheck.check(root)
    steps, costly = cost.check(root)
    if faults or costly:
        raise InvalidCondition(sorted(faults + costly, key=lambda fault: fault.offset))
    used = frozenset(program.variables()) & VARIABLES.keys()
    condition = Condition(source, used, None, steps, program)
    if used:
        return condition
    try:
        return Condition(source, used, condition.holds(cel.Context()), steps, program)
    except ConditionError as error:
        raise InvalidCondition([Fault(0, f"the condition always fails: {error}.")]) from error


def _syntax_fault(source: str, message: str) -> Fault:
    found = _SYNTAX.search(message)
    if not found:
        return Fault(0, f"not a CEL expression: {message.splitlines()[0]}")
    line, column = int(found[1]), int(found[2])
    offset = sum(len(text) + 1 for text in source.split("\n")[: line - 1]) + column - 1
    detail = found[3].partition(" expecting ")[0].replace("'<EOF>'", "the end")
    bare = re.sub(r"'[^'\n]*'|\"[^\"\n]*\"", "''", source)
    hint = next((f" {text}" for pattern, text in _HINTS if pattern.search(bare)), "")
    return Fault(min(offset, len(source)), f"not a CEL expression: {detail}.{hint}")
