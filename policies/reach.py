"""Which rules can never decide a request: their condition is never true, or the rules before them take all it fits.

Comparisons of a variable with a literal, membership in a list of literals, and true-or-false variables are understood,
with `&&`, `||` and `!` between them; of everything else only that it is the same where it is written the same. What is
not understood counts as perhaps true in the rule that is asked about, and as perhaps false in those before it. So a
rule that is called unreachable is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

from policies import syntax
from policies.facts import MEMBERS, VARIABLES
from policies.regions import EVERYTHING, Box, Cut, Numbers, Region, Values, Words, both, meet, subtract
from policies.rules import Rule
from policies.schema.routes import AppliesTo
from policies.syntax import Chain, Field, ListOf, Literal, Name, Node, Prefix

_MOST_BOXES: Final = 500
_EXACT: Final = 2.0**53  # beyond it not every whole number is a float
_SIMPLE: Final = re.compile(r"'[^'\\\n]*'" + r'|"[^"\\\n]*"')  # a text without escapes
_TRUE: Final = Words(frozenset({"true"}))
_MIRRORED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
_SCOPES: Final = {"organisations": "organisation", "teams": "team", "projects": "project", "keys": "key"}


def _from(low: float, high: float = math.inf) -> Numbers:
    return Numbers.between((low, -1), (high, 1))


# What variables can be at all. Whole numbers are bounded just below the next one, as `_numbers` cuts them.
_WORLD: Final[Box] = {
    **{name: _from(0) for name in ("prompt_tokens", "max_tokens", "messages", "turns", "temperature", "budget.used")},
    "task_confidence": _from(0, 1),
    "complexity": _from(0, 1),
    "hour": Numbers.between((0, -1), (24, -1)),
    "weekday": Numbers.between((1, -1), (8, -1)),
    **{name: Words(frozenset(v.values)) for name, v in VARIABLES.items() if v.values},
    **{name: Words(frozenset({"true", "false"})) for name, v in VARIABLES.items() if v.type == "bool"},
}


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A rule that decides nothing. `by` are the rules before it that take its requests; none: it is never true, and
    `variables` are those that would have to be what they cannot be."""

    rule: Rule
    by: tuple[Rule, ...] = ()
    variables: tuple[str, ...] = ()


def unreachable(rules: Sequence[Rule], applies_to: AppliesTo | None) -> list[Unreachable]:
    """The rules that can be shown never to decide. `applies_to`: whom the policy is for; None: not known."""
    world = both(_WORLD, _scope(applies_to)) or EVERYTHING
    found: list[Unreachable] = []
    earlier: list[tuple[Rule, Region]] = []
    for rule in rules:
        tree = syntax.parse(rule.route.when) if rule.route.when else None
        possible: Region = [EVERYTHING] if tree is None else _region(tree, generous=True)
        open_ = [box for box in (both(world, part) for part in possible) if box is not None]
        if not open_:
            named = {name for part in possible for name in part if not name.endswith(")")}
            named = named or set(rule.condition.variables if rule.condition else ())
            found.append(Unreachable(rule, variables=tuple(sorted(named))))
            continue
        before = _takers(open_, earlier)
        if before is not None:
            found.append(Unreachable(rule, by=before))
            continue
        earlier.append((rule, [EVERYTHING] if tree is None else _region(tree, generous=False)))
    return found


def _takers(region: Region, earlier: Sequence[tuple[Rule, Region]]) -> tuple[Rule, ...] | None:
    """The earlier rules that together take the region; None where something may be left."""
    for rule, taken in earlier:  # one alone says it best
        if subtract(region, taken, _MOST_BOXES) == []:
            return (rule,)
    rest: Region = region
    takers: list[Rule] = []
    for rule, taken in earlier:
        smaller = subtract(rest, taken, _MOST_BOXES)
        if smaller is None:
            return None
        if smaller != rest:
            takers.append(rule)
        rest = smaller
        if not rest:
            return tuple(takers)
    return None


def _scope(applies_to: AppliesTo | None) -> Box:
    if applies_to is None:
        return EVERYTHING
    scope: dict[str, Values] = {
        single: Words(frozenset(getattr(applies_to, plural)))
        for plural, single in _SCOPES.items()
        if getattr(applies_to, plural)
    }
    # A client that names another model gets that one, before any rule.
    scope["model"] = Words(frozenset({"", "auto", *applies_to.models}))
    return scope


