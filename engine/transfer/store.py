"""Where pages can be put and found again: the one interface of the host's memory, of Redis, and of what comes later.

A store keeps values under keys and knows nothing of pages. It is asked from threads of the courier, never from the
engine's loop. Another engine is a store, too: see `peer_store.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreFailed(Exception):
    """A store did not do what it was asked. The message says why; nothing is known of the rest."""


class PageStore(Protocol):
    """Thread-safe. `load` and `save` may take as long as they have time-outs for; the rest is quick."""

    name: str  # in metrics
    batch: int  # values that `load` should be asked for at a time, so that it can be given up in between

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values, None where there is none. Raises StoreFailed."""
        ...

    def save(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep values under keys, as far as there is room; what is there already need not be replaced.

        Raises StoreFailed.
        """
        ...

    def discard(self, key: bytes) -> None:
        """Forget a value that turned out to be worthless. Raises StoreFailed."""
        ...

    def holds(self, key: bytes) -> bool:
        """Whether it is known without asking anybody that the value is there. Called on the engine's loop."""
        ...

    def close(self) -> None: ...
