"""What an answer consists of: thoughts, text and tool calls, taken from the generated text as it comes.

A parser gets the text in pieces, cut anywhere, and returns parts of the reply. Whole answers and streams go through the
same parsers, and what is ambiguous is held back, so the parts add up to the same reply however the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call begins; its arguments follow. `index` counts the calls of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, JSON that ends where the call does."""

    index: int
    text: str


Part = Thought | Said | Called | Arguments


# Where thoughts are in the generated text, markers included, in characters; the last may still be open (None).
Spans = list[tuple[int, int | None]]


class ReplyParser(Protocol):
    """State of one answer."""

    spans: Spans

    def push(self, text: str) -> list[Part]:
        """The parts that this piece of text completes."""
        ...

    def finish(self, *, cut_off: bool) -> list[Part]:
        """The answer is over: what was held back. `cut_off`: at its limit, so what has begun was to go on."""
        ...


class PlainText:
    """Everything is said."""

    def __init__(self) -> None:
        self.spans: Spans = []

    def push(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self, *, cut_off: bool) -> list[Part]:
        return []


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """A whole answer."""

    thoughts: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Thought(text):
                    self.thoughts += text
                case Said(text):
                    self.text += text
                case Called(_, name):
                    self.calls.append(Call(name))
                case Arguments(index, text):
                    self.calls[index].arguments += text


def cut(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """What comes before the first marker, that marker, and what comes after it.

    Without one: what can be none of them, None, and an end of the text that may become one.
    """
    found = min(((at, -len(m), m) for m in markers if (at := text.find(m)) >= 0), default=None)
    if found is not None:
        at, _, marker = found
        return text[:at], marker, text[at + len(marker) :]
    longest = max((len(m) for m in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(m) > length and m.startswith(text[-length:]) for m in markers):
            return text[:-length], None, text[-length:]
    return text, None, ""
