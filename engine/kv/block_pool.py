"""The pages of the KV cache: who holds which one.

A page is in exactly one of three states: free (content worthless), used (one or more holders), cached (no holder, but
its content is kept for a later request until the room is needed). The law `free + cached + used == total` is
checked by `check`. Page 0 is the null page: zeroed, not counted, never handed out.

Cached pages wait in two queues (segmented LRU: Karedla, Love, Wherry, "Caching strategies to improve disk system
performance", 1994): on probation as long as nobody has come back for them, protected afterwards. Probation gives its
pages first, so what is used once pushes out what is used once. The protected queue has a bound; what it pushes out,
oldest first, goes back on probation as the youngest there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

# Of all pages. Conversations come back for pages that were used once: 0.8 found a third less of a trace than plain LRU
# (`make bench-placement` replays it), 0.2 a little more.
_PROTECTED_SHARE = 0.2


class PoolCorrupt(RuntimeError):
    """The books of the pool do not balance: a bug, never a user's fault. The message prints the numbers."""


class BlockPool:
    """Reference-counted pages; every operation is O(1). Knows nothing of what the pages hold."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null page, as `CacheGeometry` does.

        Raises:
            ValueError: fewer than two pages.
        """
        if num_blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 pages (one is the null page), got {num_blocks}")
        self.total = num_blocks - 1
        # A stack, so that the page freed last (still warm in the processor's cache) is used first.
        self._free = list(range(num_blocks - 1, 0, -1))
        # Oldest first. An OrderedDict is a hash table with a linked list: O(1) removal from the middle.
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._most_protected = int(_PROTECTED_SHARE * self.total)
        self._ref_counts = [0] * num_blocks
        # Pages whose content is findable: they become cached, not free, when their last holder lets go.
        self._keep = bytearray(num_blocks)
        self._favoured = bytearray(num_blocks)  # and then they are protected
        self._num_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._probation) + len(self._protected)

    @property
    def num_used(self) -> int:
        return self._num_used

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def is_exclusive(self, page: int) -> bool:
        """Whether a page has one holder and is not findable, so that its holder may write to it."""
        return self._ref_counts[page] == 1 and not self._keep[page]

    def take(self) -> int:
        """A free page, now held once.

        Raises:
            IndexError: no page is free.
        """
        page = self._free.pop()
        self._ref_counts[page] = 1
        self._num_used += 1
        return page

    def acquire(self, page: int) -> None:
        """Become one more holder of a page that is used or cached.

        Raises:
            PoolCorrupt: the page is free, so its content is not what the caller believes.
        """
        if self._ref_counts[page] == 0:
            queue = self._protected if page in self._protected else self._probation
            if page not in queue:
                raise PoolCorrupt(f"page {page} was acquired although it is free")
            del queue[page]
            self._num_used += 1
        self._ref_counts[page] += 1

    def release(self, page: int) -> None:
        """Stop holding a page. The last holder's release makes it cached if it is kept, free otherwise.

        Raises:
            PoolCorrupt: nobody holds the page.
        """
        count = self._ref_counts[page]
        if count <= 0:
            raise PoolCorrupt(f"page {page} was released more often than it was taken")
        self._ref_counts[page] = count - 1
        if count == 1:
            self._num_used -= 1
            if not self._keep[page]:
                self._free.append(page)
            elif self._favoured[page]:
                self._protected[page] = None
                if len(self._protected) > self._most_protected:
                    demoted, _ = self._protected.popitem(last=False)
                    self._favoured[demoted] = 0
                    self._probation[demoted] = None
            else:
                self._probation[page] = None

    def keep(self, page: int) -> None:
        """Mark a held page as findable.

        Raises:
            PoolCorrupt: nobody holds the page.
        """
        if self._ref_counts[page] <= 0:
            raise PoolCorrupt(f"page {page} was published although nobody holds it")
        self._keep[page] = 1

    def favour(self, page: int) -> None:
        """Mark a held and findable page as one that somebody has come back for: it will be kept longer.

        Raises:
            PoolCorrupt: nobody holds the page, or it is not findable.
        """
        if self._ref_counts[page] <= 0 or not self._keep[page]:
            raise PoolCorrupt(f"page {page} was taken over although nobody holds it or nobody can find it")
        self._favoured[page] = 1

    def drop_oldest_cached(self) -> int:
        """Free the cached page that was released longest ago, one on probation if there is any; return its number.

        Raises:
            KeyError: no page is cached.
        """
        page, _ = (self._probation or self._protected).popitem(last=False)
        self._keep[page] = self._favoured[page] = 0
        self._free.append(page)
        return page

    def check(self, block_tables: Iterable[Iterable[int]] | None = None) -> None:
        """Verify the conservation law and, given every holder's block table, each page's reference count.

        Raises:
            PoolCorrupt: with the numbers that do not agree.
        """
        used = sum(1 for count in self._ref_counts if count > 0)
        counts = f"free {self.num_free} + cached {self.num_cached} + used {used} (counted {self._num_used})"
        if used != self._num_used or self.num_free + self.num_cached + used != self.total:
            raise PoolCorrupt(f"{counts} != total {self.total}")
        held = {page for page, count in enumerate(self._ref_counts) if count > 0}
        cached = {*self._probation, *self._protected}
        if len(held | set(self._free) | cached) != self.total or 0 in held or 0 in self._free:
            raise PoolCorrupt(f"a page is in two states or the null page was handed out: {counts}")
        if any(not self._keep[page] for page in cached) or any(self._keep[page] for page in self._free):
            raise PoolCorrupt("a cached page is not findable, or a free page is")
        if len(self._protected) > self._most_protected or any(not self._favoured[page] for page in self._protected):
            raise PoolCorrupt(f"{len(self._protected)} pages are protected, of at most {self._most_protected}")
        if block_tables is not None:
            holders = [0] * len(self._ref_counts)
            for table in block_tables:
                for page in table:
                    holders[page] += 1
            wrong = [(p, self._ref_counts[p], n) for p, n in enumerate(holders) if n != self._ref_counts[p]]
            if wrong:
                raise PoolCorrupt(f"reference counts (page, counted, held by block tables) disagree: {wrong[:8]}")
