"""Checks a CEL expression before it runs: unknown names, wrong types, values that a variable never has.

The CEL library reports such faults only when a request hits them, and `&&` and `||` may hide them for weeks. What the
checker cannot type it calls `dyn` and lets pass: it refuses nothing that could work.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from policies.facts import MEMBERS, VARIABLES, Variable
from policies.syntax import (
    Call,
    Chain,
    Choice,
    Fault,
    Field,
    Index,
    ListOf,
    Literal,
    Loop,
    MapOf,
    Name,
    Node,
    Prefix,
)

# Result types of the functions and methods that the library has.
FUNCTIONS: Final = {
    "size": "int",
    "int": "int",
    "uint": "uint",
    "double": "double",
    "string": "string",
    "bytes": "bytes",
    "timestamp": "timestamp",
    "duration": "duration",
    "type": "dyn",
    "dyn": "dyn",
    "has": "bool",
    "contains": "bool",
    "startsWith": "bool",
    "endsWith": "bool",
    "matches": "bool",
    "all": "bool",
    "exists": "bool",
    "exists_one": "bool",
    "map": "list",
    "filter": "list",
}
_TEXT_METHODS: Final = frozenset({"contains", "startsWith", "endsWith", "matches"})
_GETTER: Final = re.compile(r"get[A-Z]\w*$")
_NUMBERS: Final = frozenset({"int", "uint", "double"})
_TYPE_NAMES: Final = frozenset({"int", "uint", "double", "string", "bytes", "bool", "list", "map", "null_type"})


@dataclass(frozen=True, slots=True)
class _Typed:
    """What is known of a sub-expression: its type, where it starts, the variable it is, its literal values."""

    type: str
    offset: int
    variable: str | None = None
    literal: str | None = None
    items: tuple[_Typed, ...] = ()


@dataclass
class _Checker:
    variables: Mapping[str, Variable]
    faults: list[Fault] = field(default_factory=list)
    bound: list[str] = field(default_factory=list)

    def fault(self, offset: int, message: str, suggestion: str | None = None) -> None:
        self.faults.append(Fault(offset, message, suggestion))

    def typed(self, node: Node) -> _Typed:
        """What is known of a node; faults inside it are noted."""
        match node:
            case Literal():
                return _Typed(node.type, node.offset, literal=node.text)
            case Name():
                return self.name(node)
            case ListOf():
                return _Typed("list", node.offset, items=tuple([self.typed(item) for item in node.items]))
            case MapOf():
                for pair in node.entries:
                    for part in pair:
                        self.typed(part)
                return _Typed("map", node.offset)
            case Field():
                return self.field(node)
            case Index():
                self.typed(node.target)
                self.typed(node.index)
                return _Typed("dyn", node.offset)
            case Call():
                return self.call(node)
            case Loop():
                return self.loop(node)
            case Prefix():
                operand = self.typed(node.operand)
                if node.mark == "-":
                    return _Typed(operand.type, node.offset)
                self.want_bool(operand, "'!'")
                return _Typed("bool", node.offset)
            case Chain():
                return self.chain(node)
            case Choice():
                self.want_bool(self.typed(node.condition), "'?'")
                first, second = self.typed(node.first), self.typed(node.second)
                return _Typed(first.type if first.type == second.type else "dyn", node.offset)
            case _:
                raise AssertionError(node)

    def chain(self, node: Chain) -> _Typed:
        left = self.typed(node.first)
        for step in node.steps:
            right = self.typed(step.operand)
            if step.mark in ("&&", "||"):
                self.want_bool(left, f"'{step.mark}'")
                self.want_bool(right, f"'{step.mark}'")
                left = _Typed("bool", node.offset)
            elif step.mark in ("+", "-", "*", "/", "%"):
                left = self.arithmetic(step.mark, left, right, step.at)
            else:
                self.compare(step.mark, left, right, step.at)
                left = _Typed("bool", node.offset)
        return left

    # --- names and calls

    def name(self, node: Name) -> _Typed:
        name = node.name
        if name in self.bound or name in _TYPE_NAMES:
            return _Typed("dyn", node.offset)
        if name in self.variables:
            return _Typed(self.variables[name].type, node.offset, variable=name)
        self.fault(node.offset, f"unknown variable '{name}'.", _close(name, self.variables))
        return _Typed("dyn", node.offset)

    def field(self, node: Field) -> _Typed:
        value, name = self.typed(node.target), node.name
        if value.variable in MEMBERS:
            members = MEMBERS[value.variable]
            if name not in members:
                known = ", ".join(f"{value.variable}.{member}" for member in members)
                self.fault(node.at, f"'{value.variable}' has no '{name}'; it has {known}.", _close(name, members))
                return _Typed("dyn", node.offset)
            return _Typed(members[name], node.offset)
        if value.type not in ("dyn", "map"):
            self.fault(node.at, f"a {value.type} has no field '{name}'.")
        return _Typed("dyn", node.offset)

    def loop(self, node: Loop) -> _Typed:
        self.typed(node.target)
        self.bound.append(node.variable)
        inner = [self.typed(part) for part in node.body]
        self.bound.pop()
        if node.name != "map" and inner:
            self.want_bool(inner[-1], f"'{node.name}'")
        return _Typed(FUNCTIONS[node.name], node.offset)

    def call(self, node: Call) -> _Typed:
        name = node.name
        operands = [self.typed(part) for part in ((node.target,) if node.target else ()) + node.arguments]
        if name not in FUNCTIONS and not _GETTER.match(name):
            self.fault(node.at, f"unknown function '{name}'.", _close(name, FUNCTIONS))
        if name in _TEXT_METHODS:
            if len(operands) != 2:
                self.fault(node.at, f"'{name}' is written as TEXT.{name}('...').")
            for operand in operands:
                if operand.type not in ("string", "dyn"):
                    hint = " For a list write: 'x' in LIST." if operand.type == "list" else ""
                    self.fault(operand.offset, f"'{name}' needs text, this is {_a(operand.type)}.{hint}")
        return _Typed(FUNCTIONS.get(name, "dyn"), node.offset)

    # --- types

    def want_bool(self, value: _Typed, where: str) -> None:
        if value.type not in ("bool", "dyn"):
            found = _a(value.type)
            self.fault(value.offset, f"{where} needs true or false, this is {found}; compare it with something.")

    def compare(self, mark: str, left: _Typed, right: _Typed, offset: int) -> None:
        if mark == "in":
            if right.type not in ("list", "map", "dyn"):
                self.fault(right.offset, f"'in' needs a list on its right, this is {_a(right.type)}.")
            for item in right.items:
                self.same_kind(left, item, item.offset, "are never equal")
                self.known_value(left, item)
            return
        self.same_kind(left, right, offset, "are never equal" if mark in ("==", "!=") else "cannot be compared")
        if mark in ("==", "!="):
            self.known_value(left, right)
            self.known_value(right, left)
            return
        for operand in (left, right):
            if operand.type in ("list", "map", "null"):
                self.fault(operand.offset, f"'{mark}' needs an order, and a {operand.type} has none.")

    def same_kind(self, left: _Typed, right: _Typed, offset: int, problem: str) -> None:
        if left.type == right.type or "dyn" in (left.type, right.type) or {left.type, right.type} <= _NUMBERS:
            return
        if "null" in (left.type, right.type):
            self.fault(offset, "variables are never null; text that was not given is '', a number 0.")
            return
        self.fault(offset, f"{left.type} and {right.type} {problem}.")

    def known_value(self, left: _Typed, right: _Typed) -> None:
        """`task == "clasification"` would be false for ever: the values of such variables are known."""
        values = self.variables[left.variable].values if left.variable else ()
        if not values or right.literal is None or right.type != "string":
            return
        text = right.literal.strip("'\"")
        if text not in values:
            close = _close(text, dict.fromkeys(values))
            known = "" if close else f" It is one of {', '.join(values)}."
            self.fault(right.offset, f"'{left.variable}' is never '{text}'.{known}", close)

    def arithmetic(self, mark: str, left: _Typed, right: _Typed, offset: int) -> _Typed:
        if "dyn" in (left.type, right.type):
            return _Typed("dyn", left.offset)
        if left.type != right.type:
            number = {left.type, right.type} == {"int", "double"}
            hint = " Write the whole number with a point (2.0), or double(x)." if number else ""
            self.fault(offset, f"'{mark}' needs two values of one type, these are {left.type} and {right.type}.{hint}")
            return _Typed("dyn", left.offset)
        allowed = _NUMBERS | ({"string", "list", "bytes", "duration"} if mark == "+" else {"duration"})
        if left.type not in allowed:
            self.fault(offset, f"'{mark}' does not work on a {left.type}.")
        return _Typed(left.type, left.offset)


def check(root: Node, variables: Mapping[str, Variable] = VARIABLES) -> list[Fault]:
    """Faults of a condition, in the order of the text; an empty list says that its names and types are right."""
    checker = _Checker(variables)
    try:
        result = checker.typed(root)
    except RecursionError:
        return [Fault(0, "the condition is nested too deeply.")]
    if result.type not in ("bool", "dyn"):
        checker.fault(result.offset, f"a condition must be true or false, this is {_a(result.type)}.")
    return sorted(checker.faults, key=lambda fault: fault.offset)


def _a(type: str) -> str:
    """A type with its article."""
    return f"an {type}" if type.startswith("i") else f"a {type}"


def _close(name: str, known: Mapping[str, object]) -> str | None:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
