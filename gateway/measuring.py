"""How long a prompt is, found out without holding up other requests.

What is far too long for every model is refused by its characters alone. What is large, and may fit, is read in a thread
of its own, one prompt at a time: the work is done in slices, between which the event loop goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from gateway.dialects.dialect import Asked
from gateway.dialects.errors import BadRequest
from gateway.life import Life
from gateway.settings import Settings
from tiers.features import MOST_CHARS_PER_TOKEN, chars_of

LARGE_BYTES: Final = 256 * 1024
# The estimate is rough: only what is this many times as long as the longest context is refused by it.
FAR_TOO_LONG: Final = 2
_Result = TypeVar("_Result")


def is_large(life: Life) -> bool:
    """Whether reading the prompt takes more than a millisecond or two."""
    return life.room is not None and life.room.held_bytes > LARGE_BYTES


def check_length(settings: Settings, asked: Asked, kind: str) -> None:
    """Refuse what would be refused after it was read, too, whatever it says.

    Raises:
        BadRequest: `context_length_exceeded`.
    """
    chars = [chars_of(message) for message in asked.messages]
    at_least = (sum(chars) if asked.longest is None else max(chars)) // MOST_CHARS_PER_TOKEN
    longest = max((model.context_length for model in settings.models.values() if model.kind == kind), default=0)
    if at_least >= FAR_TOO_LONG * longest:
        raise BadRequest(
            f"The prompt has at least {at_least} tokens; the longest context here is {longest}. Shorten it.",
            code="context_length_exceeded",
            param=asked.input_field,
        )


class Measuring:
    """The thread in which large prompts are read."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-prompts")

    async def run(self, life: Life, work: Callable[..., _Result], *about: Any) -> _Result:
        """The result of work on the prompt of a request, told `about` what: at once, or where the prompt is large in
        the thread."""
        if life.room is None or life.room.held_bytes <= LARGE_BYTES:
            return work(*about)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *about))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
