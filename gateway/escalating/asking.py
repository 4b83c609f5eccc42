"""Ask the models, and where the policy wants it, check the answer before anybody sees it and ask a larger tier.

    dispatch → examine ──passes──────────────────────────────────────────► give
                 └─fails─► put by → time, money, a larger tier? ─yes─► dispatch → examine → …
                                         └─no─► the best that there is ─► give, or an error

Each step is an attempt with a row of its own. It promises that the client is never worse off than without the checks:
if the larger tier cannot be asked, fails or says less, the earlier answer is given. Whatever is not given is in the
ledger as `escalated`; what is given is settled by whoever gives it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from backends.attempt import Answer, StreamCut
from backends.dispatch import Attempt, Dispatched
from gateway.accounting import Accounting
from gateway.dialects.errors import GatewayError, Unavailable
from gateway.dispatching import dispatch
from gateway.escalating import answers
from gateway.escalating.checks import Found, examine
from gateway.escalating.confidence import wanted_by_client
from gateway.escalating.holding import Held, hold, signs_of_life
from gateway.escalating.ladder import Obstacle, candidates_after, covered, ends_at
from gateway.life import Climb, Life
from gateway.metering import Meter
from gateway.relay import cut_short
from policies.schema.escalation import Escalate

if TYPE_CHECKING:
    from backends.dispatch import Candidate
    from gateway.services import Services


MOST_AT_ONCE: Final = 1000

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class Step(msgspec.Struct):
    """A tier's whole answer, and what the checks found."""

    answer: Dispatched
    attempt: Attempt
    found: Found
    seconds: float

    @property
    def candidate(self) -> Candidate:
        return self.attempt.candidate


async def ask(services: Services, life: Life, accounting: Accounting) -> Dispatched:
    """The answer to give. One that is checked is there as a whole.

    Raises:
        GatewayError: what to tell the client when nobody answered, or no answer will do.
    """
    decision, asked = life.decision, life.asked
    assert decision is not None
    assert asked is not None
    escalate = decision.escalate
    if escalate is None or asked.operation not in ("chat", "completions"):
        return await dispatch(services, life, accounting)
    began = time.monotonic()
    answer = await dispatch(services, life, accounting)
    async with signs_of_life(life):
        return await _Climbing(services, life, accounting, escalate).climb(answer, began)


