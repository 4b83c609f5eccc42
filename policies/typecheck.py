"""Checks a CEL expression before it runs: unknown names, wrong types, values that a variable never has.

The CEL library reports such faults only when a request hits them, and `&&` and `||` may hide them for weeks. This
is a parser and type checker for the part of CEL that rules use; the library has checked the syntax before. What it
cannot type it calls `dyn` and lets pass: it refuses nothing that could work.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from policies import cel
from policies.facts import MEMBERS, VARIABLES, Variable

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
_MACROS: Final = frozenset({"all", "exists", "exists_one", "map", "filter"})
_TEXT_METHODS: Final = frozenset({"contains", "startsWith", "endsWith", "matches"})
_GETTER: Final = re.compile(r"get[A-Z]\w*$")
_NUMBERS: Final = frozenset({"int", "uint", "double"})
_TYPE_NAMES: Final = frozenset({"int", "uint", "double", "string", "bytes", "bool", "list", "map", "null_type"})
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<string>[rRbB]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))
    |(?P<number>0x[0-9a-fA-F]+u?|\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+[uU]?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>&&|\|\||==|!=|<=|>=|[-+*/%<>!?:.,()\[\]{}])""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong at `offset` (characters from the start of the expression)."""

    offset: int
    message: str
    suggestion: str | None = None


@dataclass(frozen=True, slots=True)
class _Typed:
    """What is known of a sub-expression: its type, where it starts, the variable it is, its literal values."""

    type: str
    offset: int
    variable: str | None = None
    literal: str | None = None
    items: tuple[_Typed, ...] = ()


class _CannotParse(Exception):
    """A form of CEL that this checker does not know; the whole expression counts as `dyn`."""


