"""Which tokens run in the next step: continuous batching over the page pool, without a tensor in sight.

One step is a map {request: number of tokens}. There is no prefill phase and no decode phase: a request simply has
tokens that are not computed yet (its prompt, the rest of it, the last token, or everything again after a preemption).
Within `max_num_batched_tokens`, and what a target time per output token allows (`step_budget.py`), decode rows go
first. Of what is left, one half goes to prompts by turns (`turns.py`: tenants share fairly, then by priority and
arrival) and the other half to the shortest first: a long prompt does not hold up the short ones that come after it,
and they take at most every second token from it.

It promises: a step with work always runs something; of those that run, none is preempted by one that is less urgent or
as urgent and younger, and none twice for being less urgent; whoever waits is overtaken only where there is room for
both, or by turns; what can never fit is refused at the door, and what cannot keep its deadline is ended (`expire`);
pages are released exactly once; and the page law holds after each call.

A request that waits for its next token only may get drafts (`engine/spec/`): further positions of the same row, from
the budget and the pages that are left. Those that fail leave no trace: they count as never computed.
Call `schedule`, run the plan, then call `update` or `fail_step`; `add` and `abort` may come at any time. Where
`can_look_ahead`, `schedule` may be called before the results of the plan before it are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.messages import Output
from engine.scheduling.beams import Beams
from engine.scheduling.deadlines import too_late
from engine.scheduling.ending import ending, follow
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.roster import Roster
from engine.types import Draw, FinishReason, GrammarFailed, RowResult, StepPlan, StepRow


class SchedulerStalled(RuntimeError):
    """There is work but nothing can run: a bug. The core fails the requests instead of spinning."""


class _NoRoom(Exception):
    """There are too few pages for a step whose predecessor is not over, and may yet give some back."""


class Scheduler(Roster):
    """Owns all requests from `add` until their last output. Where they stand meanwhile: see `Roster`."""

    # --- one step ------------------------------------------------------------------------------------------------

    @property
    def can_look_ahead(self) -> bool:
        """Whether the next step can be scheduled while one is in flight whose results are not known.

        Not with drafts, which depend on its tokens, nor beside beams, whose pages do.
        """
        return len(self._flights) == 1 and not (self._assumption or self.speculator.proposes or self._beams)

    def schedule(self) -> StepPlan:
        """The next step. Empty only if there is no work, or all there is waits for pages from elsewhere, or for the
        results of a step in flight.

        Raises:
            SchedulerStalled: there is work but nothing could be scheduled.
            RuntimeError: the previous plan was neither updated nor failed, and it is not possible to look ahead.
        """
        if not self._flights:
            return self._schedule()
        if not self.can_look_ahead:
            raise RuntimeError("schedule() was called while a step is in flight")
        self._assumption.make(self._flights[0])
        try:
            return self._schedule()
        except _NoRoom:  # who has got pages or a row keeps them; who must give some up is decided on results
            return StepPlan([])

    def _schedule(self) -> StepPlan:
        counts: dict[Request, int] = {}
        decode = [r for r in self._running if r.num_tokens - r.num_computed_tokens == 1]
        chunks = [r for r in self._running if r.num_tokens - r.num_computed_tokens > 1]
        budget = self._grant(decode, self.config.max_num_batched_tokens, counts)
        budget = self.step_budget.beside(len(counts), budget, started=bool(chunks))
        wanted = self._wanted_drafts(counts, chunks, budget)
        budget -= sum(wanted.values())
        half = budget // 2
        if self._grant(self._waiting.order(chunks), budget - half, counts) == 0:  # or all have what they need
            self._grant(self._shortest_first(counts), half, counts)
        if not counts and self._flights:
            return StepPlan([])
        if not counts and self._running:
            # Beams that wait for another of theirs, which finds no room: the youngest make it some.
            self._preempt(self._running[-1])
            return self._schedule()
        if not counts and any(request.awaits_pages for request in self._waiting):
            return self._plan({}, {})
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
                # One that lost its pages in the middle of a step comes back when that step is over.
                if not may_start or request.awaits_pages or request.num_flights or self._siblings.waits(request):
                    continue
                may_start = self._start(request)
                if not may_start:
                    continue
            granted = counts.get(request, 0)
            start = request.num_computed_tokens
            while not self.cache.extend(request, end := min(request.num_tokens, start + granted + budget)):
                if self._flights:
                    raise _NoRoom
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

    def _plan(self, counts: dict[Request, int], drafts: dict[Request, list[int]]) -> StepPlan:
        single: list[StepRow] = []
        longer: list[StepRow] = []
        flight: list[tuple[Request, StepRow]] = []
        for request, count in counts.items():
            start = request.num_computed_tokens
            tokens, proposed = request.token_ids, drafts.get(request, [])
            row = StepRow(
                request_id=request.request_id,
                token_ids=tokens[start : start + count] + proposed,
                start=start,
                block_table=request.block_table,
                sample=start + count == len(tokens) and request.pool is None,
                params=request.params,
                all_token_ids=tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_drafts=len(proposed),
                grammar=request.grammar,
                adapter=request.adapter,
                score_from=request.score_from,
                draws=tuple(Draw(r.request_id, r.params, r.grammar) for r in self._siblings.followers(request))
                if start + count == request.num_prompt_tokens
                else (),
                pool=request.pool,
            )
            (single if len(row.token_ids) == 1 else longer).append(row)
            request.num_flights += 1
            flight.append((request, row))
        if flight:
            self._flights.append(flight)
        finished, self._finished_ids = self._finished_ids, []
        if not counts:  # nothing runs, so nobody would read them
            self._finished_ids, finished = finished, []
        return StepPlan(single + longer, finished, self.cache.take_copies())

    def expire(self, now: float) -> list[Output]:
        """End those whose deadline has passed, and those of whom it is clear that they cannot keep it.

        Raises:
            RuntimeError: a step has been scheduled ahead, and the results of the one before it are not here.
        """
        if self._assumption:
            raise RuntimeError("expire() was called between looking ahead and the results of the step before")
        outputs: list[Output] = []
        for request in [r for r in self._requests.values() if r.deadline is not None]:
            if not request.is_finished and (text := self._too_late(request, now)) is not None:  # beams end together
                outputs += self._fail(request, text, FinishReason.DEADLINE)
        return outputs

    def _too_late(self, request: Request, now: float) -> str | None:
        most, cost = self.config.max_num_batched_tokens, self.speculator.cost
        text = too_late(request, now, most, cost)
        if text is not None and request.status is RequestStatus.WAITING:  # others may have computed some of its prompt
            request.expected_prefill = request.num_tokens - len(self.cache.match(request)) * self.cache.block_size
            text = too_late(request, now, most, cost)
        return text

    # --- results -------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, results: Sequence[RowResult]) -> list[Output]:
        """Take over the results of an executed plan, the oldest; returns one output per request that has news.

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
            # Who lost its pages in the middle of the step has its token, and is computed again.
            if has_pages := request.status is RequestStatus.RUNNING:
                request.num_computed_tokens += computed
            self.stats.prefill_tokens += computed - row.sample
            request.num_scored += len(result.prompt_logprobs)
            if has_pages and request.num_computed_tokens >= request.num_prompt_tokens:
                self._siblings.computed(request)
            if request.pool is not None:
                outputs += self._pool(request, result) if has_pages else []
                continue
            if request.beams is not None:
                self.cache.publish(request)
                outputs += self._branch(request.beams, request, result) if row.sample else []
                continue
            if row.sample:
                output = self._append(request, row.num_drafts, result)
            else:
                self.cache.publish(request)
                output = Output(request.request_id, [])
            output.prompt_logprobs = list(result.prompt_logprobs) or None
            if row.sample or output.prompt_logprobs:
                outputs.append(output)
            outputs += self._begin_siblings(result.draws)
        return outputs

    def fail_step(self, message: str) -> list[Output]:
        """End all requests of the plan in flight, the oldest, with an error; nothing of that step is published."""
        requests = [request for request, _ in self._flights[0]] if self._flights else []
        self._land()
        return [output for r in requests if not r.is_finished for output in self._fail(r, message)]

    def fail_all(self, message: str) -> list[Output]:
        """End every request with an error."""
        while self._flights:
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

    def _begin_siblings(self, draws: Iterable[RowResult]) -> list[Output]:
        """Take over the first tokens of requests that wait for the prompt that has been computed."""
        outputs: list[Output] = []
        for result in draws:
            sibling = self._requests.get(result.request_id)
            if sibling is None:  # it left meanwhile
                continue
            if result.error is not None:
                outputs += self._fail(sibling, result.error)
            else:
                outputs.append(self._append(sibling, 0, result))
        return outputs

    def _append(self, request: Request, num_drafts: int, result: RowResult) -> Output:
        """Take over the tokens that a row yielded: those of its `num_drafts` drafts that held, and one more."""
        count, reason = ending(request, result.token_ids, self._eos_token_ids)
        if count > num_drafts + 1 or not (count or reason):
            error = f"The runner returned {count} tokens for a row that yields 1 to {num_drafts + 1}."
            return self._finish(request, FinishReason.ERROR, error=error)
        completed = False
        if request.grammar is not None:
            said = result.token_ids[: count - (reason is FinishReason.STOP)]  # without the end token
            try:
                taken, completed = follow(request.grammar, said)
            except GrammarFailed as error:
                return self._finish(request, FinishReason.ERROR, error=str(error))
            if completed:  # whether or not the model would say so
                count, reason = taken, FinishReason.STOP
        tokens = list(result.token_ids[:count])
        request.token_ids += tokens
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens += max(0, count - 1)  # drafts that held; the pages of the others go back
        self.cache.publish(request)
        self.cache.trim(request, request.num_tokens)
        self.stats.generated_tokens += count
        self._waiting.serve(request, generated=count)
        output = Output(request.request_id, tokens, list(result.logprobs[:count]) or None, reason)
        if num_drafts:
            accepted = len(result.token_ids) - 1
            self.speculator.checked(request, num_drafts, accepted)
            output.accepted_drafts = min(accepted, count)
            output.rejected_drafts = num_drafts - output.accepted_drafts
        if not request.cached_tokens_reported:
            output.cached_tokens = request.num_cached_tokens
            output.prompt_page = self.cache.prompt_page(request)
            output.missed = None if request.missed is None else str(request.missed)
            request.cached_tokens_reported = True
        if reason is not None:
            output.stop_token_id = tokens[-1] if reason is FinishReason.STOP and not completed else None
            self._finish(request, reason)
        return output

    def _pool(self, request: Request, result: RowResult) -> list[Output]:
        """Take over what a row adds to its text's vector; with the last of it, the request is done."""
        self.cache.publish(request)
        request.take_pooled(result.pooled)
        if request.num_computed_tokens < request.num_tokens:
            return []
        if request.pooled is None:
            return [self._finish(request, FinishReason.ERROR, "The runner returned no state of the text.")]
        output = self._finish(request, FinishReason.STOP)
        output.vector = (request.pooled / request.num_pooled).astype("<f4").tobytes()
        output.cached_tokens = request.num_cached_tokens
        return [output]

    def _branch(self, beams: Beams, request: Request, result: RowResult) -> list[Output]:
        """Take over a beam's candidates; when those of all are here, go on with the best of them or end the search."""
        if not request.cached_tokens_reported:
            beams.began(request.num_cached_tokens, self.cache.prompt_page(request))
            request.cached_tokens_reported = True
        if not beams.take(request, result):
            return []
        moves = beams.moves()
        self.stats.generated_tokens += beams.width
        self._waiting.serve(request, generated=beams.width)
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

    def _end_beams(
        self, beams: Beams, error: str | None = None, reason: FinishReason = FinishReason.ERROR
    ) -> list[Output]:
        for beam in beams.live:
            self._finish(beam, FinishReason.STOP if error is None else reason)
        for request_id in beams.request_ids:
            self._beams.pop(request_id, None)
        return beams.outputs(error, reason)

    def _fail(self, request: Request, error: str, reason: FinishReason = FinishReason.ERROR) -> list[Output]:
        """End a request, or the search that it is a beam of, with an error."""
        if request.beams is not None:
            return self._end_beams(request.beams, error, reason)
        return [self._finish(request, reason, error)]
