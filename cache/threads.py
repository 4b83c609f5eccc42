"""Slow work beside the event loop, in threads that never hold up the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")


async def in_daemon_thread(work: Callable[[], _Result]) -> _Result:
    """The result of work in a thread of its own. The loop's own threads would be waited for at the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        if not future.done():
            settle()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # handed to whoever awaits
            settle = partial(future.set_exception, error)
        else:
            settle = partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
            loop.call_soon_threadsafe(finish, settle)

    threading.Thread(target=run, daemon=True).start()
    return await future
