"""What a condition can cost at most, said before it runs.

A condition is evaluated for each request, in the process that serves all the others, and nothing can interrupt it. So
its cost is bounded from its text: every list that it walks through has a greatest length, every text a greatest size,
and lists inside lists multiply. The unit is the step, about 0.1 µs: one variable, value or operator. The weights are
measured, and rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from policies import patterns
from policies.facts import LONGEST_TAG, LONGEST_TEXT, MOST_TAGS, TEXT_VARIABLES, VARIABLES
from policies.syntax import Call, Chain, Choice, Fault, Field, Index, ListOf, Literal, Loop, MapOf, Name, Node, Prefix

MAX_STEPS: Final = 50_000  # of one condition: about 5 ms
MAX_POLICY_STEPS: Final = 200_000  # of all conditions of a policy, for the request that none of them fits

_CHARACTER: Final = 0.01  # steps to copy, compare or search a character
_COPY: Final = 2.0  # steps to copy an element of a list
_ROUND: Final = 3.0  # steps of a round of a loop, without its body
_NAME_CHARACTERS: Final = 256.0  # of a name: of a team, a model, ...
_NUMBER_CHARACTERS: Final = 64.0  # of a number or a time that is made text
_STEP_S: Final = 1e-7
_MANY: Final = 10**12  # beyond it, how many it is makes no difference

_Walked = TypeVar("_Walked", Chain, Loop, Call)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The largest value a part can have: elements at its top, elements in all with those inside them, characters in
    all, and its largest element where that is known."""

    items: float = 0.0
    elements: float = 1.0
    characters: float = 0.0
    each: _Bound | None = None

    def element(self) -> _Bound:
        """Any element: at worst it is nearly all of the value."""
        return self.each or _Bound(self.elements, self.elements, self.characters)

    def copied(self) -> float:
        """Steps to copy it."""
        return self.elements * _COPY + self.characters * _CHARACTER

    def read(self) -> float:
        """Steps to look at all of it."""
        return self.elements + self.characters * _CHARACTER


_SCALAR: Final = _Bound()


def _text(characters: float) -> _Bound:
    return _Bound(characters=characters)


def _list(items: float, each: _Bound) -> _Bound:
    return _Bound(items, 1 + items * each.elements, items * each.characters, each)


def _largest(bounds: Iterable[_Bound]) -> _Bound:
    """A value that is one of these."""
    found = list(bounds)
    if not found:
        return _SCALAR
    inside = [bound.each for bound in found if bound.items]
    known = [each for each in inside if each is not None]
    return _Bound(
        max(bound.items for bound in found),
        max(bound.elements for bound in found),
        max(bound.characters for bound in found),
        _largest(known) if known and len(known) == len(inside) else None,
    )


def _variable(name: str) -> _Bound:
    kind = VARIABLES[name].type
    if kind == "list":
        return _list(MOST_TAGS, _text(LONGEST_TAG))
    if kind == "map":
        return _list(1, _SCALAR)
    if kind != "string":
        return _SCALAR
    return _text(LONGEST_TEXT if name in TEXT_VARIABLES else _NAME_CHARACTERS)


_VARIABLES: Final[Mapping[str, _Bound]] = {name: _variable(name) for name in VARIABLES}


