"""The prefix cache beyond its own pages: what is worth keeping elsewhere is kept, and comes back before it is needed.

    Add ── all pages here, or computing is cheaper ──→ scheduler
      └── some may be elsewhere → waits here → pages become cached ones → scheduler finds them like any other

A request waits before the scheduler, with a time limit: what has not come by then is computed. Pages on their way take
no room: only when their content is here are they given pages, which are cached at once and held by nobody. So the
law `free + cached + used == total` holds without a further state. A request that was preempted waits in the scheduler
for its pages to come back; that is all that the scheduler knows of tiers.

To a shared store goes every page that was computed here, to the host's pool those that are evicted and were found often
enough. Into the outbox, from which other engines fetch, goes what prompts are made of: computed here, or found. Between
two steps their content is copied, on the loop, since the next step may overwrite it. A request may say which other
engine has computed its prompt; then its pages are fetched there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine.kv.cached_pages import CachedPage, Traffic
from engine.kv.prefix_cache import PrefixCache
from engine.messages import NewRequest
from engine.scheduling.request import Request
from engine.transfer.courier import Courier, Load, Tier
from engine.transfer.format import PageName
from engine.transfer.page_memory import PageMemory
from engine.transfer.page_server import PageServer
from engine.types import TokenMasks

# How long a request waits for its pages at least and at most; in between, as long as computing them would take.
_WAIT_S = (0.05, 2.0)
_PEER_WAIT_S = 30.0  # at most where another engine is known to have them
_COMPUTE_WEIGHT = 0.1  # of the newest step in the moving average
_MOST_AHEAD_BYTES = 64 << 20  # of one load, fetched and not yet in its pages
_PROMPT_STEP_TOKENS = 32  # a step of fewer says nothing of how fast prompts are computed


@dataclass(slots=True, eq=False)
class _Wait:
    """A load, the text that it is for, and from which of its pages on."""

    load: Load
    text: Request
    first: int
    deadline: float
    placed: int = 0  # pages that have come
    ended: bool = False


@dataclass(slots=True, eq=False)
class Party:
    """Requests that came together and go on together, when the pages of all of them are here."""

    requests: list[NewRequest]
    grammars: Mapping[int, TokenMasks]
    waits: list[_Wait]


class Tiers:
    """Knows who waits for what. All methods are for the engine's loop, between two steps."""

    def __init__(
        self,
        cache: PrefixCache,
        memory: PageMemory,
        *,
        host: Tier | None = None,
        shared: Tier | None = None,
        peers: Mapping[str, Tier] = MappingProxyType({}),
        server: PageServer | None = None,
        max_waiting: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host`: for pages that are evicted. `shared`: for all that are computed. `peers`: other engines, by address.
        `server`: offers pages to them. `max_waiting`: requests, at most."""
        self.cache = cache
        outbox = None if server is None else server.outbox
        self.tiers = [tier for tier in (host, shared, outbox, *peers.values()) if tier is not None]
        self.loads: Counter[str] = Counter()  # by how they ended
        self._memory = memory
        self._host = host
        self._shared = shared
        self._peers = peers
        self._server = server
        self._max_waiting = max_waiting
        self._clock = clock
        self._courier = Courier()
        self._traffic = cache.traffic = Traffic()
        self._parties: list[Party] = []
        self._returning: list[tuple[Request, _Wait]] = []
        self._loading: dict[bytes, _Wait] = {}  # by the first page that is missing
        self._seconds_per_token: float | None = None

    def __len__(self) -> int:
        return sum(len(party.requests) for party in self._parties)

    def fileno(self) -> int:
        """Readable when `ready` may have something."""
        return self._courier.fileno()

    @property
    def offered_at(self) -> str:
        """The address at which other engines find pages of this one; empty: nowhere."""
        return "" if self._server is None else self._server.address

    def seconds_left(self) -> float | None:
        """When `ready` is to be asked even if nothing comes; None: nobody waits."""
        deadlines = [wait.deadline for party in self._parties for wait in party.waits]
        deadlines += [wait.deadline for request, wait in self._returning if not request.is_finished]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    def counts(self) -> dict[str, dict[str, int]]:
        """Of each tier what became of pages, whether it is `up`, and the bytes that are `queued` for it."""
        return {
            tier.store.name: {**tier.counts.as_dict(), "up": int(tier.is_up), "queued": tier.queued_bytes}
            for tier in self.tiers
        }

    def requests(self) -> Iterable[NewRequest]:
        """Who waits."""
        return (request for party in self._parties for request in party.requests)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if num_tokens >= _PROMPT_STEP_TOKENS:
            per_token, known = seconds / num_tokens, self._seconds_per_token
            self._seconds_per_token = per_token if known is None else known + _COMPUTE_WEIGHT * (per_token - known)

    # --- in ----------------------------------------------------------------------------------------------------------

    def enter(
        self, requests: Sequence[NewRequest], texts: Iterable[Request], grammars: Mapping[int, TokenMasks]
    ) -> bool:
        """Look for the pages of requests that came together; False: there is nothing to wait for.

        `texts`: the requests as the scheduler will know them.
        """
        if len(self) + len(requests) > self._max_waiting:
            return False
        pairs = zip(requests, texts, strict=True)
        waits = [wait for asked, text in pairs if (wait := self._look_for(text, asked.pages_from)) is not None]
        if waits:
            self._parties.append(Party(list(requests), grammars, waits))
        return bool(waits)

    def look_again(self, requests: Iterable[Request]) -> None:
        """Look for the pages of requests that were preempted: they start when those have come, or are too late."""
        for request in requests:
            if (wait := self._look_for(request, None)) is not None:
                request.awaits_pages = True
                self._returning.append((request, wait))

    def _look_for(self, text: Request, pages_from: str | None) -> _Wait | None:
        cache = self.cache
        most = min(cache.reusable_pages(text), cache.pool.total)
        first = len(cache.find(text, most))
        if first == most:
            return None
        missing = cache.page_digest(text, first)
        if (wait := self._loading.get(missing)) is not None:  # somebody with the same beginning waits for it
            return wait
        seconds = None if self._seconds_per_token is None else self._seconds_per_token * cache.block_size
        peer = None if pages_from is None else self._peer(pages_from)
        places = (self._host, peer, self._shared)
        tiers = [tier for tier in places if tier is not None and tier.is_up and tier.pays(seconds)]
        if not tiers or self._courier.is_stuck:
            self.loads["skipped"] += 1
            return None
        now = self._clock()
        least, longest = _WAIT_S
        if seconds is not None and peer in tiers:
            longest = _PEER_WAIT_S
        limit = longest if seconds is None else min(longest, max(least, seconds * (most - first)))
        names = [self._name(text, index) for index in range(first, most)]
        load = Load(names, now, max(1, _MOST_AHEAD_BYTES // self._memory.page_bytes))
        wait = self._loading[missing] = _Wait(load, text, first, now + limit)
        self._courier.ask(load, tiers)
        return wait

    def _peer(self, address: str) -> Tier | None:
        peer = self._peers.get(address)
        if peer is None:
            self.loads["unknown_peer"] += 1
        return peer

    def _name(self, text: Request, index: int) -> PageName:
        digest = self.cache.page_digest(text, index)
        parent = text.page_digests[index - 1] if index else text.cache_root
        return PageName(digest, parent, self.cache.page_tokens(text, index))

    def leave(self, request_ids: Iterable[int]) -> None:
        """Forget requests that were given up; others are not touched."""
        gone = set(request_ids)
        for party in self._parties:
            party.requests = [r for r in party.requests if r.request_id not in gone]
        self._parties = [party for party in self._parties if party.requests]

    # --- out ---------------------------------------------------------------------------------------------------------

    def ready(self) -> list[Party]:
        """Who can go on now: what could be found is in the prefix cache, the rest is to be computed."""
        self._courier.drain()
        now = self._clock()
        for missing, wait in list(self._loading.items()):
            done = wait.load.done  # before what it has brought is taken, so that nothing is left behind
            self._place(wait, wait.load.take())
            if done or now >= wait.deadline:
                wait.ended = True
                del self._loading[missing]
                self._end(wait, done, now)
        for request, wait in self._returning:
            request.awaits_pages = not wait.ended
        self._returning = [(request, wait) for request, wait in self._returning if not wait.ended]
        ended = [party for party in self._parties if all(wait.ended for wait in party.waits)]
        self._parties = [party for party in self._parties if party not in ended]
        return ended

    def _place(self, wait: _Wait, contents: list[memoryview]) -> None:
        """Put contents into pages of the prefix cache. Some may be there by now; some of those before may be gone."""
        start = wait.first + wait.placed
        wait.placed += len(contents)
        stop = start + len(contents)
        if not start <= len(self.cache.find(wait.text, stop)) < stop:
            return
        new = self.cache.insert(wait.text, stop)
        self.spill()  # what makes room for them is still in its pages
        if new:
            self._memory.write([page for _, page in new], [contents[index - start] for index, _ in new])

    def _end(self, wait: _Wait, done: bool, now: float) -> None:
        load = wait.load
        if not done:
            load.give_up()
            self.loads["late"] += 1
            if load.asking is not None:
                load.asking.kept_waiting((now - load.started) / (wait.placed + 1))
        else:
            self.loads["whole" if wait.placed == len(load.names) else "part" if wait.placed else "none"] += 1

    # --- around a step -----------------------------------------------------------------------------------------------

    def spill(self) -> None:
        """Keep what was evicted since this was called last. To be called before anything is written to pages."""
        evicted, self._traffic.evicted = self._traffic.evicted, []
        found, self._traffic.found = self._traffic.found, []
        if self._server is not None and found:
            self._server.keep([entry.digest for entry in found])
            self._send(self._server.outbox, found)
        if self._host is not None:
            self._send(self._host, evicted)

    def share(self) -> None:
        """Keep what has been computed in the step that is over."""
        stored, self._traffic.stored = self._traffic.stored, []
        if self._shared is not None:
            self._send(self._shared, stored)
        if self._server is not None:
            self._send(self._server.outbox, stored)

    def _send(self, tier: Tier, entries: Sequence[CachedPage]) -> None:
        if not entries:
            return
        names = [PageName(entry.digest, entry.parent, entry.tokens) for entry in entries]
        chosen = tier.room(names)
        if chosen:
            for i, content in zip(chosen, self._memory.read([entries[i].page for i in chosen]), strict=True):
                tier.save(names[i], content)

    def close(self) -> None:
        """Let go of threads and stores."""
        for wait in self._loading.values():
            wait.load.give_up()
        self._courier.close()
        if self._server is not None:
            self._server.close()
        for tier in self.tiers:
            tier.close()
