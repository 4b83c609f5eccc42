"""Which replica holds how much of a prompt: by what was sent where, and where engines tell their pages, by those.

What was sent where is a guess: servers evict what they like, and other gateways send things, too. So it is bounded by
the tokens that a server is said to hold and by time. A replica that tells its pages is believed instead; what was sent
to it counts for the moment that a prompt takes to be computed, and if its feed breaks, the guess is back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from backends.placement.chain import Chain
from backends.placement.pages import PageSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.replica import Replica

    Tell = Callable[["Replica", Chain, int], None]

MOMENT_S = 15.0  # in which the pages of what was sent are told
MOST_SENT = 100_000  # beginnings per replica
# What others were told of within this part of the time that it is remembered is no news to them.
_TOLD_AGAIN = 0.5


class Sent:
    """What was sent to one replica lately: beginnings, the least recently used first. Times are monotonic seconds."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._beginnings: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # tokens since the one before it, when

    def hit(self, chain: Chain, now: float, keep_s: float, least: int) -> int:
        """Tokens of the longest beginning that was sent in the last `keep_s` seconds, if they are more than `least`."""
        known = self._beginnings
        for digest, tokens in reversed(chain):
            if tokens <= least:
                break
            sent = known.get(digest)
            if sent is not None and now - sent[1] <= keep_s:
                return tokens
        return 0

    def add(self, chain: Chain, now: float, before: int = 0) -> None:
        """A prompt was sent, or the part of its chain that comes after `before` tokens."""
        known = self._beginnings
        # The end first: as in a server's cache, the beginning of a prompt, which others share, outlives its end.
        for number in range(len(chain) - 1, -1, -1):
            digest, tokens = chain[number]
            own = tokens - (chain[number - 1][1] if number else before)
            older = known.pop(digest, None)
            self._tokens += own - (older[0] if older else 0)
            known[digest] = (own, now)
        while known and (self._tokens > self._most_tokens or len(known) > MOST_SENT):
            _, (tokens, _) = known.popitem(last=False)
            self._tokens -= tokens

    def clear(self) -> None:
        self._beginnings.clear()
        self._tokens = 0


class PrefixIndex:
    """Who holds what, of one backend.

    Args:
        remember_s: how long a server is taken to keep what was sent to it.
        remember_tokens: how many tokens it is taken to keep.

    Attributes:
        tell: gets what goes to replicas that do not tell their pages, for other gateways: the replica, the part of the
            chain that is news, and the tokens before it.
    """

    def __init__(self, remember_s: float, remember_tokens: int) -> None:
        self.tell: Tell | None = None
        self._remember_s = remember_s
        self._remember_tokens = remember_tokens
        self._sent: dict[Replica, Sent] = {}
        self._spaces: dict[str, PageSpace] = {}
        self._telling: dict[Replica, tuple[str, int]] = {}  # who tells its pages: where, and as which holder
        self._by_number: dict[int, Replica] = {}

    @property
    def pages(self) -> int:
        """Pages that are known of."""
        return sum(len(space) for space in self._spaces.values())

    @property
    def spaces(self) -> int:
        """Sets of replicas whose pages can be compared."""
        return len(self._spaces)

    def tells(self, replica: Replica) -> bool:
        return replica in self._telling

    def hits(self, chain: Chain, now: float) -> Mapping[Replica, int]:
        """Tokens of the prompt that each replica holds, for those that are believed to hold any."""
        found: dict[Replica, int] = {}
        if not chain:
            return found
        for space in self._spaces.values():
            for number, tokens in space.hits(chain).items():
                found[self._by_number[number]] = tokens
        for replica, sent in self._sent.items():
            keep_s = MOMENT_S if replica in self._telling else self._remember_s
            if tokens := sent.hit(chain, now, keep_s, found.get(replica, 0)):
                found[replica] = tokens
        return found

    def sent(self, chain: Chain, replica: Replica, now: float) -> None:
        """A request goes to this replica."""
        if not chain:
            return
        known = self._of(replica)
        if self.tell is not None and replica not in self._telling:
            told = known.hit(chain, now, self._remember_s * _TOLD_AGAIN, 0)
            if part := tuple(link for link in chain if link[1] > told):
                self.tell(replica, part, told)
        known.add(chain, now)

    def heard(self, replica: Replica, part: Chain, before: int, now: float) -> None:
        """Another gateway has sent a prompt to this replica; the part of its chain after `before` tokens is news."""
        if replica not in self._telling:
            self._of(replica).add(part, now, before)

    def _of(self, replica: Replica) -> Sent:
        known = self._sent.get(replica)
        if known is None:
            known = self._sent[replica] = Sent(self._remember_tokens)
        return known

    def answered(self, chain: Chain, replica: Replica, page: bytes) -> None:
        """The replica's answer says in which page the prompt ended."""
        told = self._telling.get(replica)
        if told is not None:
            self._spaces[told[0]].learn(chain, page)

    def forget(self, replica: Replica) -> None:
        """The replica was away: it may have been started anew."""
        if replica in self._sent:
            self._sent[replica].clear()

    # --- what feeds say ------------------------------------------------------------------------------------------

    def begin(self, replica: Replica, space: str) -> None:
        """The replica, which told nothing, begins to tell its pages, from none on."""
        number = next(free for free in range(len(self._by_number) + 1) if free not in self._by_number)
        self._by_number[number] = replica
        self._spaces.setdefault(space, PageSpace())
        self._telling[replica] = (space, number)

    def change(self, replica: Replica, removed: list[bytes], stored: list[tuple[bytes, bytes]]) -> None:
        """What has changed on a replica that has begun."""
        space, number = self._telling[replica]
        pages = self._spaces[space]
        pages.removed(number, removed)
        pages.stored(number, stored)

    def end(self, replica: Replica) -> Iterator[None]:
        """The replica tells nothing any more, from now on. To be gone through, at leisure, for what it held to go."""
        told = self._telling.pop(replica, None)
        if told is None:
            return iter(())
        space, number = told
        if any(other == space for other, _ in self._telling.values()):
            self._spaces[space].lost(number)
            return self._sweep(space, number)
        del self._spaces[space], self._by_number[number]
        return iter(())

    def _sweep(self, name: str, number: int) -> Iterator[None]:
        space = self._spaces[name]
        yield from space.sweep(number)
        del self._by_number[number]  # nobody else has been given it meanwhile
