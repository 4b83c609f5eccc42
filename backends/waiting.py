"""The queue in front of a backend whose replicas are all busy: bounded, and fair between those who ask.

It promises: first come, first served within one owner, turns between owners; when the queue is full, a newcomer whose
owner has fewer requests waiting takes the place of the latest request of the owner with the most. So one owner's flood
delays that owner.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Displaced(Exception):
    """Set on a request that had to leave a full queue for one of an owner with fewer."""


class FairQueue(Generic[T]):
    """Futures of what is waited for. It sets no result itself: `pop` gives the next one to whoever has it."""

    __slots__ = ("_lanes", "_most", "size")

    def __init__(self, most: int) -> None:
        self._most = most
        self._lanes: dict[str, deque[asyncio.Future[T]]] = {}  # by owner; the first one's turn is next
        self.size = 0

    def join(self, owner: str) -> asyncio.Future[T] | None:
        """A place at the end of the owner's lane; None if the queue is full."""
        if self.size >= self._most and not self._displace(owner):
            return None
        place: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._lanes.setdefault(owner, deque()).append(place)
        self.size += 1
        return place

    def leave(self, owner: str, place: asyncio.Future[T]) -> None:
        """Give a place up; nothing happens if it is not in the queue any more."""
        lane = self._lanes.get(owner)
        if lane is not None and place in lane:
            lane.remove(place)
            self._shrink(owner, lane)

    def pop(self) -> asyncio.Future[T] | None:
        """The place whose turn it is; None if nobody waits."""
        while self._lanes:
            owner, lane = next(iter(self._lanes.items()))
            place = lane.popleft()
            self._shrink(owner, lane)
            if lane:
                self._lanes[owner] = self._lanes.pop(owner)  # behind the other owners
            if not place.done():  # one that was cancelled and has not left yet
                return place
        return None

    def _displace(self, owner: str) -> bool:
        if not self._lanes:
            return False  # no place for anybody
        longest = max(self._lanes, key=lambda name: len(self._lanes[name]))
        lane = self._lanes[longest]
        if len(lane) <= len(self._lanes.get(owner, ())) + 1:
            return False
        place = lane.pop()
        self._shrink(longest, lane)
        if not place.done():
            place.set_exception(Displaced())
        return True

    def _shrink(self, owner: str, lane: deque[asyncio.Future[T]]) -> None:
        self.size -= 1
        if not lane:
            del self._lanes[owner]