@dataclass
class _Estimate:
    """Adds up `steps` while it walks; `parts` are those that may be costly, with what each is in all."""

    steps: float = 0.0
    parts: list[tuple[float, int]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    patterns: list[Literal] = field(default_factory=list)
    bound: list[tuple[str, _Bound]] = field(default_factory=list)

    def value(self, node: Node) -> _Bound:
        """The largest value of a node; its steps are added."""
        self.steps += 1
        match node:
            case Literal():
                return _text(len(node.text)) if node.type in ("string", "bytes") else _SCALAR
            case Name():
                found = next((bound for name, bound in reversed(self.bound) if name == node.name), None)
                return found or _VARIABLES.get(node.name, _SCALAR)
            case ListOf():
                return self.collection(node.items)
            case MapOf():
                return self.collection([part for pair in node.entries for part in pair])
            case Field():
                return self.element(node.target)
            case Index():
                self.value(node.index)
                return self.element(node.target)
            case Prefix():
                self.value(node.operand)
                return _SCALAR
            case Choice():
                self.value(node.condition)
                return _largest([self.value(node.first), self.value(node.second)])
            case Chain():
                return self.part(node.steps[0].at, self.chain, node)
            case Loop():
                return self.part(node.at, self.loop, node)
            case Call():
                return self.part(node.at, self.call, node)
            case _:
                raise AssertionError(node)

    def part(self, at: int, walk: Callable[[_Walked], _Bound], node: _Walked) -> _Bound:
        """Walk a node that may be costly, and note what it cost in all."""
        before = self.steps
        found = walk(node)
        self.parts.append((self.steps - before, at))
        return found

    def collection(self, items: Sequence[Node]) -> _Bound:
        found = [self.value(item) for item in items]
        elements, characters = sum(b.elements for b in found), sum(b.characters for b in found)
        whole = _Bound(len(found), 1 + elements, characters, _largest(found))
        self.steps += whole.read()
        return whole

    def element(self, target: Node) -> _Bound:
        found = self.value(target).element()
        self.steps += found.characters * _CHARACTER
        return found

    def chain(self, node: Chain) -> _Bound:
        left = self.value(node.first)
        for step in node.steps:
            right = self.value(step.operand)
            self.steps += 1
            if step.mark == "+":
                lists = left.items + right.items
                left = _Bound(
                    lists,
                    left.elements + right.elements if lists else 1.0,
                    left.characters + right.characters,
                    _largest([left.element(), right.element()]) if lists else None,
                )
                self.steps += left.copied()
            else:
                if step.mark not in ("&&", "||"):
                    self.steps += left.read() + right.read()
                left = _SCALAR
        return left

    def loop(self, node: Loop) -> _Bound:
        target = self.value(node.target)
        before = self.steps
        self.bound.append((node.variable, target.element()))
        body = [self.value(part) for part in node.body]
        self.bound.pop()
        self.steps = before + max(target.items, 1) * (self.steps - before + _ROUND)
        if node.name not in ("map", "filter"):
            return _SCALAR
        result = target if node.name == "filter" or not body else _list(target.items, body[-1])
        # The list so far is copied whenever an element is added: half of the whole in each round.
        self.steps += target.items * result.copied() / 2
        return result

    def call(self, node: Call) -> _Bound:
        operands = [self.value(part) for part in ((node.target,) if node.target else ()) + node.arguments]
        characters = sum(operand.characters for operand in operands)
        if node.name == "matches" and node.arguments:
            self.search(node.arguments[-1], characters)
        else:
            self.steps += sum(operand.read() for operand in operands)
        if node.name == "dyn":
            return _largest(operands)
        return _text(characters + _NUMBER_CHARACTERS) if node.name in ("string", "bytes") else _SCALAR

    def search(self, pattern: Node, characters: float) -> None:
        if not isinstance(pattern, Literal) or pattern.type != "string":
            text = "'matches' needs a pattern that is written out: what another one would cost is not known."
            self.faults.append(Fault(pattern.offset, text))
            return
        text = patterns.value(pattern.text)
        if patterns.verbose(text):
            self.faults.append(Fault(pattern.offset, "the flag 'x' of regular expressions is not supported."))
            return
        size = patterns.size(text)
        self.steps += size.compile_steps + size.search_steps(characters)
        self.patterns.append(pattern)


def check(root: Node) -> tuple[int, list[Fault]]:
    """The steps that a condition can take at most, and why it cannot be used: too many of them, or a pattern that
    cannot be compiled. Patterns are compiled only where that is known to be cheap."""
    estimate = _Estimate()
    try:
        estimate.value(root)
    except RecursionError:
        return 0, [Fault(0, "the condition is nested too deeply.")]
    steps = math.ceil(min(estimate.steps, _MANY))
    if estimate.faults:
        return steps, estimate.faults
    if steps > MAX_STEPS:
        # The innermost part that is most of it: of loops in each other the outer one, which multiplies.
        _, at = min((part for part in estimate.parts if part[0] > estimate.steps / 2), default=(0.0, root.offset))
        return steps, [Fault(at, f"too costly: {in_words(steps)}; at most {MAX_STEPS:,} are allowed.")]
    faults = [(pattern.offset, patterns.fault(pattern.text)) for pattern in estimate.patterns]
    return steps, [Fault(at, f"not a regular expression: {reason}.") for at, reason in faults if reason]


def in_words(steps: int) -> str:
    """`2,000,000 steps, about 0.2 s for each request`."""
    if steps >= _MANY:
        return f"more than {steps:,} steps for each request"
    seconds = steps * _STEP_S
    time = f"{seconds:,.1f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
    return f"up to {steps:,} steps, about {time}, for each request"
