"""Answers to one prompt share its pages: the first computes them, the others take them over and copy what they change.

All of them draw their first tokens from the one row that ends the prompt, each with its own parameters. While they wait
for rows, their group holds the prompt's pages itself, so that they are there even if the first answer has ended; the
last partly filled page is copied when somebody writes to it. It works without the prefix cache, too. Held pages are
given up before anybody is preempted for want of them: then the next sibling computes the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.kv.prefix_cache import PrefixCache
from engine.scheduling.request import Request


@dataclass(slots=True, eq=False)
class SiblingGroup:
    """Requests that still have to get their prompt. `block_table`: the pages that hold it, once one has computed it."""

    num_members: int
    leader: Request | None = None
    block_table: list[int] = field(default_factory=list)


class Siblings:
    """All groups of one scheduler. A request belongs to its group until its prompt is there."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._holding: list[SiblingGroup] = []
        self._group_of: dict[Request, SiblingGroup] = {}

    def join(self, requests: Sequence[Request]) -> None:
        """Make these requests, of one prompt, siblings; one alone is none."""
        if len(requests) > 1:
            self._group_of |= dict.fromkeys(requests, SiblingGroup(len(requests)))

    def waits(self, request: Request) -> bool:
        """Whether the prompt should be left to a sibling; if nobody computes it, this request is the one to do so."""
        group = self._group_of.get(request)
        if group is None or group.block_table:
            return False
        if group.leader is None:
            group.leader = request
        return group.leader is not request

    def followers(self, request: Request) -> list[Request]:
        """Who can draw its first token where this request does: siblings whose prompt it has just computed for them."""
        group = self._group_of.get(request)
        if group is None or group.leader is not request or group.block_table:
            return []
        others = [other for other, its in self._group_of.items() if its is group and other is not request]
        return [other for other in others if not other.num_generated_tokens and other.score_from is None]

    def can_share(self, request: Request) -> bool:
        """Whether the prompt's pages are here for this request. Who wants its prompt scored must compute it."""
        group = self._group_of.get(request)
        return group is not None and bool(group.block_table) and request.score_from is None

    def share(self, request: Request) -> None:
        """Give a request that holds no pages all of the prompt; the token that it has drawn has to run next."""
        self._cache.fork(self._group_of[request].block_table, request, request.num_prompt_tokens)
        self.leave(request)

    def computed(self, request: Request) -> None:
        """A request has computed its whole prompt: keep the pages for siblings that wait."""
        group = self._group_of.get(request)
        if group is None:
            return
        if group.num_members > 1 and not group.block_table:
            group.block_table = self._cache.hold(request, request.num_prompt_tokens)
            self._holding.append(group)
        self.leave(request)

    def leave(self, request: Request) -> None:
        """A request needs its siblings no more, or has ended. Harmless for those without."""
        group = self._group_of.pop(request, None)
        if group is None:
            return
        group.num_members -= 1
        if group.leader is request:
            group.leader = None
        if group.num_members == 0:
            self._let_go(group)

    def drop(self, *, but: Request | None = None) -> bool:
        """Give up the pages of all groups, except of the one of `but`; False if there were none."""
        kept = None if but is None else self._group_of.get(but)
        dropped = [group for group in self._holding if group is not kept]
        for group in dropped:
            self._let_go(group)
        return bool(dropped)

    def holders(self) -> Iterable[SiblingGroup]:
        """The groups that hold pages, for checks."""
        return self._holding

    def _let_go(self, group: SiblingGroup) -> None:
        self._cache.let_go(group.block_table)
        group.block_table = []
        self._holding = [other for other in self._holding if other is not group]