@dataclass
class _Checker:
    tokens: list[tuple[str, str, int]]
    variables: Mapping[str, Variable]
    faults: list[Fault] = field(default_factory=list)
    position: int = 0
    bound: list[str] = field(default_factory=list)

    # --- tokens

    def peek(self) -> str:
        return self.tokens[self.position][1]

    def offset(self) -> int:
        return self.tokens[self.position][2]

    def take(self, text: str | None = None) -> tuple[str, str, int]:
        token = self.tokens[self.position]
        if text is not None and token[1] != text:
            raise _CannotParse
        self.position += 1
        return token

    def fault(self, offset: int, message: str, suggestion: str | None = None) -> None:
        self.faults.append(Fault(offset, message, suggestion))

    # --- grammar, loosest binding first

    def expression(self) -> _Typed:
        condition = self.disjunction()
        if self.peek() != "?":
            return condition
        self.take("?")
        self.want_bool(condition, "'?'")
        first = self.disjunction()
        self.take(":")
        second = self.expression()
        return _Typed(first.type if first.type == second.type else "dyn", condition.offset)

    def disjunction(self) -> _Typed:
        return self.logic("||", self.conjunction)

    def conjunction(self) -> _Typed:
        return self.logic("&&", self.relation)

    def logic(self, mark: str, operand: Callable[[], _Typed]) -> _Typed:
        left = operand()
        while self.peek() == mark:
            self.take()
            right = operand()
            self.want_bool(left, f"'{mark}'")
            self.want_bool(right, f"'{mark}'")
            left = _Typed("bool", left.offset)
        return left

    def relation(self) -> _Typed:
        left = self.sum()
        while self.peek() in ("<", "<=", ">", ">=", "==", "!=", "in"):
            _, mark, offset = self.take()
            self.compare(mark, left, self.sum(), offset)
            left = _Typed("bool", left.offset)
        return left

    def sum(self) -> _Typed:
        left = self.product()
        while self.peek() in ("+", "-"):
            _, mark, offset = self.take()
            left = self.arithmetic(mark, left, self.product(), offset)
        return left

    def product(self) -> _Typed:
        left = self.unary()
        while self.peek() in ("*", "/", "%"):
            _, mark, offset = self.take()
            left = self.arithmetic(mark, left, self.unary(), offset)
        return left

    def unary(self) -> _Typed:
        if self.peek() == "!":
            offset = self.take()[2]
            self.want_bool(self.unary(), "'!'")
            return _Typed("bool", offset)
        if self.peek() == "-":
            offset = self.take()[2]
            return _Typed(self.unary().type, offset)
        return self.member()

    def member(self) -> _Typed:
        value = self.primary()
        while self.peek() in (".", "["):
            if self.take()[1] == "[":
                self.expression()
                self.take("]")
                value = _Typed("dyn", value.offset)
                continue
            kind, name, offset = self.take()
            if kind != "name":
                raise _CannotParse
            value = self.call(name, offset, value) if self.peek() == "(" else self.field(value, name, offset)
        return value

    def primary(self) -> _Typed:
        kind, text, offset = self.take()
        if kind == "string":
            return _Typed("bytes" if "b" in text[:2].lower().split(text[-1])[0] else "string", offset, literal=text)
        if kind == "number":
            if text[-1] in "uU":
                return _Typed("uint", offset, literal=text)
            return _Typed("int" if text.isdigit() or text.startswith("0x") else "double", offset, literal=text)
        if text == "(":
            inner = self.expression()
            self.take(")")
            return _Typed(inner.type, offset, inner.variable, inner.literal, inner.items)
        if text == "[":
            return _Typed("list", offset, items=tuple(self.sequence("]")))
        if text == "{":
            while self.peek() != "}":
                self.expression()
                self.take(":")
                self.expression()
                if self.peek() == ",":
                    self.take()
            self.take("}")
            return _Typed("map", offset)
        if kind != "name":
            raise _CannotParse
        if self.peek() == "(":
            return self.call(text, offset, None)
        return self.name(text, offset)

    def sequence(self, end: str) -> list[_Typed]:
        found = []
        while self.peek() != end:
            found.append(self.expression())
            if self.peek() == ",":
                self.take()
        self.take(end)
        return found

    # --- names and calls

    def name(self, name: str, offset: int) -> _Typed:
        if name in ("true", "false"):
            return _Typed("bool", offset, literal=name)
        if name == "null":
            return _Typed("null", offset, literal=name)
        if name in self.bound or name in _TYPE_NAMES:
            return _Typed("dyn", offset)
        if name in self.variables:
            return _Typed(self.variables[name].type, offset, variable=name)
        self.fault(offset, f"unknown variable '{name}'.", _close(name, self.variables))
        return _Typed("dyn", offset)

    def field(self, value: _Typed, name: str, offset: int) -> _Typed:
        if value.variable in MEMBERS:
            members = MEMBERS[value.variable]
            if name not in members:
                known = ", ".join(f"{value.variable}.{member}" for member in members)
                self.fault(offset, f"'{value.variable}' has no '{name}'; it has {known}.", _close(name, members))
                return _Typed("dyn", value.offset)
            return _Typed(members[name], value.offset)
        if value.type not in ("dyn", "map"):
            self.fault(offset, f"a {value.type} has no field '{name}'.")
        return _Typed("dyn", value.offset)

    def call(self, name: str, offset: int, target: _Typed | None) -> _Typed:
        if name not in FUNCTIONS and not _GETTER.match(name):
            self.fault(offset, f"unknown function '{name}'.", _close(name, FUNCTIONS))
        self.take("(")
        if target is not None and name in _MACROS and self.tokens[self.position][0] == "name":
            self.bound.append(self.take()[1])
            self.take(",")
            inner = self.sequence(")")
            self.bound.pop()
            if name not in ("map",) and inner:
                self.want_bool(inner[-1], f"'{name}'")
            return _Typed(FUNCTIONS[name], target.offset)
        arguments = self.sequence(")")
        start = target.offset if target else offset
        if name in _TEXT_METHODS:
            operands = [target, *arguments] if target else arguments
            if len(operands) != 2:
                self.fault(offset, f"'{name}' is written as TEXT.{name}('...').")
            for operand in operands:
                if operand is not None and operand.type not in ("string", "dyn"):
                    hint = " For a list write: 'x' in LIST." if operand.type == "list" else ""
                    self.fault(operand.offset, f"'{name}' needs text, this is a {operand.type}.{hint}")
            if name == "matches" and operands:
                self.regular_expression(operands[-1])
        return _Typed(FUNCTIONS.get(name, "dyn"), start)

    def regular_expression(self, pattern: _Typed) -> None:
        """A pattern written out must be one that the library can compile."""
        if pattern.literal is None or pattern.type != "string":
            return
        try:
            cel.evaluate(f"''.matches({pattern.literal})")
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("error: ")[2].partition(". Check")[0].strip().splitlines()
            detail = reason[-1].removeprefix("error: ") if reason else str(error)
            self.fault(pattern.offset, f"not a regular expression: {detail}.")

    # --- types

    def want_bool(self, value: _Typed, where: str) -> None:
        if value.type not in ("bool", "dyn"):
            self.fault(value.offset, f"{where} needs true or false, this is a {value.type}; compare it with something.")

    def compare(self, mark: str, left: _Typed, right: _Typed, offset: int) -> None:
        if mark == "in":
            if right.type not in ("list", "map", "dyn"):
                self.fault(right.offset, f"'in' needs a list on its right, this is a {right.type}.")
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


def check(source: str, variables: Mapping[str, Variable] = VARIABLES) -> list[Fault]:
    """Faults of a condition, in the order of the text; an empty list says that its names and types are right."""
    tokens: list[tuple[str, str, int]] = []
    position = 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if not match:
            return []
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match.group(), position))
        position = match.end()
    tokens.append(("end", "", len(source)))
    checker = _Checker(tokens, variables)
    try:
        result = checker.expression()
        checker.take("")
    except RecursionError:
        return [Fault(0, "the condition is nested too deeply.")]
    except (_CannotParse, IndexError):
        return sorted(checker.faults, key=lambda fault: fault.offset)
    if result.type not in ("bool", "dyn"):
        checker.fault(result.offset, f"a condition must be true or false, this is a {result.type}.")
    return sorted(checker.faults, key=lambda fault: fault.offset)


def _close(name: str, known: Mapping[str, object]) -> str | None:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
