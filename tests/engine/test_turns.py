"""Tenants share the engine fairly, urgent requests go first, and nobody waits without end: all on a runner without a
model, with the service that each tenant gets counted by the test itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.limits import QueueFull
from engine.messages import NewRequest
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.turns import GENERATED_WEIGHT, PRIORITY_STEP, PROMPT_WEIGHT
from engine.types import SamplingParams
from tests.engine.fakes import FakeRunner, expected_tokens, make_scheduler, run_all, step
from tests.engine.test_scheduler_fairness import is_prefilled, request, steps_until


def new(
    request_id: int, length: int, max_tokens: int = 3, *, tenant: str = "", priority: int = 0, salt: str | None = None
) -> NewRequest:
    """A request whose prompt has nothing in common with that of another id."""
    prompt = [request_id % 900 + 1, *((request_id * 31 + i) % 900 + 1 for i in range(length - 1))]
    return NewRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens), salt, tenant=tenant, priority=priority)


class Books:
    """What each tenant got, counted from the plans and outputs alone."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.service: Counter[str] = Counter()
        self.started: list[int] = []
        self.ended: set[int] = set()

    def step(self) -> None:
        tenants = {r.request_id: r.tenant for r in self.scheduler.requests()}
        before = {r.request_id: r.num_computed_tokens for r in self.scheduler.requests()}
        prompts = {r.request_id: r.num_prompt_tokens for r in self.scheduler.requests()}
        plan = self.scheduler.schedule()
        for row in plan.rows:
            if row.request_id not in self.started:
                self.started.append(row.request_id)
            done = min(row.start + len(row.token_ids), prompts[row.request_id])
            prompt = max(0, done - max(row.start, before[row.request_id]))
            self.service[tenants[row.request_id]] += PROMPT_WEIGHT * prompt
        for output in self.scheduler.update(plan, self.runner.execute(plan)):
            self.service[tenants[output.request_id]] += GENERATED_WEIGHT * len(output.token_ids)
            if output.finish_reason is not None:
                self.ended.add(output.request_id)
        self.scheduler.check()


def test_one_request_does_not_wait_for_another_tenants_hundred() -> None:
    runner = FakeRunner(num_blocks=400, max_model_len=200)
    scheduler = make_scheduler(runner, max_waiting=200)
    scheduler.add([new(i, 40, 20, tenant="many") for i in range(1, 101)])
    books = Books(scheduler, runner)
    for _ in range(8):
        books.step()
    scheduler.add([new(500, 40, 20, tenant="one")])
    before = len(books.started)
    while 500 not in books.started:
        books.step()
    assert len(books.started) == before + 1, "nobody else starts before it"
    assert run_all(scheduler, runner)[500] == expected_tokens(new(500, 40).prompt_token_ids, 20)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 4),
    budget=st.integers(4, 30),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=2, max_size=4),
    seed=st.integers(1, 1000),
)
def test_tenants_who_always_want_more_get_the_same(
    rows: int, budget: int, shapes: list[tuple[int, int]], seed: int
) -> None:
    """Theorem 4.4 of arXiv 2401.00588: between two tenants that are never without a waiting request, service differs by
    at most twice the larger of what one request can charge at its start and what a full batch can be charged later."""
    runner = FakeRunner(num_blocks=600, max_model_len=64)
    scheduler = make_scheduler(
        runner, max_num_seqs=rows, max_num_batched_tokens=budget + rows, max_waiting=200, prefix_cache=False
    )
    books = Books(scheduler, runner)
    longest, most = max(length for length, _ in shapes), max(tokens for _, tokens in shapes)
    # A prompt counts at its start in the engine's books, and here while it is computed: so much for each row again.
    bound = 2 * max(PROMPT_WEIGHT * longest, GENERATED_WEIGHT * rows * most) + rows * PROMPT_WEIGHT * longest
    number = seed
    for _ in range(150):
        for place, (length, max_tokens) in enumerate(shapes):
            while scheduler._waiting.waiting_of(f"{place}") < rows + 1:  # so none is without after any step
                number += 1
                scheduler.add([new(number, length, max_tokens, tenant=f"{place}")])
        books.step()
        service = [books.service[f"{place}"] for place in range(len(shapes))]
        assert max(service) - min(service) <= bound


