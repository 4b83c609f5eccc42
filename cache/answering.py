"""What is asked of the answers: look-up, keeping, verdicts, feedback. The service hands every such request here.

    exact ─► the same words written otherwise ─► nearest questions ─► guards and threshold, without a promise
                                                                 └─► verifier and promise, under one

Every way to an answer that lies in other words than its question leads through the guards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Literal

import msgspec

from cache import judges
from cache.embedding.batcher import Batcher, Overloaded, Vector
from cache.embedding.embedder import Refused
from cache.key import CacheKey
from cache.learning import Learning, Pending, answer_number
from cache.promise.rule import Rule
from cache.stats import Recorder
from cache.store.answers import Store
from cache.store.found import Found, Near
from cache.store.places import Loading
from cache.verifier.neighbours import NEIGHBOURS, Candidate, Neighbour, candidate
from cache.wire import (
    Case,
    LookupReply,
    LookupRequest,
    StoreReply,
    StoreRequest,
    VerdictRequest,
)
from cache.words.asking import asked_form
from cache.words.guards import first_accepted, objection

# Why there is no vector now, where there may be one later.
_FOR_NOW = frozenset({"warming", "failed", "overloaded"})
# Comparisons by the embedder at one time; look-ups come first, so they may take their time.
_MOST_JUDGED_AT_ONCE = 64
# Of the other answers nearby, how many the embedder compares a fresh answer with.
_OTHERS_COMPARED = 3


class Answering:
    """Answers look-ups and takes answers in. `batcher` is None until the embedder is loaded; `state` says why."""

    def __init__(self, store: Store, learning: Learning, recorder: Recorder, *, load_wait_s: float) -> None:
        """`load_wait_s`: how long a look-up waits for questions that have yet to be read from the file."""
        self._load_wait_s = load_wait_s
        self._store = store
        self._learning = learning
        self._recorder = recorder
        self._judging: set[asyncio.Task[None]] = set()
        self.batcher: Batcher | None = None
        self.state = "warming"

    async def look_up(self, request: LookupRequest) -> LookupReply:
        """Find an answer, or say why there is none to give."""
        for key in (request.key, *request.larger):
            found = self._store.get_exact(key, ttl_s=request.ttl_s)
            if found is not None:
                self._learning.note(request.asker, found.entry.id)
                return self._give(request, found, "exact", 1.0)
        if request.mode == "exact":
            return LookupReply(request.id, "miss", reason="no_entry")
        for key in (request.key, *request.larger):
            self._store.prepare(key)  # what is not in memory is read while the question is embedded
        if request.rule is None:
            return await self._by_threshold(request)
        return await self._by_promise(request, request.rule)

    async def keep(self, request: StoreRequest) -> StoreReply:
        """Take an answer in, and compare it where its look-up gave a ticket."""
        self._learning.note(request.asker, request.entry.id)
        pending = self._learning.pending(request.ticket) if request.ticket else None
        if pending is None or pending.fresh is not None or pending.key.exact != request.key.exact:
            return self._put(request, await self._vector_to_keep(request))
        pending.fresh = request.entry
        try:
            text = judges.text_of(request.entry)
            others = [found for near in pending.others if (found := self._store.answer(near, pending.key)) is not None]
            known = [judges.text_of(found.entry) for found in (pending.found, *others)]
        except judges.NoVerdict as none:
            self._learning.settle(pending.ticket, None, none.reason)
            return self._put(request, pending.vector)
        # An answer that is kept already, word for word, need not be kept twice, whichever neighbour has it.
        equal = [judges.equal(text, other) for other in known]
        if equal[0]:
            self._learning.settle(pending.ticket, True, "exact")
        twin = next((found for found, same in zip((pending.found, *others), equal, strict=True) if same), None)
        if twin is not None and self._become_alias(pending, twin):
            self._recorder.stores += 1
            reply = StoreReply(request.id, stored_as="alias")
        else:
            reply = self._put(request, pending.vector)
        if not equal[0]:
            reply.case = self._compare(pending, text, known, others)
        return reply

    def judged(self, request: VerdictRequest) -> None:
        """Take the verdict of a model, or that there will be none."""
        pending = self._learning.pending(request.ticket)
        if pending is None:
            return
        if request.same is None or pending.fresh is None:  # a verdict without an answer is none
            self._learning.settle(request.ticket, None, request.why)
            return
        self._learning.settle(request.ticket, request.same, "model")
        if request.same:
            self._become_alias_later(pending, pending.found)

    def rate(self, request_id: str, team_id: str, good: bool) -> int | None:
        """Forget a bad answer and learn from it; learn from a good one.

        Returns: how many answers were forgotten; None where the request is not on record for that team.
        """
        entry_ids = self._learning.feedback(request_id, team_id, good)
        if entry_ids is None:
            return None
        evicted = 0
        for entry_id in entry_ids if not good else ():
            answer_id = self._store.answer_of(entry_id)
            if answer_id is not None and self._store.forget(answer_id):
                evicted += 1
        return evicted

    async def close(self) -> None:
        """End the comparisons under way."""
        for task in self._judging:
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)

    # Look-ups.

    async def _by_threshold(self, request: LookupRequest) -> LookupReply:
        """The same words written otherwise, then the nearest neighbours; both checked by the guards."""
        keys = (request.key, *request.larger)
        for key in keys:
            found = self._store.get_folded(key, ttl_s=request.ttl_s)
            if found is not None and objection(key.text, found.question) is None:
                self._learning.note(request.asker, found.entry.id)
                return self._give(request, found, "semantic", 1.0)
        vector = await self._vector(request.key)
        if isinstance(vector, str):
            return LookupReply(request.id, "miss", reason=vector)
        own = await self._near_enough(request, request.key, vector)
        for key in request.larger:
            if own.entry is not None:
                break
            larger = await self._near_enough(request, key, vector)
            own = own if larger.entry is None else larger
        return own

    async def _near_enough(self, request: LookupRequest, key: CacheKey, vector: Vector) -> LookupReply:
        """The nearest question in one place to which no guard objects, if it is near enough."""
        try:
            nearest = await self._nearest(request, key, vector)
        except Loading:
            return LookupReply(request.id, "miss", reason="loading")
        if not nearest:
            return LookupReply(request.id, "miss", reason="no_entry")
        questions = [(near.question, near.cosine) for near in nearest]
        place, reason = first_accepted(key.text, questions, request.threshold)
        found = None if place is None else self._store.answer(nearest[place], key, ttl_s=request.ttl_s)
        if found is not None:
            self._learning.note(request.asker, found.entry.id)
            return self._give(request, found, "semantic", min(found.cosine, 1.0))
        return LookupReply(request.id, "miss", score=nearest[0].cosine, reason=reason)

    async def _by_promise(self, request: LookupRequest, rule: Rule) -> LookupReply:
        """The candidate of the nearest neighbours, as its promise allows."""
        vector = await self._vector(request.key)
        if isinstance(vector, str):
            return LookupReply(request.id, "miss", reason=vector)
        try:
            nearest = await self._nearest(request, request.key, vector)
        except Loading:
            return LookupReply(request.id, "miss", reason="loading")
        best = _candidate(request.key.text, nearest)
        near = None if best is None else next(one for one in nearest if one.answer_id == best.answer_id)
        found = None if near is None else self._store.answer(near, request.key, ttl_s=request.ttl_s)
        if best is None or found is None:
            return LookupReply(request.id, "miss", reason="no_entry")
        others = _of_other_answers(nearest, best.answer_id)
        best = msgspec.structs.replace(best, answer_id=answer_number(found.entry.id), others=())
        verdict, ticket = self._learning.decide(
            rule,
            request.judge,
            best,
            found,
            others,
            key=request.key,
            vector=vector,
            asker=request.asker,
            comparable=request.auditable,
        )
        score = min(best.cosine, 1.0)
        if verdict.action == "serve":
            self._learning.note(request.asker, found.entry.id, verdict.ticket)
            return self._give(request, found, "semantic", score, verdict.p)
        reason = verdict.reason or best.objection
        if verdict.action == "miss":
            return LookupReply(request.id, "miss", score, None, reason, verdict.p, ticket=ticket)
        return LookupReply(
            request.id, verdict.action, score, None, reason, verdict.p, _age_s(found), found.entry.id, ticket
        )

    async def _nearest(self, request: LookupRequest, key: CacheKey, vector: Vector) -> list[Near]:
        """Raises `Loading`."""
        wait_s = self._load_wait_s
        return await self._store.nearest(key, vector, NEIGHBOURS, ttl_s=request.ttl_s, within_s=wait_s)

    def _give(
        self,
        request: LookupRequest,
        found: Found,
        outcome: Literal["exact", "semantic"],
        score: float,
        p: float | None = None,
    ) -> LookupReply:
        self._store.used(found.answer_id)
        return LookupReply(request.id, outcome, score, found.entry, None, p, _age_s(found), found.entry.id)

    async def _vector(self, key: CacheKey) -> Vector | str:
        """The vector of what is asked, or why there is none."""
        if self.batcher is None:
            return self.state
        try:
            return await self.batcher.embed(asked_form(key.text))
        except Refused as refusal:
            return refusal.reason
        except Overloaded:
            return "overloaded"

    # Answers that come in.

    async def _vector_to_keep(self, request: StoreRequest) -> Vector | Literal["none", "later"]:
        """With a vector an answer may be found by other words, without one for the same words only."""
        if request.mode == "exact":
            return "none"
        vector = await self._vector(request.key)
        if isinstance(vector, str):
            return "later" if vector in _FOR_NOW else "none"
        return vector

    def _put(self, request: StoreRequest, vector: Vector | Literal["none", "later"]) -> StoreReply:
        made = None if isinstance(vector, str) else vector
        kept = self._store.put(
            request.key,
            request.entry,
            made,
            request.asker.key_id,
            vector_later=isinstance(vector, str) and vector == "later",
        )
        if kept.reason is not None:
            self._recorder.refused_stores[kept.reason] += 1
            return StoreReply(request.id, kept.reason)
        self._recorder.stores += 1
        return StoreReply(request.id, stored_as="answer")

    def _compare(self, pending: Pending, fresh: str, known: list[str], others: list[Found]) -> Case | None:
        """Have the fresh answer compared with the candidate's, beside the request; a model is the caller's to ask."""
        if pending.judge == "model" and pending.action != "serve":
            question = pending.found.question
            return Case(pending.ticket, pending.action, pending.key.text, fresh, question, known[0])
        if pending.judge == "exact":
            self._learning.settle(pending.ticket, False, "exact")
        elif len(self._judging) >= _MOST_JUDGED_AT_ONCE:
            self._learning.settle(pending.ticket, None, "overloaded")
        else:
            task = asyncio.create_task(self._compare_vectors(pending, fresh, known, others))
            self._judging.add(task)
            task.add_done_callback(self._judging.discard)
        return None

    async def _compare_vectors(self, pending: Pending, fresh: str, known: list[str], others: list[Found]) -> None:
        """By the embedder. A fresh answer that is not the candidate's may be that of another neighbour."""
        try:
            same = await judges.alike(fresh, known[0], self.batcher)
        except judges.NoVerdict as none:
            self._learning.settle(pending.ticket, None, none.reason)
            return
        self._learning.settle(pending.ticket, same, "embedding")
        if same:
            self._become_alias_later(pending, pending.found)
            return
        for other, text in list(zip(others, known[1:], strict=True))[:_OTHERS_COMPARED]:
            with contextlib.suppress(judges.NoVerdict):
                if await judges.alike(fresh, text, self.batcher):
                    self._become_alias_later(pending, other)
                    return

    def _become_alias(self, pending: Pending, found: Found) -> bool:
        """Let the question find the answer of an earlier one."""
        answer_id = self._store.answer_of(found.entry.id)
        if answer_id is None:
            return False
        if self._store.add_alias(pending.key, answer_id, pending.vector, pending.asker.key_id) is not None:
            return False
        self._recorder.aliases_made += 1
        self._learning.note(pending.asker, found.entry.id)
        return True

    def _become_alias_later(self, pending: Pending, found: Found) -> None:
        """Likewise, unless the question was forgotten while its answers were compared: purged, or called bad."""
        if self._store.get_exact(pending.key) is not None:
            self._become_alias(pending, found)


def _age_s(found: Found) -> float:
    return max(0.0, time.time() - found.entry.created_at)


def _candidate(asked: str, nearest: list[Near]) -> Candidate | None:
    """The candidate among the neighbours, its answer named as the store does; None when there are none."""
    return candidate(asked, [Neighbour(near.question, near.answer_id, min(near.cosine, 1.0)) for near in nearest])


def _of_other_answers(nearest: list[Near], answer_id: int) -> list[Near]:
    """The nearest question of each answer but that one."""
    found: dict[int, Near] = {}
    for near in nearest:
        if near.answer_id != answer_id:
            found.setdefault(near.answer_id, near)
    return list(found.values())
