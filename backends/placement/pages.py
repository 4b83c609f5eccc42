"""Which replicas hold which pages of keys and values, as engines tell it (`engine/server/pages.py`), and what a prompt
has to do with them.

The gateway has no tokenizer. It learns from answers: an engine says in which page a prompt ended, the pages before it
are known from the events, and so the page at a given share of the prompt belongs to that beginning of its text. Which
replicas hold that page is then the engine's own word, evictions and what others asked for included.

    text     |‑‑‑ digest 1 ‑‑‑|‑‑‑ digest 2 ‑‑‑|‑‑‑ digest 3 ‑‑‑|
    pages    | a → b → c      | → d → e → f     | → g → h → i  →  j      j came with the answer

Tokens are not spread evenly over a text, so a page is taken a little before its share. Where two prompts with the same
beginning disagree about its page, the last page that both have is the truth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from backends.placement.chain import Chain

MOST_BEGINNINGS = 200_000
MOST_PAGES = 1_000_000  # beyond, pages that are new are not taken in: what is known stays true
CAUTION = 0.95  # of a share, for texts whose beginning has fewer tokens to the byte than the rest

_SLICE = 5_000
FIRST = b""  # what comes before the first page of a chain


class _Page:
    __slots__ = ("depth", "holders", "parent")

    def __init__(self, parent: bytes, depth: int) -> None:
        self.parent = parent
        self.depth = depth  # pages up to here, this one included; 0: not known
        self.holders = 0  # a bit per holder


class PageSpace:
    """Pages that can be compared with each other. Holders are small numbers."""

    def __init__(self) -> None:
        self.refused = 0  # pages that found no room
        self._pages: dict[bytes, _Page] = {}
        self._present = 0  # a bit per holder that counts
        self._beginnings: OrderedDict[bytes, bytes] = OrderedDict()  # digest of a text to its last page

    def __len__(self) -> int:
        return len(self._pages)

    def stored(self, holder: int, pages: Iterable[tuple[bytes, bytes]]) -> None:
        """A holder has these pages, each with the page before it."""
        known, bit = self._pages, 1 << holder
        self._present |= bit
        for name, parent in pages:
            page = known.get(name)
            if page is None:
                if len(known) >= MOST_PAGES:
                    self.refused += 1
                    continue
                before = known.get(parent)
                depth = 1 if parent == FIRST else before.depth + 1 if before is not None and before.depth else 0
                page = known[name] = _Page(parent, depth)
            page.holders |= bit

    def removed(self, holder: int, pages: Iterable[bytes]) -> None:
        known, mask = self._pages, ~(1 << holder)
        for name in pages:
            page = known.get(name)
            if page is not None:
                page.holders &= mask
                if not page.holders:
                    del known[name]

    def lost(self, holder: int) -> None:
        """A holder does not count any more, from now on; `sweep` takes its pages out."""
        self._present &= ~(1 << holder)

    def sweep(self, holder: int) -> Iterator[None]:
        """Take out the pages of a holder that was lost, in slices of a millisecond or so: there may be a million."""
        names = list(self._pages)
        for start in range(0, len(names), _SLICE):
            self.removed(holder, names[start : start + _SLICE])
            yield

    def hits(self, chain: Chain) -> Mapping[int, int]:
        """Tokens of the prompt that each holder has, for those that are known to have any."""
        found: dict[int, int] = {}
        seen = 0
        for digest, tokens in reversed(chain):
            name = self._beginnings.get(digest)
            page = None if name is None else self._pages.get(name)
            if page is None or not (fresh := page.holders & self._present & ~seen):
                continue
            seen |= fresh
            while fresh:
                low = fresh & -fresh
                found[low.bit_length() - 1] = tokens
                fresh ^= low
        return found

    def learn(self, chain: Chain, last: bytes) -> None:
        """A prompt with this chain ended in page `last`."""
        page = self._pages.get(last)
        if page is None or not chain:
            return
        known = self._beginnings
        told = {known[digest]: number for number, (digest, _) in enumerate(chain) if digest in known}
        walk: list[bytes] = []  # from the end of the prompt towards its beginning
        name, common = last, -1
        while page is not None:
            if (number := told.get(name)) is not None:
                common = number  # up to here, what was known agrees
                break
            walk.append(name)
            name, page = page.parent, self._pages.get(page.parent)
        depth, total = len(walk), self._depth(last)
        if not total:
            return
        prompt_tokens = max(1, chain[-1][1])
        for number in range(common + 1, len(chain)):
            digest, tokens = chain[number]
            if known.get(digest) in self._pages:
                place = self._shared(known[digest], walk, name)
            else:
                pages = int(CAUTION * total * tokens / prompt_tokens) - (total - depth)
                place = walk[depth - pages] if 0 < pages <= depth else name if pages <= 0 else last
            if place in self._pages:
                known[digest] = place
        # The end first, so that beginnings, which others share, are forgotten last.
        for digest, _ in reversed(chain):
            if digest in known:
                known.move_to_end(digest)
        while len(known) > MOST_BEGINNINGS:
            known.popitem(last=False)

    def _shared(self, name: bytes, walk: list[bytes], end: bytes) -> bytes:
        """The last page on the way from `name` to the beginning that is on the walk, or where the walk ended."""
        there = {*walk, end}
        while name not in there:
            page = self._pages.get(name)
            if page is None:
                return end
            name = page.parent
        return name

    def _depth(self, name: bytes) -> int:
        """Pages up to this one; 0 if one before it is not known."""
        way = []
        page = self._pages.get(name)
        while page is not None and not page.depth:
            way.append(page)
            page = self._pages.get(page.parent) if page.parent != FIRST else None
        if page is None:
            return 0
        depth = page.depth
        for one in reversed(way):
            depth += 1
            one.depth = depth
        return self._pages[name].depth
