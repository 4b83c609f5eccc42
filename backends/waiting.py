"""A queue in front of what is busy (a backend's replicas, the gateway): bounded, and fair between those who ask.

It promises: first come, first served within one owner, turns between owners; when the queue is full, a newcomer whose
owner has fewer requests waiting takes the place of the latest request of the owner with the most. So one owner's flood
delays that owner.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Displaced(Exception):
    """Set on a request that had to leave a full queue for one of an owner with fewer."""


class FairQueue(Generic[T]):
    """Futures of what is waited for. It sets no result itself: `pop` gives the next one to whoever has it."""

    __slots__ = ("_lanes", "_most", "size")

    def __init__(self, most: int) -> None:
        self._most = most
        # By owner; the first one's turn is next. A lane is empty while its owner has a turn.
        self._lanes: OrderedDict[str, deque[asyncio.Future[T]]] = OrderedDict()
        self.size = 0

    def join(self, owner: str) -> asyncio.Future[T] | None:
        """A place at the end of the owner's lane; None if the queue is full."""
        if self.size >= self._most and not self._displace(owner):
            return None
        place: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(owner, deque()).append(place)
        self.size += 1
        return place

    def waiting(self, owner: str) -> int:
        """How many of this owner's requests wait."""
        return len(self._lanes.get(owner, ()))

    def leave(self, owner: str, place: asyncio.Future[T]) -> None:
        """Give a place up; nothing happens if it is not in the queue any more."""
        lane = self._lanes.get(owner)
        if lane is not None and place in lane:
            lane.remove(place)
            self.size -= 1
            self._shrink(owner, lane)

    def pop(self) -> asyncio.Future[T] | None:
        """The place whose turn it is; None if nobody waits."""
        turn = self.take()
        if turn is None:
            return None
        self.pass_on(turn[0])
        return turn[1]

    def heads(self) -> Iterator[tuple[str, asyncio.Future[T]]]:
        """The first place of every owner, in the order of their turns. After `grant`, to be asked for anew."""
        for owner, lane in self._lanes.items():
            while lane and lane[0].done():  # one that was cancelled and has not left yet
                lane.popleft()
                self.size -= 1
            if lane:
                yield owner, lane[0]

    def grant(self, owner: str) -> None:
        """The owner's first place gets what it waits for, which ends this turn."""
        self._lanes[owner].popleft()
        self.size -= 1
        self.pass_on(owner)

    def take(self, skip: Container[str] = ()) -> tuple[str, asyncio.Future[T]] | None:
        """As `pop`, but for owners to `skip`, and with its owner; `pass_on` or `put_back` says what came of it."""
        for owner, lane in self._lanes.items():
            if owner in skip:
                continue
            while lane:
                place = lane.popleft()
                self.size -= 1
                if not place.done():  # one that was cancelled and has not left yet
                    return owner, place
        return None

    def pass_on(self, owner: str) -> None:
        """The turn of this owner is over: it is that of the others now."""
        lane = self._lanes.get(owner)
        if lane is not None:
            self._lanes.move_to_end(owner)
            self._shrink(owner, lane)

    def put_back(self, owner: str) -> asyncio.Future[T]:
        """The turn came too early: a first place for this owner, whose turn it stays, even if the queue is full."""
        place: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if owner not in self._lanes:
            self._lanes[owner] = deque()
            self._lanes.move_to_end(owner, last=False)
        self._lanes[owner].appendleft(place)
        self.size += 1
        return place

    def _displace(self, owner: str) -> bool:
        if not self._lanes:
            return False  # no place for anybody
        longest = max(self._lanes, key=lambda name: len(self._lanes[name]))
        lane = self._lanes[longest]
        if len(lane) <= len(self._lanes.get(owner, ())) + 1:
            return False
        place = lane.pop()
        self.size -= 1
        self._shrink(longest, lane)
        if not place.done():
            place.set_exception(Displaced())
        return True

    def _shrink(self, owner: str, lane: deque[asyncio.Future[T]]) -> None:
        if not lane:
            del self._lanes[owner]
