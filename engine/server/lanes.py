"""Where prompts are read, rendered and tokenized: short ones at once, longer ones beside the event loop, a few of them.

    body or text      where                     chat template
    under 4 KiB       the event loop            one process
    under 256 KiB     two threads               the same
    larger            one thread                another

So nobody waits for a text of megabytes but those who send as much. The tokenizer lets other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from engine.text.chat_template import ChatTemplate
from engine.text.renderer import Renderer

_AT_ONCE_BYTES = 4 * 1024
_LONG_BYTES = 256 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class Lane:
    """For texts of one size."""

    def __init__(self, renderer: Renderer, threads: ThreadPoolExecutor | None) -> None:
        """`threads` None: the event loop."""
        self.renderer = renderer
        self._threads = threads

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns or raises."""
        if self._threads is None:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(function, *args, **kwargs))


class Lanes:
    """All of them, with their threads and processes."""

    def __init__(self, template: ChatTemplate) -> None:
        self._renderers = (Renderer(template), Renderer(template))
        self._threads = (
            ThreadPoolExecutor(2, thread_name_prefix="prompts"),
            ThreadPoolExecutor(1, thread_name_prefix="long-prompts"),
        )
        usual, long = self._renderers
        self._short = Lane(usual, None)
        self._medium = Lane(usual, self._threads[0])
        self._long = Lane(long, self._threads[1])

    def of(self, size: int) -> Lane:
        """The lane for `size` bytes or characters."""
        if size < _AT_ONCE_BYTES:
            return self._short
        return self._medium if size < _LONG_BYTES else self._long

    async def start(self) -> None:
        """Have the template ready for the first request.

        Raises:
            ChatTemplateError: it cannot be compiled.
        """
        await self._renderers[0].start()

    async def stop(self) -> None:
        """End the processes; a text that is being tokenized is tokenized to its end."""
        for renderer in self._renderers:
            await renderer.stop()
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
