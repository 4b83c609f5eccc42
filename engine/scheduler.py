"""Which tokens run in the next step: continuous batching over the page pool, without a tensor in sight.

One step is a map {request: number of tokens}. There is no prefill phase and no decode phase: a request simply has
tokens that are not computed yet (its prompt, the rest of it, the last token, or everything again after a preemption).
Within `max_num_batched_tokens`, decode rows go first. Of what is left, one half goes to prompts first come first served
and the other half to the shortest first: a long prompt does not hold up the short ones that come after it, and they
take at most every second token from it.

It promises: a step with work always runs something; the oldest running request is never preempted by a younger one;
whoever waits is overtaken only where there is room for both; what can never fit is refused at the door; pages are
released exactly once; and the page law holds after each call.

A request that waits for its next token only may get drafts (`engine/spec/`): further positions of the same row, from
the budget and the pages that are left. Those that fail leave no trace: they count as never computed.
Call `schedule`, run the plan, then call `update` or `fail_step`; `add` and `abort` may come at any time.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from types import MappingProxyType

from msgspec.structs import replace

from engine.beams import Beams, check_beams
from engine.block_pool import PoolCorrupt
from engine.ending import ending
from engine.limits import NeverFits, QueueFull, SchedulerConfig, check_length
from engine.messages import NewRequest, Output
from engine.prefix_cache import PrefixCache
from engine.request import Request, RequestStatus, check_request
from engine.siblings import Siblings
from engine.spec.speculator import Speculator
from engine.types import FinishReason, GrammarFailed, RowResult, StepPlan, StepRow, TokenMasks


class SchedulerStalled(RuntimeError):
    """There is work but nothing can run: a bug. The core fails the requests instead of spinning."""


@dataclass(slots=True)
class SchedulerStats:
    """Cumulative counters."""

    prefill_tokens: int = 0  # computed without yielding a token: prompts, and recomputation after preemption
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # tokens whose KV was thrown away by a preemption (a part may come back as a hit)
    aborts: int = 0


class Scheduler:
    """Owns all requests from `add` until their last output."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        *,
        eos_token_ids: frozenset[int],
        speculator: Speculator | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.speculator = speculator or Speculator()
        self.stats = SchedulerStats()
        # What one sequence can hold at most, so that the oldest request alone always fits.
        self.max_total_tokens = min(config.max_model_len, cache.pool.total * cache.block_size)
        self._eos_token_ids = eos_token_ids
        self._requests: dict[int, Request] = {}
        # Both sorted by arrival.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._siblings = Siblings(cache)
        self._beams: dict[int, Beams] = {}  # by the requests that asked for them
        self._last_beam_id = 0
        self._in_flight: list[Request] = []
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
        return bool(self._running or self._waiting)

    def requests(self) -> Iterable[Request]:
        """All living requests, for checks."""
        return self._requests.values()

    # --- admission -----------------------------------------------------------------------------------------------

    def add(self, new: Sequence[NewRequest], grammars: Mapping[int, TokenMasks] = MappingProxyType({})) -> None:
        """Admit all of these requests or none. `grammars`: the compiled ones, by request id.

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
            check_length(len(request.prompt_token_ids), self.config, self.cache.pool.total, self.cache.block_size)
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
        groups: dict[int, list[NewRequest]] = {}
        for place, request in enumerate(new):
            groups.setdefault(-place - 1 if request.group is None else request.group, []).append(request)
        for group in groups.values():
            if group[0].params.beam is not None:
                self._admit_beams(group, self._room(group[0]))
            else:
                self._siblings.join([self._admit(request, grammars.get(request.request_id)) for request in group])

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

    def _admit(self, new: NewRequest, grammar: TokenMasks | None) -> Request:
        prompt = list(new.prompt_token_ids)
        self._arrivals += 1
        request = Request(
            request_id=new.request_id,
            arrival=self._arrivals,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=new.params,
            max_total_tokens=min(len(prompt) + new.params.max_tokens, self.max_total_tokens),
            cache_root=self.cache.root(new.cache_salt),
            prediction=new.prediction,
            grammar=grammar,
        )
        request.expected_prefill = len(prompt) - len(self.cache.match(request)) * self.cache.block_size
        self._requests[request.request_id] = request
        self._waiting.append(request)
        return request

    # --- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step. Empty only if there is no work.

        Raises:
            SchedulerStalled: there is work but nothing could be scheduled.
            RuntimeError: the previous plan was neither updated nor failed.
        """
        if self._in_flight:
            raise RuntimeError("schedule() was called while a step is in flight")
        counts: dict[Request, int] = {}
        decode = [r for r in self._running if r.num_tokens - r.num_computed_tokens == 1]
        chunks = [r for r in self._running if r.num_tokens - r.num_computed_tokens > 1]
        budget = self._grant(decode, self.config.max_num_batched_tokens, counts)
        wanted = self._wanted_drafts(counts, chunks, budget)
        budget -= sum(wanted.values())
        half = budget // 2
        oldest_first = merge(chunks, list(self._waiting), key=_arrival)
        if self._grant(oldest_first, budget - half, counts) == 0:  # or all have what they need
            self._grant(self._shortest_first(counts), half, counts)
        if not counts and self._running:
            # Beams that wait for another of theirs, which finds no room: the youngest make it some.
            self._preempt(self._running[-1])
            return self.schedule()
        if not counts and self.has_work:
            raise SchedulerStalled(
                f"{len(self._running)} running and {len(self._waiting)} waiting requests, but none can be scheduled: "
                f"pages free {self.cache.pool.num_free}, cached {self.cache.pool.num_cached}, "
                f"used {self.cache.pool.num_used}, total {self.cache.pool.total}"
            )
        # NOTE: last, on the pages that are left: nobody is preempted for a draft.
        drafts = self.speculator.propose({r: n for r, n in wanted.items() if r in counts}, self.cache)
        return self._plan(counts, drafts)

    def _grant(self, requests: Iterable[Request], budget: int, counts: dict[Request, int]) -> int:
        """Give up to `budget` tokens to these requests in this order; returns what is left of it."""
        may_start = True
        for request in requests:
            if budget == 0:
                break
            # NOTE: a victim of this very step does not come back at once: what its preemption left over is less than it
            # held, or it would not have been preempted.
            if request.status is RequestStatus.WAITING:
                if not may_start or self._siblings.waits(request):
                    continue
                may_start = self._start(request)
                if not may_start:
                    continue
            granted = counts.get(request, 0)
            start = request.num_computed_tokens
            while not self.cache.extend(request, end := min(request.num_tokens, start + granted + budget)):
                if self._siblings.drop():  # what is only held for later
                    continue
                victim = self._running[-1]
                budget += counts.pop(victim, 0)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                counts[request] = end - start
                budget -= counts[request] - granted
        return budget

    def _wanted_drafts(self, decode: Iterable[Request], chunks: list[Request], budget: int) -> dict[Request, int]:
        """How many drafts the requests that wait for their next token should get. Prompts keep half of the budget."""
        prompts = sum(r.num_tokens - r.num_computed_tokens for r in chunks)
        prompts += sum(r.expected_prefill for r in self._waiting)
        requests = [request for request in decode if request.beams is None]
        return self.speculator.counts(requests, num_tokens=len(requests) + min(budget, prompts), most=budget // 2)

    def _shortest_first(self, counts: dict[Request, int]) -> list[Request]:
        """Who has more tokens to compute than `counts` grants: those who need the fewest first, then by arrival."""
        missing = {r: r.num_tokens - r.num_computed_tokens - counts.get(r, 0) for r in self._running}
        for request in self._waiting:
            missing[request] = 1 if self._siblings.can_share(request) else request.expected_prefill
        return sorted((r for r in missing if missing[r]), key=lambda r: (missing[r], r.arrival))

    def _start(self, request: Request) -> bool:
        """Let a waiting request run; False if there is no row, or no room for its whole prompt: it would be preempted.

        NOTE: it leaves room for all that has started, and for the oldest that waits. So those who overtake never keep
        anybody waiting: once the oldest finds no room, nobody starts before it.
        """
        if sum(r.num_rows for r in self._running) + request.num_rows > self.config.max_num_seqs:
            return False
        oldest = next(r for r in self._waiting if not self._siblings.waits(r))
        promised = 0 if oldest is request else self.cache.pages_for(oldest.num_tokens)
        while not self._take_pages(request, promised):
            # What is held for siblings that came later must not keep the oldest waiting, nor be all that is left.
            if oldest is not request or not self._siblings.drop(but=request if self._running else None):
                return False
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=_arrival)
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

    def _plan(self, counts: dict[Request, int], drafts: dict[Request, list[int]]) -> StepPlan:
        single: list[StepRow] = []
        longer: list[StepRow] = []
        for request, count in counts.items():
            start = request.num_computed_tokens
            tokens, proposed = request.token_ids, drafts.get(request, [])
            row = StepRow(
                request_id=request.request_id,
                token_ids=tokens[start : start + count] + proposed,
                start=start,
                block_table=request.block_table,
                sample=start + count == len(tokens),
                params=request.params,
                all_token_ids=tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_drafts=len(proposed),
                grammar=request.grammar,
                score_from=request.score_from,
            )
            (single if len(row.token_ids) == 1 else longer).append(row)
            request.in_flight = True
            self._in_flight.append(request)
        finished, self._finished_ids = self._finished_ids, []
        if not counts:  # nothing runs, so nobody would read them
            self._finished_ids, finished = finished, []
        return StepPlan(single + longer, finished, self.cache.take_copies())

    def _preempt(self, victim: Request) -> None:
        self._running.remove(victim)
        self.stats.preemptions += 1
        self.stats.recomputed_tokens += victim.num_computed_tokens
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        # Its full pages stay in the cache until the room is needed, so that resuming is mostly a hit.
        self.cache.release(victim)
        self.speculator.forget(victim)
        if victim.beams is not None:
            victim.beams.lose(victim)
        victim.expected_prefill = victim.num_tokens
        insort(self._waiting, victim, key=_arrival)

    # --- results -------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, results: Sequence[RowResult]) -> list[Output]:
        """Take over the results of an executed plan; returns one output per request that has news.

        Raises:
            ValueError: the results do not belong to the plan.
        """
        if [row.request_id for row in plan.rows] != [result.request_id for result in results]:
            raise ValueError("the runner's results do not match the rows of the plan")
        self._land()
        outputs: list[Output] = []
        for row, result in zip(plan.rows, results, strict=True):
            request = self._requests.get(row.request_id)
            if request is None:  # aborted while the step was in flight
                continue
            if result.error is not None:
                outputs += self._fail(request, result.error)
                continue
            computed = len(row.token_ids) - row.num_drafts
            request.num_computed_tokens += computed
            self.stats.prefill_tokens += computed - row.sample
            request.num_scored += len(result.prompt_logprobs)
            if request.num_computed_tokens >= request.num_prompt_tokens:
                self._siblings.computed(request)
            if request.beams is not None:
                self.cache.publish(request)
                outputs += self._branch(request.beams, request, result) if row.sample else []
                continue
            if row.sample:
                output = self._append(request, row, result)
            else:
                self.cache.publish(request)
                output = Output(request.request_id, [])
            output.prompt_logprobs = list(result.prompt_logprobs) or None
            if row.sample or output.prompt_logprobs:
                outputs.append(output)
        return outputs

    def fail_step(self, message: str) -> list[Output]:
        """End all requests of the plan in flight with an error; nothing of that step is published."""
        rows = self._in_flight
        self._land()
        return [output for r in rows if not r.is_finished for output in self._fail(r, message)]

    def fail_all(self, message: str) -> list[Output]:
        """End every request with an error."""
        self._land()
        requests = list(self._requests.values())
        return [output for r in requests if not r.is_finished for output in self._fail(r, message)]

    def abort(self, request_ids: Iterable[int], *, stopped: bool = False) -> None:
        """End requests now. Unknown and finished ones are ignored, so that aborting twice does no harm.

        Pages are free when this returns; only a request in the middle of a step keeps them until `update`.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.STOP if stopped else FinishReason.ABORT)
                self.stats.aborts += not stopped
            elif (beams := self._beams.pop(request_id, None)) is not None:
                self.stats.aborts += not stopped
                if beams.leave(request_id):
                    self._end_beams(beams)

    def check(self) -> None:
        """Verify every invariant; for tests and for the idle engine.

        Raises:
            PoolCorrupt: with the numbers that do not agree.
        """
        holders = {request.request_id: request for request in (*self._requests.values(), *self._in_flight)}
        self.cache.check((*holders.values(), *self._siblings.holders()))
        for request in self._requests.values():
            check_request(request, self.cache.block_size)
        if len(self._running) + len(self._waiting) != len(self._requests):
            raise PoolCorrupt(
                f"{len(self._running)} running + {len(self._waiting)} waiting != {len(self._requests)} requests"
            )

    def _append(self, request: Request, row: StepRow, result: RowResult) -> Output:
        """Take over the tokens that a row yielded: those of its drafts that held, and one more."""
        count, reason = ending(request, result.token_ids, self._eos_token_ids)
        if not 1 <= count <= row.num_drafts + 1:
            error = f"The runner returned {count} tokens for a row that yields 1 to {row.num_drafts + 1}."
            return self._finish(request, FinishReason.ERROR, error=error)
        tokens = list(result.token_ids[:count])
        completed = False
        if request.grammar is not None and reason is not FinishReason.STOP:
            try:
                request.grammar.accept(tokens)
            except GrammarFailed as error:
                return self._finish(request, FinishReason.ERROR, error=str(error))
            completed = request.grammar.is_complete
            if completed:  # whether or not the model would say so
                reason = FinishReason.STOP
        request.token_ids += tokens
        request.num_computed_tokens += count - 1  # drafts that held; the pages of the others go back
        self.cache.publish(request)
        self.cache.trim(request, request.num_tokens)
        self.stats.generated_tokens += count
        output = Output(request.request_id, tokens, list(result.logprobs[:count]) or None, reason)
        if row.num_drafts:
            accepted = len(result.token_ids) - 1
            self.speculator.checked(request, row.num_drafts, accepted)
            output.accepted_drafts = min(accepted, count)
            output.rejected_drafts = row.num_drafts - output.accepted_drafts
        if not request.cached_tokens_reported:
            output.cached_tokens = request.num_cached_tokens
            output.prompt_page = self.cache.prompt_page(request)
            request.cached_tokens_reported = True
        if reason is not None:
            output.stop_token_id = tokens[-1] if reason is FinishReason.STOP and not completed else None
            self._finish(request, reason)
        return output

    def _branch(self, beams: Beams, request: Request, result: RowResult) -> list[Output]:
        """Take over a beam's candidates; when those of all are here, go on with the best of them or end the search."""
        if not request.cached_tokens_reported:
            beams.began(request.num_cached_tokens, self.cache.prompt_page(request))
            request.cached_tokens_reported = True
        if not beams.take(request, result):
            return []
        moves = beams.moves()
        self.stats.generated_tokens += beams.width
        if not moves:
            return self._end_beams(beams)
        parents, uses = beams.live, Counter(move.parent for move in moves)
        for place, parent in enumerate(parents):
            if not uses[place]:
                self._finish(parent, FinishReason.STOP)
        beams.live = []
        for move in moves:
            uses[move.parent] -= 1
            parent = parents[move.parent]
            beam = self._fork(parent) if uses[move.parent] else parent  # the last one takes the parent's place
            beam.token_ids.append(move.token_id)
            beam.num_rows = 1
            beams.live.append(beam)
        return []

    def _fork(self, parent: Request) -> Request:
        """Another request with the same tokens and pages. A page is copied when one of the two writes to it."""
        child = parent.copy(self._beam_id())
        self.cache.fork(parent.block_table, child, parent.num_computed_tokens)
        self._requests[child.request_id] = child
        insort(self._running, child, key=_arrival)
        return child

    def _end_beams(self, beams: Beams, error: str | None = None) -> list[Output]:
        for beam in beams.live:
            self._finish(beam, FinishReason.STOP if error is None else FinishReason.ERROR)
        for request_id in beams.request_ids:
            self._beams.pop(request_id, None)
        return beams.outputs(error)

    def _fail(self, request: Request, error: str) -> list[Output]:
        """End a request, or the search that it is a beam of, with an error."""
        if request.beams is not None:
            return self._end_beams(request.beams, error)
        return [self._finish(request, FinishReason.ERROR, error)]

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        """The one way out: remove the request from every list and let go of its pages."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._finished_ids.append(request.request_id)
        self.speculator.forget(request)
        self._siblings.leave(request)
        # NOTE: the pages of a request in flight are still being written. `_land` releases them.
        if not request.in_flight:
            self.cache.release(request)
        return Output(request.request_id, [], finish_reason=reason, error=error)

    def _land(self) -> None:
        """The step is over: nothing is written any more, so what ended meanwhile can go."""
        for request in self._in_flight:
            request.in_flight = False
            if request.is_finished:
                self.cache.release(request)
        self._in_flight = []


def _arrival(request: Request) -> int:
    return request.arrival
