"""The tree of a condition: the part of CEL that rules use, with the place of everything in the text.

The CEL library has checked the syntax before and evaluates the text itself; the tree is for what must be known before
it runs: `typecheck.py` reads names and types from it, `cost.py` what it can cost. A form that has no place in the tree
is refused, so that nothing runs that was not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

MACROS: Final = frozenset({"all", "exists", "exists_one", "map", "filter"})
_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<string>[bB]?[rR](?:'''[\s\S]*?'''|\"\"\"[\s\S]*?\"\"\"|'[^'\n\r]*'|"[^"\n\r]*")
      |[bB]?(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))
    |(?P<number>0x[0-9a-fA-F]+[uU]?|\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+[uU]?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>&&|\|\||==|!=|<=|>=|[-+*/%<>!?:.,()\[\]{}])""",
    re.VERBOSE,
)
_RELATIONS: Final = frozenset({"<", "<=", ">", ">=", "==", "!=", "in"})


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong at `offset` (characters from the start of the expression)."""

    offset: int
    message: str
    suggestion: str | None = None


class CannotParse(Exception):
    """The text has a form that conditions do not have."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a condition; `offset` is where it starts."""

    offset: int


@dataclass(frozen=True, slots=True)
class Literal(Node):
    """`type` is its CEL type; `text` as it is written, quotes included."""

    type: str
    text: str


@dataclass(frozen=True, slots=True)
class Name(Node):
    name: str


@dataclass(frozen=True, slots=True)
class ListOf(Node):
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MapOf(Node):
    entries: tuple[tuple[Node, Node], ...]


@dataclass(frozen=True, slots=True)
class Field(Node):
    """`target.name`; `at` is where the name stands."""

    target: Node
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Index(Node):
    """`target[index]`."""

    target: Node
    index: Node


@dataclass(frozen=True, slots=True)
class Call(Node):
    """`name(arguments)` or `target.name(arguments)`."""

    name: str
    at: int
    target: Node | None
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop(Node):
    """`target.name(variable, body)`, one of `MACROS`; `map` may have a filter before its last part."""

    name: str
    at: int
    target: Node
    variable: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Prefix(Node):
    """`!operand` or `-operand`."""

    mark: str
    operand: Node


@dataclass(frozen=True, slots=True)
class Step:
    """An operator, where it stands, and its right side."""

    mark: str
    at: int
    operand: Node


@dataclass(frozen=True, slots=True)
class Chain(Node):
    """Operands with operators of one rank between them, from left to right: `a + b - c`. Flat, so that a long
    condition is not a deep one."""

    first: Node
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Choice(Node):
    """`condition ? first : second`."""

    condition: Node
    first: Node
    second: Node


def parse(source: str) -> Node:
    """The tree of a condition.

    Raises:
        CannotParse: it has a form of CEL that conditions do not have, or is nested too deeply.
    """
    parser = _Parser(_tokens(source))
    try:
        root = parser.expression()
    except RecursionError as error:
        raise CannotParse(Fault(0, "the condition is nested too deeply.")) from error
    parser.take("")
    return root


def _tokens(source: str) -> list[tuple[str, str, int]]:
    """Kind, text and offset of each token, and an end."""
    tokens: list[tuple[str, str, int]] = []
    position = 0
    while position < len(source):
        match = _TOKEN.match(source, position)
        if not match:
            raise _unknown_form(position)
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match.group(), position))
        position = match.end()
    tokens.append(("end", "", len(source)))
    return tokens


def _unknown_form(offset: int) -> CannotParse:
    return CannotParse(Fault(offset, "conditions do not have this form of CEL."))


class _Parser:
    """Recursive descent, loosest binding first."""

    def __init__(self, tokens: list[tuple[str, str, int]]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek(self) -> str:
        return self.tokens[self.position][1]

    def take(self, text: str | None = None) -> tuple[str, str, int]:
        token = self.tokens[self.position]
        if (text is not None and token[1] != text) or (text is None and token[0] == "end"):
            raise _unknown_form(token[2])
        self.position += 1
        return token

    def expression(self) -> Node:
        condition = self.disjunction()
        if self.peek() != "?":
            return condition
        self.take("?")
        first = self.disjunction()
        self.take(":")
        return Choice(condition.offset, condition, first, self.expression())

    def disjunction(self) -> Node:
        return self.chain({"||"}, self.conjunction)

    def conjunction(self) -> Node:
        return self.chain({"&&"}, self.relation)

    def relation(self) -> Node:
        return self.chain(_RELATIONS, self.sum)

    def sum(self) -> Node:
        return self.chain({"+", "-"}, self.product)

    def product(self) -> Node:
        return self.chain({"*", "/", "%"}, self.unary)

    def chain(self, marks: set[str] | frozenset[str], operand: Callable[[], Node]) -> Node:
        first = operand()
        steps: list[Step] = []
        while self.peek() in marks:
            _, mark, at = self.take()
            steps.append(Step(mark, at, operand()))
        return Chain(first.offset, first, tuple(steps)) if steps else first

    def unary(self) -> Node:
        if self.peek() in ("!", "-"):
            _, mark, offset = self.take()
            return Prefix(offset, mark, self.unary())
        return self.member()

    def member(self) -> Node:
        value = self.primary()
        while self.peek() in (".", "["):
            if self.take()[1] == "[":
                value = Index(value.offset, value, self.expression())
                self.take("]")
                continue
            kind, name, at = self.take()
            if kind != "name":
                raise _unknown_form(at)
            value = self.call(name, at, value) if self.peek() == "(" else Field(value.offset, value, name, at)
        return value

    def primary(self) -> Node:
        kind, text, offset = self.take()
        if kind == "string":
            return Literal(offset, "bytes" if text[0] in "bB" else "string", text)
        if kind == "number":
            if text[-1] in "uU":
                return Literal(offset, "uint", text)
            return Literal(offset, "int" if text.isdigit() or text.startswith("0x") else "double", text)
        if text == "(":
            inner = self.expression()
            self.take(")")
            return replace(inner, offset=offset)
        if text == "[":
            return ListOf(offset, self.sequence("]"))
        if text == "{":
            return MapOf(offset, self.entries())
        if kind != "name":
            raise _unknown_form(offset)
        if self.peek() == "(":
            return self.call(text, offset, None)
        if text in ("true", "false"):
            return Literal(offset, "bool", text)
        return Literal(offset, "null", text) if text == "null" else Name(offset, text)

    def sequence(self, end: str) -> tuple[Node, ...]:
        found = []
        while self.peek() != end:
            found.append(self.expression())
            if self.peek() != end:
                self.take(",")
        self.take(end)
        return tuple(found)

    def entries(self) -> tuple[tuple[Node, Node], ...]:
        found = []
        while self.peek() != "}":
            key = self.expression()
            self.take(":")
            found.append((key, self.expression()))
            if self.peek() != "}":
                self.take(",")
        self.take("}")
        return tuple(found)

    def call(self, name: str, at: int, target: Node | None) -> Node:
        self.take("(")
        if target is not None and name in MACROS:
            kind, variable, offset = self.take()
            if kind != "name":
                raise _unknown_form(offset)
            self.take(",")
            return Loop(target.offset, name, at, target, variable, self.sequence(")"))
        return Call(at if target is None else target.offset, name, at, target, self.sequence(")"))
