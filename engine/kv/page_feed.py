"""What the prefix cache holds, told to whoever chooses between engines: everything once, then what changes.

It promises that a reader who takes in every event knows the pages as they were at the last one; that one who is too
slow gets everything anew instead of an ever longer list; and that nothing of a prompt is told: a page is named by a
part of its keyed digest. It runs in the HTTP process, which has no pages itself and mirrors those of the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine.kv.cached_pages import News
from engine.messages import Pages

MAX_READERS = 64
MOST_BEHIND = 20_000  # changes that wait for a reader: one who is further behind starts anew
_PAGES_PER_EVENT = 2_000

_Pages = list[tuple[bytes, bytes]]


class Snapshot(msgspec.Struct, frozen=True):
    """All pages, or the next part of them where `more` are to come; `sequence` is what the first change must follow."""

    space: str
    page_tokens: int
    sequence: int
    pages: list[tuple[str, str]]
    more: bool


class Change(msgspec.Struct, frozen=True):
    """What has changed from `after` to `sequence`; pages that only passed by are in neither list."""

    after: int
    sequence: int
    removed: list[str]
    stored: list[tuple[str, str]]


class Reader:
    """One reader's place in what is told. Made by `PageFeed.read`."""

    def __init__(self, feed: PageFeed) -> None:
        self._feed = feed
        self._left: _Pages | None = None  # of the snapshot that is being read
        self._behind = True  # it needs a snapshot
        self._sequence = 0
        self._changed = News()
        self._news = asyncio.Event()

    async def next(self) -> Snapshot | Change | None:
        """Wait for the next event; None: the feed is closed."""
        feed = self._feed
        while not feed.closed:
            if feed.space and self._behind:
                self._behind, self._sequence = False, feed.sequence
                self._changed.take()
                self._left = list(feed.pages.items())
            if self._left is not None:
                part, self._left = self._left[:_PAGES_PER_EVENT], self._left[_PAGES_PER_EVENT:]
                more = bool(self._left)
                self._left = self._left or None
                return Snapshot(feed.space, feed.page_tokens, self._sequence, _hex(part), more)
            if not self._behind and (told := self._changed.take()) is not None:
                after, self._sequence = self._sequence, feed.sequence
                return Change(after, feed.sequence, [page.hex() for page in told.removed], _hex(told.stored))
            self._news.clear()
            await self._news.wait()
        return None

    def take(self, pages: Pages) -> None:
        """Called by the feed with a change."""
        if not self._behind:
            for page in pages.removed:
                self._changed.removed(page)
            for page, parent in pages.stored:
                self._changed.stored(page, parent)
            if len(self._changed) > MOST_BEHIND:
                self.restart()
        self._news.set()

    def restart(self) -> None:
        """Called by the feed when what was told is no longer worth anything."""
        self._behind, self._left = True, None
        self._changed.take()
        self._news.set()

    def wake(self) -> None:
        self._news.set()


class PageFeed:
    """The pages of one core at a time, and those who read of them."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.space = ""  # empty while there is no core, or none with a prefix cache
        self.page_tokens = 0
        self.sequence = 0  # changes so far
        self.closed = False
        self._readers: set[Reader] = set()

    def begin(self, space: str, page_tokens: int) -> None:
        """A core is ready, and its cache is empty."""
        self.space, self.page_tokens = space, page_tokens
        for reader in self._readers:
            reader.restart()

    def lose(self) -> None:
        """The core is gone, and with it its pages."""
        self.pages.clear()
        self.space = ""
        for reader in self._readers:
            reader.restart()

    def apply(self, pages: Pages) -> None:
        """A change of the core's."""
        self.sequence += 1
        for page in pages.removed:
            self.pages.pop(page, None)
        self.pages.update(pages.stored)
        for reader in self._readers:
            reader.take(pages)

    def read(self) -> Reader | None:
        """A new reader, to be given to `leave` at the end; None: there are as many as there may be."""
        if len(self._readers) >= MAX_READERS:
            return None
        reader = Reader(self)
        self._readers.add(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        self._readers.discard(reader)

    def close(self) -> None:
        """End what everybody reads: the process is about to stop."""
        self.closed = True
        for reader in self._readers:
            reader.wake()


def _hex(pages: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(page.hex(), parent.hex()) for page, parent in pages]
