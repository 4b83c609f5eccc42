"""What is known of a page that the prefix cache holds, and what others are told of its coming and going."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

TOLD_BYTES = 16  # of a digest, where others are told of it
KEPT_HITS = 2  # a page found so often is worth a copy elsewhere when it is evicted


class Text(Protocol):
    """Tokens under a root of the chain, and the digests of their leading full pages as far as they are known."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def cache_root(self) -> bytes: ...
    @property
    def page_digests(self) -> list[bytes]: ...
    @property
    def adapter(self) -> int: ...  # the id of the one that it is computed with


@dataclass(slots=True, eq=False)
class CachedPage:
    """An entry of the index: page `page` holds `tokens` (packed) after the chain that ends in `parent`."""

    page: int
    digest: bytes
    parent: bytes
    tokens: bytes
    first: bool  # of its text: `parent` is a root
    hits: int = 0

    @property
    def told(self) -> tuple[bytes, bytes]:
        """By which names others know this page and the one before it."""
        return self.digest[:TOLD_BYTES], b"" if self.first else self.parent[:TOLD_BYTES]


@dataclass(slots=True)
class Traffic:
    """Pages that became findable, that were found, and that were evicted, for whoever keeps copies of them elsewhere.

    Until the next step runs the content of all of them is in its page.
    """

    stored: list[CachedPage] = field(default_factory=list)
    found: list[CachedPage] = field(default_factory=list)
    evicted: list[CachedPage] = field(default_factory=list)


class Told(NamedTuple):
    """What has changed since the last time, by the beginnings of digests: pages that went, and pages that came, each
    with the page before it (empty: it is the first of a chain). No page is in both."""

    removed: list[bytes]
    stored: list[tuple[bytes, bytes]]


class News:
    """Collects what has changed. A page that comes and goes, or goes and comes back, before it is told is no news."""

    def __init__(self) -> None:
        self._changed: dict[bytes, bytes | None] = {}  # page to the one before it; None: it went

    def __len__(self) -> int:
        return len(self._changed)

    def stored(self, name: bytes, parent: bytes) -> None:
        self._change(name, parent)

    def removed(self, name: bytes) -> None:
        self._change(name, None)

    def _change(self, name: bytes, parent: bytes | None) -> None:
        if self._changed.pop(name, parent) == parent:
            self._changed[name] = parent

    def take(self) -> Told | None:
        """What has changed since this was asked last; None if nothing has."""
        changed, self._changed = self._changed, {}
        if not changed:
            return None
        removed = [page for page, parent in changed.items() if parent is None]
        return Told(removed, [(page, parent) for page, parent in changed.items() if parent is not None])