class _Climbing:
    """One request on its way up."""

    def __init__(self, services: Services, life: Life, accounting: Accounting, escalate: Escalate) -> None:
        self._services = services
        self._life = life
        self._accounting = accounting
        self._escalate = escalate
        self._input = life.input_estimate, life.input_hold
        self._ends = ends_at(services, life)
        self._climb = Climb()
        self._steps = 0  # asked beyond the first
        self._best: Step | None = None

    async def climb(self, answer: Dispatched, began: float) -> Dispatched:
        """Up from the first answer, to the one that is given. Raises as `ask`."""
        last: Step | None = None
        while True:
            try:
                step = await self._checked(answer, began)
            except GatewayError as error:
                if last is None or self._best is None:
                    raise
                failed = answer.attempt.candidate
                self._accounting.note("escalation", {"tier": failed.tier, "failed": error.code})
                following = await self._next(last, failed)
                if following is None:
                    return self._settle_for(self._best)
                answer, began = following
                continue
            self._climb.tiers.append(step.candidate.tier)
            if step.found.reason is None:
                return self._give(step)
            self._climb.reasons.append(step.found.reason)
            self._life.climb = self._climb
            self._accounting.put_by()
            if self._best is None or step.found.gravity <= self._best.found.gravity:
                self._best = step
            last = step
            following = await self._next(step, step.candidate)
            if following is None:
                return self._settle_for(self._best)
            answer, began = following

    async def _checked(self, answer: Dispatched, began: float) -> Step:
        """The answer as a whole, with what is wrong with it.

        Raises:
            GatewayError: it broke off, or a budget was spent while it came.
        """
        services, life, escalate = self._services, self._life, self._escalate
        assert life.asked is not None
        try:
            if life.stream:
                answer = held = await hold(life, self._accounting, answer)
                if not held.complete:
                    self._accounting.note("escalation", {"tier": held.attempt.candidate.tier, "unchecked": "too_large"})
                    held.strips = self._strips()
                    return Step(held, held.attempt, Found(None), time.monotonic() - began)
                await held.aclose()
                said = await _beside(len(held.kept), answers.of_stream, held.kept)
            else:
                assert answer.whole is not None
                life.meter = Meter()
                life.meter.see_whole(answer.whole.completion)
                said = await _beside(len(answer.whole.body) // 200, answers.of_whole, answer.whole.completion)
            curve = services.curves.of(answer.attempt.candidate.model) if escalate.asks_confidence else None
            found = await examine(escalate, life.asked, said, life.meter.usage, curve, services.schemas)
        except StreamCut as cut:
            await answer.aclose()
            raise cut_short(self._accounting, cut) from cut
        except BaseException:
            await answer.aclose()
            raise
        self._learn(answer.attempt.candidate, found)
        if self._strips():
            await _take_logprobs_out(answer)
        return Step(answer, answer.attempt, found, time.monotonic() - began)

    def _learn(self, candidate: Candidate, found: Found) -> None:
        """Tell what the checks say of the tier: faults, and apart from them how often it is too unsure."""
        life, record = self._life, self._services.outcomes.record
        sound = found.reason in (None, "low_confidence")
        if self._escalate.when != ("low_confidence",):
            record(life, sound, "validation", tier=candidate.tier, model=candidate.model)
        if sound and found.confidence is not None:
            record(life, found.reason is None, "escalation", tier=candidate.tier, model=candidate.model)

    def _strips(self) -> bool:
        """Whether the answer has log-probabilities that only the gateway wanted."""
        assert self._life.asked is not None
        return self._escalate.asks_confidence and not wanted_by_client(self._life.asked.payload)

    async def _next(self, last: Step, candidate: Candidate) -> tuple[Dispatched, float] | None:
        """The answer of a tier above that of `candidate`, not yet checked, and when it was asked for; None where there
        is none. `last` is the answer that failed."""
        services, life = self._services, self._life
        reason = last.found.reason
        assert reason is not None
        while True:
            life.input_estimate, life.input_hold = self._input  # a stream that was continued has raised them
            candidates = await candidates_after(services, life, candidate, reason)
            obstacle: Obstacle | None = None
            if self._steps >= self._escalate.at_most:
                obstacle = "steps"
            elif not candidates:
                obstacle = "tier"
            elif time.monotonic() + last.seconds >= self._ends:
                obstacle = "time"
            elif not await covered(services, life, candidates):
                obstacle = "budget"
            following = None if obstacle else candidates[0].tier
            self._record(last, following, obstacle)
            if obstacle is not None:
                return None
            self._steps += 1
            began = time.monotonic()
            try:
                return await dispatch(services, life, self._accounting, candidates, self._ends), began
            except GatewayError as error:
                self._accounting.note("escalation", {"tier": following, "failed": error.code})
                candidate = candidates[0]

    def _record(self, last: Step, following: str | None, obstacle: Obstacle | None) -> None:
        found, candidate = last.found, last.candidate
        said: dict[str, Any] = {"tier": candidate.tier, "model": candidate.model, "reason": found.reason}
        if found.confidence is not None:
            said["confidence"] = round(found.confidence, 4)
        said |= {"next": following} if obstacle is None else {"stopped_by": obstacle}
        self._accounting.note("escalation", said)
        self._services.metrics.escalations.labels(candidate.tier, str(found.reason), following or str(obstacle)).inc()

    def _settle_for(self, best: Step) -> Dispatched:
        """No answer passed: the best of them, unless the policy would rather have an error."""
        if self._escalate.otherwise == "error":
            reasons = ", ".join(dict.fromkeys(self._climb.reasons))
            raise Unavailable(
                f"No answer passed the checks of the policy ({reasons}). Ask in other words, or name a model.",
                status=502,
                code="answer_failed_checks",
            )
        self._accounting.take_up(best.attempt)
        return self._give(best)

    def _give(self, step: Step) -> Dispatched:
        """The client's answer is counted as it gets it, and whatever came after it is forgotten."""
        self._life.meter, self._life.served = Meter(), None
        return step.answer


async def _take_logprobs_out(answer: Dispatched) -> None:
    if isinstance(answer, Held):
        answer.strips = True
        answer.kept = await _beside(len(answer.kept), answers.without_logprobs_each, answer.kept)
    elif isinstance(answer.whole, Answer):
        answer.whole = await _beside(len(answer.whole.body) // 200, answers.without_logprobs, answer.whole)


async def _beside(pieces: int, work: Callable[[_Given], _Made], given: _Given) -> _Made:
    """Do the work at once, or of an answer of many pieces (a token each) beside the event loop."""
    return work(given) if pieces <= MOST_AT_ONCE else await asyncio.to_thread(work, given)
