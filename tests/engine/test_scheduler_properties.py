"""Scheduler, prefix cache and pool under random histories: every invariant after every move, every output right.

Steps run one after the other, or each begun before the one before it is over: then everything else happens meanwhile.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.limits import NeverFits, QueueFull
from engine.messages import NewRequest
from engine.scheduling.turns import place
from engine.spec.speculator import Speculator
from engine.stepper import Stepper
from engine.types import FinishReason, SamplingParams, nothing
from tests.engine.fakes import Clairvoyant, FakeRunner, check_plan, expected_scores, expected_tokens, make_scheduler


class EngineHistory(RuleBasedStateMachine):
    """Adds, aborts, forced preemptions, row errors and failed steps in any order, with drafts right and wrong."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 12),
        prefix_cache=st.booleans(),
        drafts=st.integers(0, 5),
        draft_errors=st.sampled_from([0.0, 0.2, 0.6]),
        adaptive=st.booleans(),
        seed=st.integers(0, 1000),
        one_tenant=st.booleans(),
        ahead=st.booleans(),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        extra_tokens,
        prefix_cache,
        drafts,
        draft_errors,
        adaptive,
        seed,
        one_tenant,
        ahead,
    ):
        self.one_tenant = one_tenant
        self.runner = FakeRunner(num_blocks, block_size, max_model_len=40)
        self.proposer = Clairvoyant(draft_errors, seed)
        self.scheduler = make_scheduler(
            self.runner,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_waiting=6,
            prefix_cache=prefix_cache,
            speculator=Speculator(self.proposer, drafts, adaptive=adaptive) if drafts else None,
        )
        self.stepper = Stepper(self.runner, self.scheduler, None, ahead=True) if ahead else None
        self.prompts: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, list[tuple[int, float]]] = {}  # of the prompts of those who ask for them
        self.forced: set[int] = set()  # aborted or failed by a rule
        self.next_id = 1

    @rule(
        # Few distinct tokens and prompts that begin alike, so that prefixes are shared often.
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=25),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, "a"]),
        tenant=st.integers(0, 2),
        priority=st.sampled_from([0, 0, 0, -3, 1, 100]),
        seed=st.sampled_from([None, None, 1]),
        scored=st.booleans(),
    )
    def add(self, prompt, n, max_tokens, salt, tenant, priority, seed, scored):
        ids = list(range(self.next_id, self.next_id + n))
        self.next_id += n
        group = 1 if n > 1 else None
        before = (self.scheduler.num_waiting, self.scheduler.num_running)
        params = [
            SamplingParams(max_tokens=max_tokens, seed=seed, prompt_logprobs=0 if scored and i == ids[0] else None)
            for i in ids
        ]
        try:
            more = {"tenant": "" if self.one_tenant else f"{tenant}", "priority": 0 if self.one_tenant else priority}
            self.scheduler.add(
                [NewRequest(i, prompt, p, salt, group, **more) for i, p in zip(ids, params, strict=True)]
            )
        except NeverFits:
            assert len(prompt) + 1 > self.scheduler.max_total_tokens or n > self.scheduler.config.max_num_seqs + 6
        except QueueFull:
            free_rows = self.scheduler.config.max_num_seqs - self.scheduler.num_running
            left = self.scheduler.config.max_waiting + free_rows - self.scheduler.num_waiting - n
            waiting = 0 if self.one_tenant else self.scheduler._waiting.waiting_of(f"{tenant}")
            assert left < 0 or (waiting and waiting + n > free_rows + 4 * max(1, left))
        else:
            for i in ids:
                self.prompts[i], self.limits[i], self.tokens[i] = prompt, max_tokens, []
            if scored:
                self.scores[ids[0]] = []
            return
        assert before == (self.scheduler.num_waiting, self.scheduler.num_running), "all or nothing"

    @rule(data=st.data())
    def abort(self, data):
        if self.prompts:
            ids = data.draw(st.lists(st.sampled_from(sorted(self.prompts)), max_size=3))
            self.scheduler.abort(ids)
            self.forced |= set(ids)

    @precondition(lambda self: self.scheduler.num_running > 0)
    @rule(data=st.data())
    def preempt(self, data):
        self.scheduler._preempt(data.draw(st.sampled_from(self.scheduler._running)))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data(), fault=st.sampled_from(["none"] * 6 + ["row", "step", "abort in flight"]))
    def step(self, data, fault):
        if self.stepper is not None:
            self._step_ahead(fault, data.draw(st.integers(0, 4)))
            return
        first = self.scheduler._waiting.first(self.scheduler._siblings.waits)
        plan = self.scheduler.schedule()
        assert plan.rows, "there is work, so something runs"
        check_plan(self.scheduler, plan)
        if first is not None and first in self.scheduler._waiting:
            self._is_not_kept_out(first)
        if self.one_tenant:  # the first of those that run is always part of the step
            assert self.scheduler._running[0].request_id in {row.request_id for row in plan.rows}
        planned = [row.request_id for row in plan.rows]
        if fault == "step":
            self.forced |= set(planned)
            assert {o.request_id for o in self.scheduler.fail_step("boom")} == set(planned)
            return
        if fault != "none":
            victim = data.draw(st.sampled_from(planned))
            self.forced.add(victim)
            if fault == "row":
                self.runner.row_errors[victim] = "bad row"
            else:
                self.scheduler.abort([victim])
                self.scheduler.check()
        self._take(self.scheduler.update(plan, self.runner.execute(plan)))
        self.scheduler.speculator.timed(plan.num_tokens, data.draw(st.floats(0.001, 1)))

    def _step_ahead(self, fault, place):
        """A turn, in which a step begins and the one before it ends; either may fail, or a row of one that begins."""

        def begin(plan):
            check_plan(self.scheduler, plan)
            self.scheduler.check()
            if fault == "step":
                raise RuntimeError("boom")
            if fault == "row":
                self.runner.row_errors[plan.rows[place % len(plan.rows)].request_id] = "bad row"

        self.runner.before_step = begin
        finished = self.stepper.step(nothing)
        assert finished or self.stepper.is_flying, "there is work, so something runs"
        for done in finished:
            self._take(done.outputs)
        self.runner.before_step = lambda plan: check_plan(self.scheduler, plan)

    def _is_not_kept_out(self, first):
        """Who overtook the one whose turn it was, by starting before it, left room for it."""
        still = self.scheduler._waiting.first(self.scheduler._siblings.waits)
        if still is not first:  # another tenant's turn has come in this very step
            return
        started = [r for r in self.scheduler._running if r.num_computed_tokens == r.num_cached_tokens and r.num_flights]
        if any(r.num_preemptions == 0 and r.tenant == first.tenant and place(r) > place(first) for r in started):
            cache = self.scheduler.cache
            promised = sum(cache.pages_for(r.num_tokens) - len(r.block_table) for r in self.scheduler._running)
            assert cache.pages_for(first.num_tokens) + promised <= cache.num_available

    def _take(self, outputs):
        for output in outputs:
            self.tokens[output.request_id] += output.token_ids
            for entry in output.prompt_logprobs or ():
                self.scores[output.request_id].append((entry.token_id, entry.logprob))
            if output.finish_reason is FinishReason.LENGTH:
                i = output.request_id
                room = self.scheduler.max_total_tokens - len(self.prompts[i])
                assert len(self.tokens[i]) == min(self.limits[i], room)

    @invariant()
    def books_balance_and_tokens_are_right(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        standings = [request.standing for request in self.scheduler._running]
        assert standings == sorted(standings)
        assert self.proposer.known <= {request.request_id for request in self.scheduler._running}
        for request in self.scheduler._running:  # rejected drafts hold nothing
            if not request.num_flights:
                assert len(request.block_table) <= self.scheduler.cache.pages_for(request.num_tokens)
        pool = self.scheduler.cache.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.total
        for i, tokens in self.tokens.items():
            assert tokens == expected_tokens(self.prompts[i], len(tokens))
        for i, scores in self.scores.items():
            expected = expected_scores(self.prompts[i])
            assert scores == (expected if self.tokens[i] else expected[: len(scores)])

    def teardown(self):
        """Everything that was not ended by force comes to its end, within a bound that shows progress."""
        if not hasattr(self, "scheduler"):
            return
        total = sum(len(r.token_ids) + self.limits[r.request_id] for r in self.scheduler.requests())
        # In the worst case the requests run one after the other, recomputing everything for every token.
        for _ in range(2 * total + 10):
            if not self.scheduler.has_work:
                break
            if self.stepper is not None:
                for done in self.stepper.step(nothing):
                    self._take(done.outputs)
                continue
            plan = self.scheduler.schedule()
            check_plan(self.scheduler, plan)
            self._take(self.scheduler.update(plan, self.runner.execute(plan)))
        assert not self.scheduler.has_work, "no progress"
        self.scheduler.check()
        assert self.scheduler.cache.pool.num_used == 0


EngineHistory.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineHistory = EngineHistory.TestCase