def _region(node: Node, *, generous: bool, negated: bool = False) -> Region:
    """The requests for which a condition holds: `generous`, all that it may hold for; else those that it must."""
    if isinstance(node, Prefix) and node.mark == "!":
        return _region(node.operand, generous=generous, negated=not negated)
    if isinstance(node, Chain) and node.steps[0].mark in ("&&", "||"):
        parts = [_region(part, generous=generous, negated=negated) for part in (node.first, *_operands(node))]
        return _all(parts, generous) if (node.steps[0].mark == "&&") != negated else _any(parts, generous)
    atom = _atom(node)
    if atom is not None:
        name, values = atom
        values = values.not_() if negated else values
        return [] if values.empty else [{name: values}]
    if isinstance(node, Literal) and node.type == "bool":
        return [EVERYTHING] if (node.text == "true") != negated else []
    # Not understood: a proposition by its text. It may fail, and then neither it nor its negation holds: so two.
    return [{f"{'!' if negated else ''}{_text(node)}": _TRUE}]


def _operands(node: Chain) -> Iterable[Node]:
    return (step.operand for step in node.steps)


def _any(parts: Iterable[Region], generous: bool) -> Region:
    region = [box for part in parts for box in part]
    return region if len(region) <= _MOST_BOXES else [EVERYTHING] if generous else []


def _all(parts: Iterable[Region], generous: bool) -> Region:
    region: Region = [EVERYTHING]
    for part in parts:
        region = [box for one in region for other in part if (box := both(one, other)) is not None]
        if len(region) > _MOST_BOXES:
            return [EVERYTHING] if generous else []
    return region


def _text(node: Any) -> str:
    """What a part of a condition says, the same wherever it stands."""
    if isinstance(node, tuple):
        return f"({' '.join(map(_text, node))})"
    if not is_dataclass(node):
        return repr(node)
    said = [_text(getattr(node, f.name)) for f in fields(node) if f.name not in ("offset", "at")]
    return f"{type(node).__name__}({' '.join(said)})"


def _atom(node: Node) -> tuple[str, Values] | None:
    """A variable and the values of it for which a comparison holds; None: it is something else."""
    name = _variable(node)
    if name is not None and _type(name) == "bool":
        return name, _TRUE
    if not isinstance(node, Chain) or len(node.steps) != 1:
        return None
    mark, left, right = node.steps[0].mark, node.first, node.steps[0].operand
    if mark == "in":
        name = _variable(left)
        if name is None or not isinstance(right, ListOf):
            return None
        found = [_compared(name, "==", item) for item in right.items]
        return None if not found or None in found else (name, _union([one for one in found if one is not None]))
    if mark not in _MIRRORED:
        return None
    if _variable(left) is None:
        left, right, mark = right, left, _MIRRORED[mark]
    name = _variable(left)
    values = None if name is None else _compared(name, mark, right)
    return None if name is None or values is None else (name, values)


def _union(parts: Sequence[Values]) -> Values:
    """What is in any of them; they are of one kind, as they are values of one variable."""
    kept: Values = parts[0].not_()
    for part in parts[1:]:
        kept = meet(kept, part.not_()) or kept
    return kept.not_()


def _variable(node: Node) -> str | None:
    if isinstance(node, Name):
        return node.name if node.name in VARIABLES else None
    if isinstance(node, Field) and isinstance(node.target, Name) and node.target.name in MEMBERS:
        return f"{node.target.name}.{node.name}"
    return None


def _type(name: str) -> str:
    head, _, member = name.partition(".")
    return MEMBERS[head][member] if member else VARIABLES[head].type


def _compared(name: str, mark: str, node: Node) -> Values | None:
    """The values of a variable for which it compares so with a literal."""
    kind = _type(name)
    if kind in ("int", "double"):
        number = _number(node)
        return None if number is None else _numbers(kind, mark, number)
    if mark not in ("==", "!=") or not isinstance(node, Literal):
        return None
    if kind == "bool" and node.type == "bool":
        words = Words(frozenset({node.text}))
    elif kind == "string" and node.type == "string" and _SIMPLE.fullmatch(node.text):
        words = Words(frozenset({node.text[1:-1]}))
    else:
        return None
    return words if mark == "==" else words.not_()


def _number(node: Node) -> float | None:
    if isinstance(node, Prefix) and node.mark == "-":
        number = _number(node.operand)
        return None if number is None else -number
    if not isinstance(node, Literal) or node.type not in ("int", "double"):
        return None
    number = float(int(node.text, 0) if node.type == "int" else float(node.text))
    return number if abs(number) < _EXACT else None


def _numbers(kind: str, mark: str, number: float) -> Numbers:
    low: Cut
    high: Cut
    low, high = (number, -1), (number, 1)  # just below and just above it
    if kind == "int":  # no whole number lies between one cut and the next that is kept
        low, high = (math.ceil(number), -1), (math.floor(number) + 1, -1)
    exact = Numbers.between(low, high)
    return {
        "<": Numbers.between(high=low),
        "<=": Numbers.between(high=high),
        ">": Numbers.between(low=high),
        ">=": Numbers.between(low=low),
        "==": exact,
        "!=": exact.not_(),
    }[mark]
