"""Compiles grammars that clients send, in a process of its own, before the core sees them.

`checker.py` starts it (`engine/bounded_process.py` says how). A grammar that takes too much time or memory, or crashes
the compiler, ends this process and its own request, and nothing else.
"""

from __future__ import annotations

import sys

import msgspec

from engine.bounded_process import answer_all
from engine.grammar.compiling import Compiler, GrammarError, Vocabulary
from engine.grammar.lark import Grammar


class Checked(msgspec.Struct, array_like=True, frozen=True):
    """The text to compile, or why there is none."""

    text: str = ""
    error: str | None = None


class _Checks:
    """Answers a `Vocabulary` and then grammars."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None

    def __call__(self, payload: bytes) -> Checked:
        if self._compiler is None:
            self._compiler = Compiler(msgspec.msgpack.decode(payload, type=Vocabulary))
            return Checked()
        try:
            text = msgspec.msgpack.decode(payload, type=Grammar).text()
            self._compiler.compile(text)
        except (GrammarError, ValueError) as error:
            return Checked(error=str(error))
        except (MemoryError, RecursionError):
            return Checked(error="it takes too much memory")
        return Checked(text)


if __name__ == "__main__":
    sys.exit(answer_all(sys.argv[1:], _Checks()))
