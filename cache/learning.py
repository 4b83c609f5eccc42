"""What the cache learns from: hits under a promise, the fresh answers compared with them, and what people say.

    look-up ─► candidate ─► decide ──serve──► the answer is given
                              └─audit, shadow, miss─► ticket ─► fresh answer ─► the same? ─► observe

A ticket waits for its fresh answer for a bounded time, and there is a bounded number of them; one that comes to nothing
is counted by its reason. What was decided and by what numbers is the promise's own (`cache/promise`); here is what
belongs to a ticket besides: the answers, the questions and their vectors.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cache.embedding.batcher import Vector
from cache.entry import Entry
from cache.key import CacheKey
from cache.notebook import Given, Notebook
from cache.promise.events import Event
from cache.promise.keeper import Keeper, Unusable
from cache.promise.rule import Action, Rule, Standing, Verdict
from cache.stats import Recorder
from cache.store.found import Found, Near
from cache.verifier.neighbours import Candidate
from cache.wire import Asker, Judge

_log = logging.getLogger(__name__)
_MOST_TICKETS = 10_000
# Longer than a model may take to answer and another to judge.
_PATIENCE_S = 900.0


class Pending(msgspec.Struct, kw_only=True):
    """A ticket: what was found for a question, and waits to be compared with its fresh answer.

    `found` is the candidate's answer, `others` are further answers of the neighbourhood. `fresh` is there once the
    answer has come and somebody else judges it.
    """

    ticket: int
    of_keeper: int
    action: Action
    judge: Judge
    key: CacheKey
    asker: Asker
    vector: Vector
    found: Found
    others: Sequence[Near]
    ends: float
    fresh: Entry | None = None


class Sharing(Protocol):
    """Other processes that keep the same promises."""

    def tell(self, event: Event) -> bool:
        """Tell them. True: the event comes back to be applied; False: the caller has to apply it."""
        ...

    async def may_fit(self, rule: Rule) -> bool:
        """Whether this process is the one to find a bar anew now."""
        ...


class Learning:
    """All tickets of a process, and its promises. Runs on one thread."""

    def __init__(
        self, keeper: Keeper, notebook: Notebook, recorder: Recorder, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.sharing: Sharing | None = None  # None: this process learns for itself
        self._keeper = keeper
        self._notebook = notebook
        self._recorder = recorder
        self._clock = clock
        self._pending: OrderedDict[int, Pending] = OrderedDict()  # oldest first
        # A gateway may hold tickets of an earlier process: numbers begin where no earlier one has come to.
        self._numbers = itertools.count(time.time_ns())
        self._unwritten: dict[str, bytes] = {}  # promises that the disk did not take
        for dump in notebook.promises():
            try:
                keeper.load(dump)
            except Unusable as error:
                _log.warning("how a promise stood cannot be read, it begins anew: %s", error)

    def decide(
        self,
        rule: Rule,
        judge: Judge,
        candidate: Candidate,
        found: Found,
        others: Sequence[Near],
        *,
        key: CacheKey,
        vector: Vector,
        asker: Asker,
        comparable: bool,
    ) -> tuple[Verdict, int]:
        """What to do with a candidate, and the ticket to hand its fresh answer in with; 0: nothing is to be compared.

        Args:
            comparable: a fresh answer can follow; else a hit that was to be audited is given.
        """
        verdict = self._keeper.decide(rule, candidate)
        of_keeper = verdict.ticket
        if of_keeper is None or verdict.action == "serve":
            return verdict, 0
        if not comparable:
            self._keeper.observe(of_keeper, None)
            self._recorder.unjudged["not_comparable"] += 1
            if verdict.action == "audit":
                verdict = msgspec.structs.replace(verdict, action="serve")
            return verdict, 0
        pending = Pending(
            ticket=next(self._numbers),
            of_keeper=of_keeper,
            action=verdict.action,
            judge=judge,
            key=key,
            asker=asker,
            vector=vector,
            found=found,
            others=others,
            ends=self._clock() + _PATIENCE_S,
        )
        self._pending[pending.ticket] = pending
        if len(self._pending) > _MOST_TICKETS:
            self._come_to_nothing(next(iter(self._pending)), "too_many")
        return verdict, pending.ticket

    def pending(self, ticket: int) -> Pending | None:
        """What a ticket stands for; None when it is unknown, settled, or of another process."""
        return self._pending.get(ticket)

    def settle(self, ticket: int, same: bool | None, why: str) -> bool:
        """Learn whether the answers of a ticket are the same. None: they were not compared, `why` is the reason; else
        it is who judged. False: there is no such ticket."""
        pending = self._pending.pop(ticket, None)
        if pending is None:
            return False
        self._learn(self._keeper.judged(pending.of_keeper, same))
        if same is None:
            self._recorder.unjudged[why] += 1
        else:
            self._recorder.judged[f"{why} {'same' if same else 'different'}"] += 1
        return True

    def note(self, asker: Asker, entry_id: str, decision: int | None = None) -> None:
        """Remember which answer a request got or gave, so that feedback on it finds the answer.

        `decision` is the ticket of the verdict by which a hit was given.
        """
        if asker.request_id:
            self._notebook.note(asker.request_id, Given(asker.team_id, entry_id, decision or 0))

    def shared(self, asker: Asker, answer_of: str) -> None:
        """A request got the answer of another one: what is known of that one is known of it."""
        given = self._notebook.find(answer_of)
        if given is not None and asker.request_id:
            self._notebook.note(asker.request_id, msgspec.structs.replace(given, team_id=asker.team_id, rated=False))

    def feedback(self, request_id: str, team_id: str, good: bool) -> list[str] | None:
        """Learn what somebody thinks of an answer.

        Returns: names of the entries that it may be kept under, none if the request was rated before; None where the
            request is not on record for that team.
        """
        given = self._notebook.find(request_id)
        if given is None or given.team_id != team_id:
            return None
        if given.rated:
            return []
        self._notebook.note(request_id, msgspec.structs.replace(given, rated=True))
        self._recorder.feedback["good" if good else "bad"] += 1
        if given.decision:
            self._learn(self._keeper.rated(given.decision, good))
            # The question may have become one of an earlier answer's since.
        now = self._notebook.find(given.entry_id)
        return [given.entry_id] if now is None else [given.entry_id, now.entry_id]

    def standings(self) -> list[Standing]:
        """How each promise stands, by name."""
        return self._keeper.standings()

    def expire(self) -> None:
        """Give up the tickets whose time is over."""
        now = self._clock()
        while self._pending and (oldest := next(iter(self._pending.values()))).ends <= now:
            self._come_to_nothing(oldest.ticket, "lost")

    async def refit(self) -> None:
        """Find bars and chances anew where enough was learned; the work is done beside the event loop."""
        for work in list(self._keeper.due()):
            if self.sharing is not None and not await self.sharing.may_fit(work.rule):
                continue
            self._learn(self._keeper.refit(await asyncio.to_thread(work.run)))

    async def flush(self) -> None:
        """Bring to disk what is new, in pieces between which look-ups have their turn."""
        while True:
            self._unwritten |= self._keeper.dump()
            if not self._notebook.flush(self._unwritten):
                return
            self._unwritten.clear()
            if not self._notebook.unwritten:
                return
            await asyncio.sleep(0)

    def _learn(self, event: Event | None) -> None:
        """Where promises are shared, what is told comes back in the order that holds for all, and is applied then."""
        if event is not None and not (self.sharing is not None and self.sharing.tell(event)):
            self._keeper.apply(event)

    def _come_to_nothing(self, ticket: int, why: str) -> None:
        self.settle(ticket, None, why)


def answer_number(entry_id: str) -> int:
    """An answer's number for verifier and promise: the same in every process and after every restart."""
    return int.from_bytes(hashlib.blake2b(entry_id.encode(), digest_size=8).digest()) >> 1
