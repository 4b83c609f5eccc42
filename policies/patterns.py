"""Regular expressions of conditions: whether the library can compile one, and what that and a search can cost.

The library compiles a pattern whenever it evaluates it. A search takes time in proportion to the text, and in the
worst case to the size of the pattern as well; what is small on paper (`\\w{50}`) may be large once its repetitions are
written out. Read next: `cost.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from policies import cel

# In steps (`cost.py`), measured: what one character, class or operator adds to the compilation of a pattern.
_BASE: Final = 20.0
_LITERAL: Final = 10.0
_LITERAL_ANY_CASE: Final = 60.0
_OPERATOR: Final = 20.0
_ASCII_CLASS: Final = 60.0
_SMALL_CLASS: Final = 400.0  # \d, \s
_LARGE_CLASS: Final = 3_000.0  # \w and \p{...}: hundreds of ranges of Unicode
_ANY_CASE: Final = 3.0  # of a class whose ranges go beyond ASCII
# Of one text character: what is always spent, and for each state of the pattern. Most patterns need less; one with `\b`
# in a text beyond ASCII, without words by which the library could skip through it, up to twenty times as much.
_SEARCH: Final = 0.05
_SEARCH_STATE: Final = 0.002

_COUNT: Final = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}[?+]?")
_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]*)(?:-[a-zA-Z]*)?[:)]")
_GROUP: Final = re.compile(r"\((?:\?(?:P?<[^>]*>|[a-zA-Z-]*:?))?")
_ESCAPE: Final = re.compile(r"\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|b\{[^}]*\}|[\s\S])")


@dataclass(frozen=True, slots=True)
class Size:
    """Of a pattern: `compile_steps` per evaluation, and how many `states` a search may have to follow at once."""

    compile_steps: float = 0.0
    states: float = 0.0

    def __add__(self, other: Size) -> Size:
        return Size(self.compile_steps + other.compile_steps, self.states + other.states)

    def times(self, count: int) -> Size:
        return Size(self.compile_steps * count, self.states * count)

    def search_steps(self, characters: float) -> float:
        """Of a search in a text of this length, without the compilation."""
        return characters * (_SEARCH + _SEARCH_STATE * self.states)


def fault(literal: str) -> str | None:
    """Why the library cannot compile a pattern, given as it is written in the condition; None where it can."""
    try:
        cel.evaluate(f"''.matches({literal})")
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("error: ")[2].partition(". Check")[0].strip().splitlines()
        return reason[-1].removeprefix("error: ") if reason else str(error)
    return None


def value(literal: str) -> str:
    """The text of a CEL string literal."""
    return str(cel.evaluate(literal))


def verbose(pattern: str) -> bool:
    """Whether it turns on the flag `x`, with which blanks and comments count for nothing."""
    return any("x" in flags[1] for flags in _FLAGS.finditer(pattern))


def size(pattern: str) -> Size:
    """An upper bound of a pattern's size with all repetitions written out. `verbose` patterns are not read right."""
    any_case = any("i" in flags[1] for flags in _FLAGS.finditer(pattern))
    groups: list[Size] = [Size(_BASE)]  # what has been read of each group that is open, the whole pattern first
    atom = Size()  # what a repetition would repeat; not in `groups` yet
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "(":
            groups[-1] += atom
            groups.append(Size(_OPERATOR, 1))
            atom = Size()
            position = _GROUP.match(pattern, position).end()  # type: ignore[union-attr]  # it matches any '('
        elif character == ")" and len(groups) > 1:
            atom = groups.pop() + atom
            position += 1
        elif character in "|*+?":
            groups[-1] += atom + Size(_OPERATOR, 1)
            atom = Size()
            position += 1
        elif character == "{" and (count := _COUNT.match(pattern, position)):
            low, comma, high = int(count[1] or 0), bool(count[2]), int(count[3] or 0)
            atom = atom.times(max(low + (1 if comma and not count[3] else 0), high, 1)) + Size(_OPERATOR, 1)
            position = count.end()
        elif character == "[" and (end := _end_of_class(pattern, position)):
            groups[-1] += atom
            atom = _class(pattern[position:end], any_case)
            position = end
        elif character == "\\" and (escape := _ESCAPE.match(pattern, position)):
            groups[-1] += atom
            atom = _escape(escape.group(), any_case)
            position = escape.end()
        else:
            groups[-1] += atom
            letter = (_LITERAL_ANY_CASE if any_case else _LITERAL) * len(character.encode())
            atom = Size(_ASCII_CLASS, 4) if character == "." else Size(letter, 1)
            position += 1
    return sum(groups, atom)


def _end_of_class(pattern: str, start: int) -> int | None:
    """Where the class that opens at `start` ends; classes may stand in each other. None where it never does."""
    depth, position = 0, start
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 2
            continue
        if character == "[":
            depth += 1
            # A bracket that closes is an ordinary character where it comes first.
            if first := re.compile(r"\^?\]").match(pattern, position + 1):
                position = first.end()
                continue
        elif character == "]":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return None


def _class(text: str, any_case: bool) -> Size:
    """A class in brackets: its parts, and its ranges where they go beyond ASCII."""
    total = Size(_ASCII_CLASS, 4)
    for escape in _ESCAPE.finditer(text):
        total += _escape(escape.group(), any_case)
    if not text.isascii() or re.search(r"\\[xuU]|\\\\", text) or text.startswith("[^"):
        # Negated, everything beyond ASCII belongs to it.
        ranges = text.count("-") + text.count("[^")
        total += Size(ranges * _SMALL_CLASS * (_ANY_CASE**2 if any_case else 1), ranges)
    return total


def _escape(text: str, any_case: bool) -> Size:
    kind = text[1]
    if kind in "wWpP":
        return Size(_LARGE_CLASS * (1 if kind in "wW" or not any_case else _ANY_CASE), 4)
    if kind in "dDsS":
        return Size(_SMALL_CLASS, 4)
    return Size(_LITERAL * 4, 1)
