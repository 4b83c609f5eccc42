"""The asyncio side of checking grammars: whatever a client sends, it is refused in time or known to compile."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from engine.bounded_process import BoundedProcess, Ended, OutOfTime
from engine.grammar.check_process import Checked
from engine.grammar.compiling import GrammarError, Vocabulary
from engine.grammar.lark import Grammar

log = logging.getLogger("engine.grammar")

CPU_SECONDS = 2  # ordinary schemas take milliseconds
_KEPT = 128


class GrammarChecker:
    """One process, started with the first grammar; what was checked lately is not checked again."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, cpu_seconds: int = CPU_SECONDS) -> None:
        """`vocabulary` is called when a process is started, in a thread."""
        self._vocabulary = vocabulary
        self._process = BoundedProcess("engine.grammar.check_process", cpu_seconds, self._greeting, lambda answer: None)
        self._kept: OrderedDict[Grammar, Checked] = OrderedDict()

    async def check(self, grammar: Grammar) -> str:
        """The text that the core is to compile.

        Raises:
            GrammarError: there is none; the message says why.
        """
        checked = self._kept.pop(grammar, None) or await self._ask(grammar)
        self._kept[grammar] = checked
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        if checked.error is not None:
            raise GrammarError(checked.error)
        return checked.text

    async def stop(self) -> None:
        """End the process."""
        await self._process.stop()

    async def _greeting(self) -> Vocabulary:
        return await asyncio.to_thread(self._vocabulary)

    async def _ask(self, grammar: Grammar) -> Checked:
        try:
            return msgspec.msgpack.decode(await self._process.ask(grammar), type=Checked)
        except OutOfTime:
            seconds = self._process.cpu_seconds
            log.warning("the compilation of a grammar was stopped after %d s of processor time", seconds)
            return Checked(error=f"compiling it takes more than {seconds} s of processor time")
        except Ended as end:
            log.error("the compiler of grammars ended with code %s", end.code)
            return Checked(error="compiling it takes too much memory, or fails")
