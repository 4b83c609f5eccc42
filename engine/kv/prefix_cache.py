"""The prefix cache: full pages of KV that later requests with the same beginning take over instead of computing.

A page is known by a chained digest: blake2b(parent digest, its tokens), and the chain starts from the model, the KV
data type and the tenant's salt, each tagged and length-prefixed. The digest is only an index: tokens and parent are
compared on every hit, so a collision is a miss and never a wrong answer. The hash is keyed with a secret seed, random
per process unless several engines are given one, so nobody can prepare collisions. Pages are published only after the
forward pass that filled them succeeded. What comes and goes is told by `news`, for those who choose between engines.

The scheduler talks to this class only; it is the one user of `BlockPool`.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.kv.block_pool import BlockPool, PoolCorrupt
from engine.kv.cached_pages import KEPT_HITS, TOLD_BYTES, CachedPage, News, Text, Told, Traffic
from engine.kv.prefix_history import Absence, PrefixHistory
from engine.scheduling.request import Request

DIGEST_BYTES = 32


class Holder(Protocol):
    """Who holds pages: a request, or siblings that wait for a prompt."""

    @property
    def block_table(self) -> list[int]: ...


@dataclass(slots=True)
class PrefixCacheStats:
    """Cumulative. Requests that resume after a preemption are not counted as queries."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    missed_tokens: Counter[str] = field(default_factory=Counter)  # prompt tokens computed, by `Absence`


