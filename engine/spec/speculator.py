"""Decides how many drafts the next step takes, has them proposed, and learns from what became of them.

The scheduler asks `counts` with the requests that wait for their next token, then `propose` once they have pages, and
says in `checked` how many drafts held; the loop says in `timed` what a step took. Drafts are a help and never a duty: a
proposer that fails is switched off, and the engine goes on without.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.kv.prefix_cache import PrefixCache
from engine.limits import NUM_DRAFTS
from engine.scheduling.request import Request
from engine.spec.pace import StepCost, after_checking, after_pausing, allot
from engine.spec.proposer import Proposer

log = logging.getLogger("engine.spec")

# Drafts in one step: each takes logits of its own, and in a step with more of them none would pay.
MOST_DRAFTS = 64


@dataclass(slots=True)
class SpeculationStats:
    """Cumulative. A run is one request's drafts in one step; it yields its accepted drafts and one token more."""

    runs: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Speculator:
    """One proposer and what is known of its worth."""

    def __init__(
        self, proposer: Proposer | None = None, num_speculative_tokens: int = NUM_DRAFTS, *, adaptive: bool = True
    ) -> None:
        """`proposer` None: no speculation. `num_speculative_tokens`: drafts of one request in one step, at most.
        `adaptive` False: always as many as there can be.

        Raises:
            ValueError: `num_speculative_tokens` below 1.
        """
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, got {num_speculative_tokens}")
        self.stats = SpeculationStats()
        self._proposer = proposer
        self._most = num_speculative_tokens
        self.adaptive = adaptive
        self.cost = StepCost()

    @property
    def proposes(self) -> bool:
        """Whether there may be drafts."""
        return self._proposer is not None

    def counts(self, requests: Sequence[Request], *, num_tokens: int, most: int) -> dict[Request, int]:
        """How many drafts each of these requests should get; those that get none are left out.

        `num_tokens`: of the step without drafts; `most`: what the step's budget leaves for drafts.
        """
        proposer, most = self._proposer, min(most, MOST_DRAFTS)
        if proposer is None or not requests or most < 1:
            return {}
        try:
            offers = proposer.offers(requests, self._most)
        except Exception:
            self._switch_off()
            return {}
        # The run's last token is the model's own, and nothing is generated behind the end of what the request may hold.
        offers = [max(0, min(n, r.max_total_tokens - r.num_tokens - 1)) for r, n in zip(requests, offers, strict=True)]
        if not self.adaptive:
            return _in_order(requests, offers, most)
        taken = allot(
            [request.draft_rate for request in requests],
            offers,
            num_tokens=num_tokens,
            most=most,
            step_seconds=self.cost.seconds,
            seconds_per_depth=proposer.seconds_per_draft,
        )
        for request, offer, count in zip(requests, offers, taken, strict=True):
            if offer and not count:
                request.draft_rate = after_pausing(request.draft_rate)
        return {request: count for request, count in zip(requests, taken, strict=True) if count}

    def propose(self, counts: Mapping[Request, int], cache: PrefixCache) -> dict[Request, list[int]]:
        """Up to so many drafts for these requests, as far as pages are to be had; afterwards they hold them."""
        if self._proposer is None or (self._proposer.waits_for_copies and cache.owes_copies):
            return {}
        roomy: dict[Request, int] = {}
        for request, count in counts.items():
            if (count := min(count, cache.room(request))) > 0:
                cache.extend(request, request.num_tokens + count)
                roomy[request] = count
        drafts: dict[Request, list[int]] = {}
        try:
            drafts = self._proposer.propose(roomy) if roomy else {}
        except Exception:
            self._switch_off()
        for request in roomy:
            cache.trim(request, request.num_tokens + len(drafts.get(request, ())))
        return drafts

    def checked(self, request: Request, drafted: int, accepted: int) -> None:
        """Of a request's drafts so many held."""
        self.stats.runs += 1
        self.stats.drafted_tokens += drafted
        self.stats.accepted_tokens += accepted
        request.draft_rate = after_checking(request.draft_rate, drafted, accepted)

    def timed(self, num_tokens: int, seconds: float) -> None:
        """The model took so long for a step of so many tokens."""
        self.cost.add(num_tokens, seconds)

    def forget(self, request: Request) -> None:
        """The request ended, or its pages are taken away."""
        if self._proposer is not None:
            self._proposer.forget(request)

    def _switch_off(self) -> None:
        log.exception("speculation is switched off: the proposer failed")
        self._proposer = None


def _in_order(requests: Sequence[Request], offers: Sequence[int], most: int) -> dict[Request, int]:
    counts: dict[Request, int] = {}
    for request, offer in zip(requests, offers, strict=True):
        if count := min(offer, most):
            counts[request] = count
            most -= count
    return counts
