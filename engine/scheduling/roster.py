"""The requests that are here, waiting or running, and the pages that they hold: one way in, one way out.

The scheduler decides who runs. How a request is admitted, started, sent back to the queue, forked and ended is here,
so that its pages are released exactly once, whatever happens to it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec.structs import replace

from engine.adapters.store import LoadedAdapter
from engine.kv.block_pool import PoolCorrupt
from engine.kv.prefix_cache import PrefixCache
from engine.limits import NeverFits, QueueFull, SchedulerConfig, check_length
from engine.messages import NewRequest, Output
from engine.models.pooling import PoolingSpec
from engine.scheduling.assumption import Assumption
from engine.scheduling.beams import Beams, check_beams
from engine.scheduling.request import Request, RequestStatus, check_request
from engine.scheduling.siblings import Siblings
from engine.scheduling.step_budget import StepBudget
from engine.scheduling.turns import Turns
from engine.spec.speculator import Speculator
from engine.types import FinishReason, StepRow, TokenMasks

# A tenant may have so many requests in the queue for each place that is left in it: alone it fills four fifths.
TENANT_SHARE = 4


@dataclass(slots=True)
class SchedulerStats:
    """Cumulative counters."""

    prefill_tokens: int = 0  # computed without yielding a token: prompts, and recomputation after preemption
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # tokens whose KV was thrown away by a preemption (a part may come back as a hit)
    aborts: int = 0


class Roster:
    """The part of the scheduler that keeps requests; `engine.scheduling.scheduler.Scheduler` is the whole."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        *,
        eos_token_ids: frozenset[int],
        speculator: Speculator | None = None,
        adapters: Mapping[int, LoadedAdapter] = MappingProxyType({}),
        pooling: PoolingSpec | None = None,
    ) -> None:
        """`pooling`: every request is a text of which a vector is made; None: every one is to be continued."""
        self.config = config
        self.cache = cache
        self.speculator = speculator or Speculator()
        self._adapters = adapters
        self.pooling = pooling
        self.stats = SchedulerStats()
        self.step_budget = StepBudget(config.max_num_batched_tokens, config.target_tpot_seconds)
        # What one sequence can hold at most, so that the oldest request alone always fits.
        self.max_total_tokens = min(config.max_model_len, cache.pool.total * cache.block_size)
        self._eos_token_ids = eos_token_ids
        self._requests: dict[int, Request] = {}
        self._waiting = Turns()
        self._running: list[Request] = []  # by standing
        self._siblings = Siblings(cache)
        self._beams: dict[int, Beams] = {}  # by the requests that asked for them
        self._last_beam_id = 0
        # The steps that are not over, oldest first, and their rows. At most two: see `Scheduler.schedule`.
        self._flights: deque[list[tuple[Request, StepRow]]] = deque()
        self._assumption = Assumption()  # of the older one, while the younger one is scheduled and begun
        self._finished_ids: list[int] = []
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether there is something to run, or to wait for."""
        return bool(self._running or self._waiting or self._flights)

    def requests(self) -> Iterable[Request]:
        """All living requests, for checks."""
        return self._requests.values()

    # --- in -------------------------------------------------------------------------------------------------------

    def check_fit(self, new: Sequence[NewRequest]) -> None:
        """Refuse requests that cannot be admitted together, now or at all.

        Raises:
            NeverFits: a prompt is empty or too long for the model's context or for the page pool, or there are more
                requests than queue and batch hold together.
            QueueFull: too many requests wait already.
        """
        for request in new:
            if request.params.beam is not None:
                check_beams(request, max_num_seqs=self.config.max_num_seqs, room=self._room(request))
            if request.request_id in self._requests or request.request_id in self._beams:
                raise NeverFits(f"Request id {request.request_id} is in use.")
            if request.adapter and request.adapter not in self._adapters:
                raise NeverFits("The adapter is not loaded any more.")
            check_length(
                len(request.prompt_token_ids),
                self.config,
                self.cache.pool.total,
                self.cache.block_size,
                generated=1 if self.pooling is None else 0,
            )
        if len({request.request_id for request in new}) != len(new):
            raise NeverFits("Two requests have the same id.")
        free_rows = self.config.max_num_seqs - len(self._running)
        most = self.config.max_num_seqs + self.config.max_waiting
        if len(new) > most:
            raise NeverFits(f"{len(new)} answers asked for at once; this engine holds at most {most} requests.")
        if len(self._waiting) + len(new) > self.config.max_waiting + free_rows:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting and {len(self._running)} running; "
                f"the queue holds {self.config.max_waiting}."
            )
        self._check_share(new)

    def add(self, new: Sequence[NewRequest], grammars: Mapping[int, TokenMasks] = MappingProxyType({})) -> None:
        """Admit all of these requests or none; raises as `check_fit`. `grammars`: the compiled ones, by request id."""
        self.check_fit(new)
        groups: dict[int, list[NewRequest]] = {}
        for place, request in enumerate(new):
            groups.setdefault(-place - 1 if request.group is None else request.group, []).append(request)
        for group in groups.values():
            if group[0].params.beam is not None:
                self._admit_beams(group, self._room(group[0]))
            else:
                self._siblings.join([self._admit(request, grammars.get(request.request_id)) for request in group])

    def _check_share(self, new: Sequence[NewRequest]) -> None:
        """Keep a part of the queue for other tenants: each has at most `TENANT_SHARE` times what is left of it.

        Raises:
            QueueFull: this tenant has its share.
        """
        tenant = new[0].tenant if new else ""
        free_rows = self.config.max_num_seqs - len(self._running)
        left = self.config.max_waiting + free_rows - len(self._waiting) - len(new)
        waiting = self._waiting.waiting_of(tenant)
        if tenant and waiting and waiting + len(new) > free_rows + TENANT_SHARE * max(1, left):
            raise QueueFull(
                f"{waiting} requests of this tenant are waiting; what is left of the queue, which holds "
                f"{self.config.max_waiting}, is for other tenants."
            )

    def _room(self, new: NewRequest) -> int:
        """Tokens that one sequence can have. Beams divide the pages among them, so that all of them always fit."""
        if new.params.beam is None:
            return self.max_total_tokens
        return min(self.max_total_tokens, self.cache.pool.total // new.params.beam.width * self.cache.block_size)

    def _admit_beams(self, new: Sequence[NewRequest], room: int) -> None:
        beams = Beams.of(new, room=room, eos_token_ids=self._eos_token_ids)
        self._beams.update((request_id, beams) for request_id in beams.request_ids)
        first = self._admit(replace(new[0], request_id=self._beam_id(), params=beams.params), None)
        first.beams, first.num_rows = beams, beams.width
        beams.live = [first]

    def _beam_id(self) -> int:
        """Beams are requests of the scheduler's own: below all that others give."""
        self._last_beam_id -= 1
        return self._last_beam_id

    def request_of(self, new: NewRequest, grammar: TokenMasks | None = None) -> Request:
        """A request as it would be admitted now; it is not."""
        prompt = list(new.prompt_token_ids)
        return Request(
            request_id=new.request_id,
            arrival=self._arrivals + 1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=new.params,
            max_total_tokens=min(len(prompt) + new.params.max_tokens, self.max_total_tokens),
            cache_root=self.cache.root(new.cache_salt, self._adapters[new.adapter].digest if new.adapter else b""),
            adapter=new.adapter,
            prediction=new.prediction,
            grammar=grammar,
            pool=None if self.pooling is None else self.pooling.positions(len(prompt)),
            tenant=new.tenant,
            priority=new.priority,
            deadline=new.deadline,
        )

    def _admit(self, new: NewRequest, grammar: TokenMasks | None) -> Request:
        request = self.request_of(new, grammar)
        self._arrivals += 1
        request.expected_prefill = request.num_tokens - len(self.cache.match(request)) * self.cache.block_size
        self._requests[request.request_id] = request
        self._waiting.come(request)
        return request

    def give_back(self, request_ids: Sequence[int]) -> bool:
        """Forget requests that have never run; False, and nothing changes, if one of them has or is not here."""
        requests = [self._requests.get(request_id) for request_id in request_ids]
        if any(request is None or request.num_cached_tokens is not None for request in requests):
            return False
        for request in requests:
            if request is not None:
                self._finish(request, FinishReason.ABORT)
        return True

    # --- to and fro -----------------------------------------------------------------------------------------------

    def returning(self) -> list[Request]:
        """Who was preempted and would find room now: the time to bring its pages back from elsewhere.

        Each is named once for each preemption.
        """
        if not self.stats.preemptions:
            return []
        promised = sum(self.cache.missing(r, r.num_tokens) for r in self._running)
        found = [
            request
            for request in self._waiting
            if request.times_sought < request.num_preemptions
            and request.beams is None  # the others of its search would wait, too
            and not self._siblings.can_share(request)
            and self.cache.fits(request.num_tokens, self.cache.match(request), promised)
        ]
        for request in found:
            request.times_sought = request.num_preemptions
        return found

    def _start(self, request: Request) -> bool:
        """Let a waiting request run; False if there is no row, or no room for its whole prompt: it would be preempted.

        NOTE: it leaves rows and pages for all that has started, and for the one whose turn it is. So those who overtake
        never keep anybody waiting: once the first in turn finds no room, nobody starts before it.
        """
        first = self._waiting.first(self._siblings.waits) or request
        rows, promised = (0, 0) if first is request else (first.num_rows, self.cache.pages_for(first.num_tokens))
        running = sum(r.num_rows for r in self._running)
        most = self.step_budget.rows(self.config.max_num_seqs) if running else self.config.max_num_seqs
        if running + rows + request.num_rows > most:
            return False
        while not self._take_pages(request, promised):
            # What is held for siblings that came later must not keep the first waiting, nor be all that is left.
            if first is not request or not self._siblings.drop(but=request if self._running else None):
                return False
        self._waiting.leave(request)
        if not request.num_preemptions:  # what is computed again is no service
            self._waiting.serve(request, prompt=request.num_tokens - request.num_computed_tokens)
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=by_standing)
        return True

    def _take_pages(self, request: Request, promised: int) -> bool:
        """Give a waiting request what is computed of it already, if the rest of it finds room, too."""
        promised += sum(self.cache.missing(r, r.num_tokens) for r in self._running)
        if self._siblings.can_share(request):
            if promised >= self.cache.num_available:  # it will take one page
                return False
            self._siblings.share(request)
        else:
            self._siblings.waits(request)  # it leads now, if its siblings have lost their pages
            matched = self.cache.match(request)
            if not self.cache.fits(request.num_tokens, matched, promised):
                return False
            self.cache.adopt(request, matched, count=request.num_cached_tokens is None)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        return True

    def _preempt(self, victim: Request) -> None:
        self._running.remove(victim)
        self.stats.preemptions += 1
        self.stats.recomputed_tokens += victim.num_computed_tokens
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        # Its full pages stay in the cache until the room is needed, so that resuming is mostly a hit.
        self.cache.want_back(victim)
        self.cache.release(victim)
        self.speculator.forget(victim)
        if victim.beams is not None:
            victim.beams.lose(victim)
        victim.expected_prefill = victim.num_tokens
        if self._running:  # nobody has to give way to more urgent ones twice: now it is as urgent as the first of them
            victim.priority = min(victim.priority, self._running[0].priority)
        self._waiting.wait(victim)

    def _fork(self, parent: Request) -> Request:
        """Another request with the same tokens and pages. A page is copied when one of the two writes to it."""
        child = parent.copy(self._beam_id())
        self.cache.fork(parent.block_table, child, parent.num_computed_tokens)
        self._requests[child.request_id] = child
        self._waiting.fork(child)
        insort(self._running, child, key=by_standing)
        return child

    # --- out ------------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """The one way out: remove the request from every list and let go of its pages."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.leave(request)
        del self._requests[request.request_id]
        self._waiting.end(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._finished_ids.append(request.request_id)
        self.speculator.forget(request)
        self._siblings.leave(request)
        # NOTE: the pages of a request in flight are still being written. `_land` releases them.
        if not request.num_flights:
            self.cache.release(request)
        return Output(request.request_id, [], finish_reason=reason, error=error)

    def _land(self) -> None:
        """The oldest step is over: nothing of it is written any more, so what ended meanwhile can go."""
        self._assumption.take_back()
        for request, _ in self._flights.popleft() if self._flights else ():
            request.num_flights -= 1
            if request.is_finished and not request.num_flights:
                self.cache.release(request)

    def check(self) -> None:
        """Verify every invariant; for tests and for the idle engine.

        Raises:
            PoolCorrupt: with the numbers that do not agree.
        """
        flying = (request for flight in self._flights for request, _ in flight)
        holders = {request.request_id: request for request in (*self._requests.values(), *flying)}
        self.cache.check((*holders.values(), *self._siblings.holders()))
        for request in self._requests.values():
            check_request(request, self.cache.block_size)
        if len(self._running) + len(self._waiting) != len(self._requests):
            raise PoolCorrupt(
                f"{len(self._running)} running + {len(self._waiting)} waiting != {len(self._requests)} requests"
            )


def by_standing(request: Request) -> tuple[int, int]:
    return request.standing