class PrefixCache:
    """Look-up, allocation, publication and release of pages.

    Eviction is by recency and frequency, see `BlockPool`, and leaf first: a request lets go of its pages last page
    first, and a hit always takes a chain from its beginning, so a parent is never older than its child nor less often
    hit. (The one exception is harmless: of two requests that computed the same page at the same time only one copy is
    findable; if that goes first, a child of the other copy cannot be reached until the parent is published again, and
    ages out.)
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        model_digest: bytes,
        kv_dtype: str,
        enabled: bool = True,
        seed: bytes | None = None,
    ) -> None:
        """`seed`: 32 secret bytes, the same for engines whose pages are to be compared; None: random."""
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._model_digest = model_digest
        self._kv_dtype = kv_dtype
        self._seed = secrets.token_bytes(32) if seed is None else seed
        self.traffic: Traffic | None = None  # set by who keeps copies; it takes away what is listed
        self._history = PrefixHistory()
        self._news = News()
        self._copies: dict[int, int] = {}  # page to the one whose content it gets
        self._by_digest: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return self.pool.num_free + self.pool.num_cached

    @property
    def space(self) -> bytes:
        """A name of what pages must have in common to be compared by their digests: seed, model, data type, size."""
        return self._digest(b"space", self.root(None), self.block_size.to_bytes(8, "little"))[:TOLD_BYTES]

    def secret(self, purpose: bytes) -> bytes:
        """A key for this purpose, the same wherever the seed is."""
        return self._digest(b"secret", purpose)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def root(self, salt: str | None, adapter: bytes = b"") -> bytes:
        """Where the chain of a request with this salt starts. No salt and the empty salt are different.

        `adapter`: the digest of the one that it runs with. Its name is none of this: another may have it tomorrow.
        """
        salt_field = b"" if salt is None else b"salt:" + salt.encode()
        model = (b"model", self._model_digest, b"kv_dtype", self._kv_dtype.encode(), b"adapter", adapter)
        fields = (*model, b"tenant", salt_field)
        return self._digest(*(len(part).to_bytes(8, "little") + part for part in fields))

    def match(self, request: Request) -> list[int]:
        """The cached pages that begin this request, not yet acquired.

        At most `num_tokens - 1` tokens: the last token must run through the model, or there is nothing to sample from.
        None for a request that must be reproducible, none of a prompt from where it is still to be scored or pooled.
        """
        return self.find(request, self.reusable_pages(request))

    def reusable_pages(self, request: Request) -> int:
        """Leading pages of a request that may come from the cache."""
        return 0 if not self.enabled or request.is_reproducible else request.most_reusable // self.block_size

    def find(self, text: Text, most: int) -> list[int]:
        """The cached pages that begin a text, at most so many, not acquired."""
        pages: list[int] = []
        parent = text.cache_root
        for index in range(most):
            digest = self.page_digest(text, index)
            entry = self._by_digest.get(digest)
            if entry is None or entry.parent != parent or entry.tokens != self.page_tokens(text, index):
                break
            pages.append(entry.page)
            parent = digest
        return pages

    def insert(self, text: Text, stop: int) -> list[tuple[int, int]]:
        """Make the pages of a text up to full page `stop` findable, as far as there is room for them.

        Returns those that were not, by their index in the text; the caller writes their content before anything else
        happens. They are cached, like pages that a request has let go, and count as pages that somebody came back for.
        """
        if self._copies:
            raise PoolCorrupt("pages are inserted between the planning of a step and the step")
        held: list[int] = []
        new: list[tuple[int, int]] = []
        for index in range(stop):
            entry = self._by_digest.get(self.page_digest(text, index))
            if entry is not None:  # one whose parent went before it, perhaps
                self.pool.acquire(entry.page)
                held.append(entry.page)
            elif self.num_available:
                page = self._take()
                self._index(text, index, page).hits = KEPT_HITS
                self.pool.favour(page)
                held.append(page)
                new.append((index, page))
            else:
                break
        self.let_go(held)
        return new

    def fits(self, num_tokens: int, matched: list[int], promised: int = 0) -> bool:
        """Whether `num_tokens` tokens, of which `matched` pages are here already, find room now.

        `promised`: pages that are available but meant for others.
        """
        # A matched page that nobody holds counts as available but is about to be taken by this very request.
        idle = sum(1 for page in matched if self.pool.ref_count(page) == 0)
        return self.pages_for(num_tokens) - len(matched) <= self.num_available - idle - promised

    def adopt(self, request: Request, matched: list[int], *, count: bool) -> None:
        """Give the matched pages to a request that holds none; `count` it in the statistics."""
        if request.block_table:
            raise PoolCorrupt(f"request {request.request_id} adopts a prefix but already holds pages")
        for page in matched:
            self.pool.acquire(page)
        request.block_table.extend(matched)
        request.num_computed_tokens = len(matched) * self.block_size
        request.num_published_pages = len(matched)
        if self.traffic is not None:
            self.traffic.found += [self._by_page[page] for page in matched]
        if count and self.enabled:
            self._account(request, matched)

    def _account(self, request: Request, matched: Sequence[int]) -> None:
        """Count what a request found, and why it did not find the rest."""
        for page in matched:
            self._by_page[page].hits += 1
            self.pool.favour(page)
        missed = self.stats.missed_tokens
        if request.is_reproducible or not request.looks_up:
            reason = Absence.SEED if request.is_reproducible else Absence.SCORED
            missed[reason] += request.num_tokens - request.num_computed_tokens
            return
        self.stats.queried_tokens += request.num_tokens
        self.stats.hit_tokens += request.num_computed_tokens
        index, pages = len(matched), self.reusable_pages(request)
        missed[Absence.LAST_PAGE] += request.num_tokens - pages * self.block_size
        if index < pages:
            first = None if index else (self.page_tokens(request, 0), request.adapter)
            digest = self.page_digest(request, index)
            request.missed = self._history.why(digest, first, (pages - index) * self.block_size)
            missed[request.missed.reason] += request.missed.tokens

    def missing(self, request: Request, num_tokens: int) -> int:
        """Pages that `extend` would take: those behind the block table, and one for a page that must be copied."""
        return self.pages_for(num_tokens) - len(request.block_table) + (self._shared_index(request) is not None)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens` tokens, of which those not yet computed are this request's to write.

        False, and nothing changes, if there is no room. A page that it shares and would write to becomes its own: the
        content is to be copied before the step, see `take_copies`.
        """
        if self.missing(request, num_tokens) > self.num_available:
            return False
        if (index := self._shared_index(request)) is not None:
            shared, own = request.block_table[index], self._take()
            self._copies[own] = shared
            request.block_table[index] = own
            self.pool.release(shared)
        while len(request.block_table) < self.pages_for(num_tokens):
            request.block_table.append(self._take())
        return True

    def _shared_index(self, request: Request) -> int | None:
        """Where in the block table there is a page that the next token goes to and others read, too.

        There is one at most: only a fork ends in the middle of a page, and what is behind that page is its own.
        """
        index = request.num_computed_tokens // self.block_size
        if index >= len(request.block_table) or self.pool.is_exclusive(request.block_table[index]):
            return None
        return index

    def _take(self) -> int:
        if self.pool.num_free == 0:
            self._evict_oldest()
        return self.pool.take()

    @property
    def owes_copies(self) -> bool:
        """Whether a page waits for its content."""
        return bool(self._copies)

    def take_copies(self) -> list[tuple[int, int]]:
        """The pages to copy before the step, from and to, since this was asked last.

        NOTE: a source may have been let go and taken by another meanwhile. That does no harm: all sources are read
        before any page is written, and all copies are done before the step writes.
        """
        copies = [(source, own) for own, source in self._copies.items()]
        self._copies = {}
        return copies

    def hold(self, request: Request, num_tokens: int) -> list[int]:
        """Become a holder of the pages that hold a request's first `num_tokens` tokens; give them to `let_go` once."""
        pages = request.block_table[: self.pages_for(num_tokens)]
        for page in pages:
            self.pool.acquire(page)
        return pages

    def let_go(self, pages: Sequence[int]) -> None:
        """Stop holding pages, last page first, so that the end of a chain is evicted before its beginning."""
        for page in reversed(pages):
            self.pool.release(page)

    def fork(self, pages: Sequence[int], request: Request, num_tokens: int) -> None:
        """Let a request that holds no pages share these, which hold its first `num_tokens` tokens, all computed."""
        if request.block_table:
            raise PoolCorrupt(f"request {request.request_id} takes over a prompt but already holds pages")
        for page in pages:
            self.pool.acquire(page)
        request.block_table.extend(pages)
        request.num_computed_tokens = num_tokens
        # Its full pages are findable already, or copies of such.
        request.num_published_pages = num_tokens // self.block_size

    def room(self, request: Request) -> int:
        """How many tokens behind its last one a request's pages could hold without taking any from another."""
        return (len(request.block_table) + self.num_available) * self.block_size - request.num_tokens

    def trim(self, request: Request, num_tokens: int) -> None:
        """Give back the pages behind `num_tokens` tokens: what drafts were written to and nobody has published."""
        needed = self.pages_for(num_tokens)
        if needed < request.num_published_pages:
            raise PoolCorrupt(f"request {request.request_id}: page {needed} is published and cannot be given back")
        while len(request.block_table) > needed:
            self.pool.release(request.block_table.pop())

    def publish(self, request: Request) -> None:
        """Make the request's full, computed pages findable. Call only after the pass that filled them succeeded."""
        if not self.enabled:
            return
        for index in range(request.num_published_pages, request.num_computed_tokens // self.block_size):
            # NOTE: if an equal page is known already, this copy stays private: block tables only ever grow, so that
            # a page number handed to the runner keeps its meaning.
            if self.page_digest(request, index) not in self._by_digest:
                entry = self._index(request, index, request.block_table[index])
                if self.traffic is not None:
                    self.traffic.stored.append(entry)
            request.num_published_pages = index + 1

    def _index(self, text: Text, index: int, page: int) -> CachedPage:
        """Make `page`, which holds full page `index` of a text, findable."""
        digest = self.page_digest(text, index)
        parent = text.page_digests[index - 1] if index else text.cache_root
        entry = CachedPage(page, digest, parent, self.page_tokens(text, index), first=index == 0)
        self._by_digest[digest] = entry
        self._by_page[page] = entry
        self.pool.keep(page)
        self._news.stored(*entry.told)
        self._history.stored(digest)
        if entry.first:
            self._history.began(entry.tokens, parent, text.adapter)
        return entry

    def want_back(self, request: Request) -> None:
        """A request lets go of its pages and will come for them again: those that are evicted are worth a copy."""
        for page in request.block_table[: request.num_published_pages]:
            if (entry := self._by_page.get(page)) is not None:  # else its copy is not the one that is found
                entry.hits = max(entry.hits, KEPT_HITS)

    def release(self, request: Request) -> None:
        """Let go of all pages of a request. Doing it twice is the same as doing it once."""
        self.let_go(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0
        request.num_published_pages = 0

    def prompt_page(self, request: Request) -> bytes | None:
        """The last full page of a prompt that has been computed, as `news` names it; None: it has no full page."""
        pages = request.num_prompt_tokens // self.block_size
        return request.page_digests[pages - 1][:TOLD_BYTES] if 0 < pages <= len(request.page_digests) else None

    def news(self) -> Told | None:
        """What has changed since it was asked last; None if nothing has."""
        return self._news.take()

    def check(self, holders: Iterable[Holder]) -> None:
        """Verify pool, reference counts and index against all who hold pages.

        Raises:
            PoolCorrupt: with the numbers that do not agree.
        """
        self.pool.check(holder.block_table for holder in holders)
        if len(self._by_digest) != len(self._by_page):
            raise PoolCorrupt(f"{len(self._by_digest)} digests but {len(self._by_page)} pages in the prefix cache")
        for page, entry in self._by_page.items():
            if entry.page != page or self._by_digest.get(entry.digest) is not entry:
                raise PoolCorrupt(f"page {page} and its digest do not point to each other")

    def _evict_oldest(self) -> None:
        entry = self._by_page.pop(self.pool.drop_oldest_cached())
        del self._by_digest[entry.digest]
        self._news.removed(entry.told[0])
        self._history.evicted(entry.digest)
        if entry.first:
            self._history.ended(entry.tokens, entry.parent)
        if self.traffic is not None and entry.hits >= KEPT_HITS:
            self.traffic.evicted.append(entry)
        self.stats.evicted_pages += 1

    def page_tokens(self, text: Text, index: int) -> bytes:
        """The tokens of full page `index`, packed."""
        start = index * self.block_size
        return array("I", text.token_ids[start : start + self.block_size]).tobytes()

    def page_digest(self, text: Text, index: int) -> bytes:
        """The digest of full page `index`; the digests of all pages before it must be there or are made first."""
        digests = text.page_digests
        while len(digests) <= index:
            parent = digests[-1] if digests else text.cache_root
            digests.append(self._digest(parent, self.page_tokens(text, len(digests))))
        return digests[index]

    def _digest(self, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self._seed, digest_size=DIGEST_BYTES)
        for part in parts:
            digest.update(part)
        return digest.digest()