def test_who_comes_back_has_saved_nothing_up() -> None:
    runner = FakeRunner(num_blocks=400, max_model_len=200)
    scheduler = make_scheduler(runner, max_num_seqs=1, max_waiting=200)
    books = Books(scheduler, runner)
    scheduler.add([new(1, 10, 5, tenant="idle")])
    while not books.ended:
        books.step()
    scheduler.add([new(i, 10, 5, tenant="busy") for i in range(100, 130)])
    while len(books.ended) < 11:
        books.step()
    scheduler.add([new(i, 10, 5, tenant="idle") for i in range(2, 12)])
    since = len(books.started)
    while len(books.ended) < 31:
        books.step()
    shares = Counter("idle" if i < 100 else "busy" for i in books.started[since : since + 10])
    assert abs(shares["idle"] - shares["busy"]) <= 2, "they take turns from now on"


def test_what_the_cache_holds_is_free() -> None:
    runner = FakeRunner(num_blocks=400, max_model_len=200)
    scheduler = make_scheduler(runner)
    turns = scheduler._waiting
    scheduler.add([new(1, 40, 1, tenant="a")])
    run_all(scheduler, runner)
    first = turns.served("a")
    assert first == 40 * PROMPT_WEIGHT + GENERATED_WEIGHT
    scheduler.add([NewRequest(2, new(1, 40).prompt_token_ids, SamplingParams(max_tokens=1), tenant="a")])
    run_all(scheduler, runner)
    assert turns.served("a") == first + 4 * PROMPT_WEIGHT + GENERATED_WEIGHT, "the last page has to run"


def test_computing_again_after_a_preemption_is_free() -> None:
    runner = FakeRunner(num_blocks=400, max_model_len=200)
    scheduler = make_scheduler(runner, prefix_cache=False)
    scheduler.add([new(1, 40, 10, tenant="a")])
    for number in range(30):
        if not scheduler.has_work:
            break
        step(scheduler, runner)
        if number in (4, 7) and scheduler._running:
            scheduler._preempt(scheduler._running[0])
    assert scheduler.stats.preemptions == 2
    assert scheduler._waiting.served("a") == 40 * PROMPT_WEIGHT + 10 * GENERATED_WEIGHT


# --- priority --------------------------------------------------------------------------------------------------------


def test_smaller_goes_first_and_equals_by_arrival() -> None:
    runner = FakeRunner(num_blocks=400, max_model_len=200)
    scheduler = make_scheduler(runner, max_num_seqs=1)
    order = {1: 5, 2: 0, 3: -2, 4: 0, 5: 100, 6: -100}
    for i, priority in order.items():
        scheduler.add([new(i, 8, 2, priority=priority)])
    books = Books(scheduler, runner)
    while scheduler.has_work:
        books.step()
    assert books.started == [6, 3, 2, 4, 1, 5]


@pytest.mark.parametrize("tenant", ["urgent", "patient"], ids=["same tenant", "another tenant"])
@pytest.mark.parametrize("priority", [1, 2, 5])
def test_who_is_less_urgent_waits_for_a_bounded_time(tenant: str, priority: int) -> None:
    """However many urgent ones come, each step of priority costs `PRIORITY_STEP` of their service, and no more."""
    runner = FakeRunner(num_blocks=2000, max_model_len=800)
    scheduler = make_scheduler(runner, max_num_seqs=2, max_num_batched_tokens=512, max_waiting=20)
    books = Books(scheduler, runner)
    scheduler.add([new(i, 500, 5, tenant="urgent") for i in (1, 2, 3)])
    books.step()
    scheduler.add([new(900, 500, 5, tenant=tenant, priority=priority)])
    got, number = books.service["urgent"], 3
    while 900 not in books.started:
        while scheduler.num_waiting < 8:
            number += 1
            scheduler.add([new(number, 500, 5, tenant="urgent")])
        books.step()
        # Behind those who were here first: two that run and up to eight that wait.
        assert books.service["urgent"] - got <= priority * PRIORITY_STEP + 12 * 510
    assert books.service["urgent"] - got >= (priority - 1) * PRIORITY_STEP, "and it did wait"


