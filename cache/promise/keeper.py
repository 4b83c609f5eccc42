"""The keeper of the promises: all of a process, each with its own labels, bar and bound.

    verdict = keeper.decide(rule, candidate)     # on the way of a request
    keeper.observe(verdict.ticket, same=True)    # when the fresh answer was compared with the candidate's
    for work in keeper.due(): keeper.adopt(work.run())    # in a task of its own; `run` may go to a thread

Time and chance come from outside, so that a simulation replays exactly. One thread, but for `Work.run`.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from cache.promise.events import Event, Lesson, Refit
from cache.promise.fit import Array, Fit, Labels, fit
from cache.promise.memory import Pending, Tickets
from cache.promise.promise import FEWEST_FOR_BAR, Promise
from cache.promise.rule import Action, Kind, Rule, Standing, Verdict
from cache.promise.saved import FORMAT, Unusable, restored, saved
from cache.verifier.model import Verifier, prior
from cache.verifier.neighbours import Candidate

__all__ = ["Keeper", "Unusable", "Work"]

# Rules at a time: a policy that is rolled out to a share of its traffic has two.
_MOST_PROMISES = 64
_MOST_TICKETS = 8192
# How much the prior weighs: as much as some dozens of labels.
PRIOR_STRENGTH = 1.0


class Work(msgspec.Struct, frozen=True):
    """A fit to be made: `run` computes it from copies (some 30 ms for 4,000 labels) and touches nothing else."""

    rule: Rule
    seen: int
    labels: Labels
    trusted: int
    prior: Array
    made: Fit | None = None

    def run(self) -> Work:
        made = fit(
            self.labels,
            self.prior,
            strength=PRIOR_STRENGTH,
            promise=self.rule.max_false_hit_rate,
            fewest=FEWEST_FOR_BAR,
            trusted=self.trusted,
        )
        return msgspec.structs.replace(self, made=made)


class Keeper:
    """Decides which answers may be served under which promise.

    Args:
        verifier: where every promise starts; the shipped one by default.
        clock: Unix time in seconds.
        chance: drawn evenly from [0, 1); decides which hits are audited, so it must not be known to those who ask.
    """

    def __init__(
        self,
        verifier: Verifier | None = None,
        *,
        clock: Callable[[], float] = time.time,
        chance: Callable[[], float] | None = None,
        first_ticket: int | None = None,
    ) -> None:
        self._verifier = prior() if verifier is None else verifier
        self._prior = np.array(
            [
                self._verifier.offset + self._verifier.slope * self._verifier.intercept,
                *(self._verifier.slope * weight for weight in self._verifier.coefficients),
            ]
        )
        self._clock = clock
        lot = random.SystemRandom()
        self._chance = lot.random if chance is None else chance
        # Tickets of an earlier life must not be taken for those of this one.
        self._tickets = Tickets(lot.getrandbits(40) << 20 if first_ticket is None else first_ticket, _MOST_TICKETS)
        self._promises: OrderedDict[Rule, Promise] = OrderedDict()  # least recently used first
        self._changed: set[Rule] = set()

    @property
    def meaning(self) -> str:
        """What a lesson's numbers depend on: the verifier, and the form in which a promise is saved."""
        return f"verifier {self._verifier.version}, format {FORMAT}"

    def decide(self, rule: Rule, candidate: Candidate | None) -> Verdict:
        """What to do with a request whose nearest answer is `candidate`. Some 20 µs."""
        if candidate is None:
            return Verdict("miss", 0.0, "no_candidate")
        promise = self._promise(rule)
        features = self._verifier.standardised(candidate.features)
        p = promise.chance(features, candidate.answer_id)
        action: Action = "miss"
        kind: Kind = "guarded"
        reason = candidate.objection
        if reason is None:
            action, reason = promise.decide(p, self._chance())
            kind = action
        self._changed.add(rule)
        pending = Pending(rule, promise.regime.number, kind, candidate.answer_id, tuple(features))
        return Verdict(action, p, reason, self._tickets.issue(pending))

    def observe(self, ticket: int, same: bool | None) -> None:
        """The judge's word on a verdict that was not served: whether the fresh answer says the same as the candidate's.

        None: there was no fresh answer, or no word on it. A ticket that is unknown or was used already changes nothing.
        """
        lesson = self.judged(ticket, same)
        if lesson is not None:
            self.apply(lesson)

    def judged(self, ticket: int, same: bool | None) -> Lesson | None:
        """What `observe` would learn, for the caller to `apply`; None where there is nothing."""
        pending = self._tickets.judged(ticket)
        promise = self._promises.get(pending.rule) if pending else None
        if pending is None or promise is None:
            return None
        if same is None:
            promise.totals.unjudged += pending.kind in ("audit", "shadow")
            self._changed.add(pending.rule)
            return None
        return self._lesson(pending, pending.kind, same)

    def feedback(self, ticket: int, good: bool) -> bool:
        """A user's word on a verdict that was served; False when the ticket is unknown or was used already.

        It moves the chances. It counts for no bar and no bound: users speak about what they please.
        """
        lesson = self.rated(ticket, good)
        if lesson is not None:
            self.apply(lesson)
        return lesson is not None

    def rated(self, ticket: int, good: bool) -> Lesson | None:
        """What `feedback` would learn, for the caller to `apply`; None where there is nothing."""
        pending = self._tickets.rated(ticket)
        return self._lesson(pending, "serve", good) if pending and pending.rule in self._promises else None

    def _lesson(self, pending: Pending, kind: Kind, right: bool) -> Lesson:
        return Lesson(
            pending.rule, kind, pending.regime, pending.features, pending.answer_id, right, round(self._clock(), 3)
        )

    def apply(self, event: Event) -> None:
        """Learn a lesson, or take over a refit, unless a later one was."""
        promise = self._promise(event.rule)
        self._changed.add(event.rule)
        match event:
            case Lesson():
                promise.learn(event.kind, event.regime, event.features, event.answer_id, event.right, event.at)
            case Refit():
                if event.seen > max(promise.trusted_from, promise.fitted_at):
                    made = Fit(np.array(event.coefficients), dict(event.shifts), event.bar)
                    promise.adopt(made, event.seen, event.at)

    def forget(self, answer_id: int) -> None:
        """An answer is gone for good; a later one under its number starts without a shift."""
        for rule, promise in self._promises.items():
            if promise.forget(answer_id):
                self._changed.add(rule)

    def due(self) -> Iterator[Work]:
        """The fits that are worth making now."""
        for promise in list(self._promises.values()):
            if promise.due:
                memory = promise.memory
                first = memory.seen - len(memory)
                yield Work(
                    promise.rule, memory.seen, memory.labels(), max(0, promise.trusted_from - first), self._prior
                )

    def adopt(self, work: Work) -> None:
        """Take over a fit that was run."""
        self.apply(self.refit(work))

    def refit(self, work: Work) -> Refit:
        """A fit that was run, for the caller to `apply`."""
        if work.made is None:
            raise ValueError("the work was not run: adopt(work.run())")
        made = work.made
        coefficients = tuple(made.coefficients.tolist())
        return Refit(work.rule, work.seen, coefficients, made.shifts, made.bar, round(self._clock(), 3))

    def standing(self, policy: str) -> Standing | None:
        """How the promise of a policy stands, of several the one used last; None when it has none."""
        found = [promise for rule, promise in self._promises.items() if rule.policy == policy]
        return found[-1].standing() if found else None

    def standings(self) -> list[Standing]:
        """How every promise stands, the one used last at the end."""
        return [promise.standing() for promise in self._promises.values()]

    def dump(self) -> dict[str, bytes]:
        """Each promise that changed since the last dump, under a name that stays the same."""
        changed, self._changed = self._changed, set()
        return {name_of(rule): self.saved(rule) for rule in changed if rule in self._promises}

    def saved(self, rule: Rule) -> bytes:
        """One promise, for `load` or `take_over`."""
        return saved(self._promises[rule], self._verifier.version)

    def labels(self) -> dict[Rule, int]:
        """How many judged candidates each promise rests on."""
        return {rule: promise.totals.labels for rule, promise in self._promises.items()}

    def load(self, data: bytes, *, keep_answers: bool = True) -> None:
        """Take over a promise that `dump` gave; `keep_answers` False where answers have new numbers.

        Raises:
            Unusable: the bytes are damaged or of another version.
        """
        promise = restored(data, self._verifier.version, self._prior, keep_answers=keep_answers)
        self._promises[promise.rule] = promise

    def take_over(self, data: bytes) -> None:
        """Go on with what another process has learned in place of what is known here, and count on what is given here.

        Verdicts that the judge has not spoken on are forgotten: they were decided by other numbers.

        Raises:
            Unusable: see `load`.
        """
        promise = restored(data, self._verifier.version, self._prior, keep_answers=True)
        own = self._promises.get(promise.rule)
        if own is not None:
            promise.keep_counts(own)
            self._tickets.drop(promise.rule)
        self._promises[promise.rule] = promise
        self._changed.add(promise.rule)

    def _promise(self, rule: Rule) -> Promise:
        promise = self._promises.get(rule)
        if promise is None:
            promise = Promise(rule, self._prior, self._clock())
            kin = [other for other in self._promises.values() if other.rule.policy == rule.policy]
            if kin:
                promise.inherit(kin[-1])
            self._promises[rule] = promise
            if len(self._promises) > _MOST_PROMISES:
                self._promises.popitem(last=False)
        else:
            self._promises.move_to_end(rule)
        return promise


def name_of(rule: Rule) -> str:
    """A name for a promise, the same in every process."""
    return hashlib.sha256(msgspec.json.encode(rule, order="deterministic")).hexdigest()[:32]
