"""Whether the core's loop turns: by an echo that passes through it, for a process that merely lives is no proof."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from engine.messages import Ping, Pong
from engine.text.answer import EngineDown


@dataclass(frozen=True, slots=True)
class Health:
    """`state`: ok, starting, restarting, reloading, stalled or stopped."""

    state: str
    last_step_age_seconds: float | None = None
    detail: str | None = None


class Pulse:
    """The echoes that are under way. `send`: to the core, if there is one."""

    def __init__(self, send: Callable[[Ping], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Pong]] = {}

    async def take(self, timeout_seconds: float) -> Pong:
        """One echo.

        Raises:
            TimeoutError: none came in time; a step that takes longer reads the same.
            EngineDown: the core was lost meanwhile.
        """
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(Ping(number))
        try:
            return await asyncio.wait_for(future, timeout_seconds)
        finally:
            self._waiting.pop(number, None)

    async def health(self, timeout_seconds: float) -> Health:
        """What an echo says of a core that has reported to be ready."""
        try:
            pong = await self.take(timeout_seconds)
        except TimeoutError:
            return Health("stalled", detail=f"the loop did not answer within {timeout_seconds:.0f} s")
        except EngineDown as error:
            return Health("restarting", detail=str(error))
        return Health("ok", pong.last_step_age_seconds)

    def receive(self, pong: Pong) -> None:
        future = self._waiting.get(pong.number)
        if future is not None and not future.done():
            future.set_result(pong)

    def lose(self, reason: str) -> None:
        """The core is gone: nobody answers."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDown(reason))
        self._waiting.clear()