def test_the_least_urgent_gives_its_pages_up_first_and_once_only() -> None:
    runner = FakeRunner(num_blocks=13, max_model_len=40)  # 48 tokens
    scheduler = make_scheduler(runner, prefix_cache=False)
    scheduler.add([new(1, 8, 30, priority=3)])
    (output,) = step(scheduler, runner)
    scheduler.add([new(2, 8, 30)])
    victims = []
    found: dict[int, list[int]] = {1: list(output.token_ids), 2: [], 3: []}
    late = new(3, 8, 30)
    for _ in range(400):
        if not scheduler.has_work:
            break
        before = {r.request_id: r.num_preemptions for r in scheduler.requests()}
        for output in step(scheduler, runner):
            found[output.request_id] += output.token_ids
        for r in list(scheduler.requests()):
            if r.num_preemptions > before.get(r.request_id, 0):
                victims.append(r.request_id)
                if r.request_id == 1:
                    assert r.priority == 0, "as urgent as the one that took its pages"
                    scheduler.add([late])
    assert victims[0] == 1, "it is the older one, and less urgent"
    assert victims.count(1) == 1, "those who come after it find it as urgent as they are"
    assert {i: len(tokens) for i, tokens in found.items()} == {1: 30, 2: 30, 3: 30}
    for i, tokens in found.items():
        assert tokens == expected_tokens(new(i, 8).prompt_token_ids, 30)


def test_a_wide_search_is_not_kept_out_by_those_who_need_one_row() -> None:
    runner = FakeRunner(num_blocks=400, max_model_len=200)
    scheduler = make_scheduler(runner, max_num_seqs=4)
    scheduler.add([new(i, 4, 5 + i) for i in (1, 2, 3)])
    step(scheduler, runner)
    scheduler.add([new(9, 4, 2)])
    wide = request(scheduler, 9)
    assert wide is not None
    wide.num_rows = 4
    number = 10

    def keep_coming() -> None:
        nonlocal number
        number += 1
        scheduler.add([new(number, 2, 6)])

    steps_until(lambda: is_prefilled(scheduler, 9), scheduler, runner, 12, keep_coming)


# --- the queue -------------------------------------------------------------------------------------------------------


def test_a_tenant_leaves_some_of_the_queue_to_others() -> None:
    runner = FakeRunner(num_blocks=400, max_model_len=200)
    scheduler = make_scheduler(runner, max_num_seqs=1, max_num_batched_tokens=4, max_waiting=100)
    scheduler.add([new(1, 100, 5, tenant="greedy")])
    step(scheduler, runner)
    for i in range(2, 82):
        scheduler.add([new(i, 4, tenant="greedy")])
    with pytest.raises(QueueFull, match=r"^80 requests of this tenant are waiting; .* holds 100, is for other tenants"):
        scheduler.add([new(82, 4, tenant="greedy")])
    scheduler.add([new(1000 + i, 4, tenant="other") for i in range(16)])
    with pytest.raises(QueueFull, match="of this tenant"):
        scheduler.add([new(2000, 4, tenant="other")])
    scheduler.add([new(3000, 4, tenant="third")])
    scheduler.abort(range(1, 10_000))
    scheduler.add([new(5000 + i, 4) for i in range(101)])  # who names no tenant has all of it


def test_counters_of_those_who_have_gone_are_forgotten_in_the_end() -> None:
    runner = FakeRunner(num_blocks=40, max_model_len=40)
    scheduler = make_scheduler(runner)
    for i in range(1, 1200):
        scheduler.add([new(i, 1, 1, tenant=f"{i}")])
        step(scheduler, runner)
    assert len(scheduler._waiting._served) <= 1026
    assert not scheduler._waiting._here
    # All began where the last one had come to, so nobody who comes now is behind or ahead.
    scheduler.add([new(5000, 1, 1, tenant="late")])
    assert scheduler._waiting.served("late") == max(scheduler._waiting._served.values())
