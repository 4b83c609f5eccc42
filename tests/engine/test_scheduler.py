"""The scheduler step by step: batching, chunks, order, admission, the prefix cache, siblings."""

import pytest

from engine.limits import NeverFits, QueueFull, SchedulerConfig
from engine.messages import NewRequest
from engine.scheduling.scheduler import SchedulerStalled
from engine.types import SamplingParams
from tests.engine.fakes import FakeRunner, expected_tokens, make_scheduler, run_all, step


def new(request_id: int, prompt, max_tokens: int = 8, group: int | None = None, salt: str | None = None, **params):
    return NewRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **params), salt, group)


def rows(scheduler, runner):
    """Run one step; returns {request: tokens}."""
    plan = scheduler.schedule()
    counts = {row.request_id: len(row.token_ids) for row in plan.rows}
    scheduler.update(plan, runner.execute(plan))
    scheduler.check()
    return counts


# --- batching ----------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_and_only_the_last_one_samples():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(1, range(1, 41))])
    plans = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        plans.append((len(plan.rows[0].token_ids), plan.rows[0].start, plan.rows[0].sample))
        scheduler.update(plan, runner.execute(plan))
    assert plans[:4] == [(16, 0, False), (16, 16, False), (8, 32, True), (1, 40, True)]


def test_decode_goes_first_and_chunks_get_what_is_left():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(1, range(1, 5))])
    assert rows(scheduler, runner) == {1: 4}
    scheduler.add([new(2, range(100, 140))])
    assert rows(scheduler, runner) == {1: 1, 2: 15}
    assert rows(scheduler, runner) == {1: 1, 2: 15}
    assert rows(scheduler, runner) == {1: 1, 2: 10}
    assert rows(scheduler, runner) == {1: 1, 2: 1}


def test_a_chunk_of_one_token_stands_among_the_single_rows():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=4, max_num_batched_tokens=5)
    scheduler.add([new(1, range(1, 4), 20), new(2, range(20, 30), 20)])
    seen = []
    for _ in range(6):
        plan = scheduler.schedule()
        seen.append([len(row.token_ids) for row in plan.rows])
        scheduler.update(plan, runner.execute(plan))  # the fake asserts the order
    assert [3, 2] in seen
    assert [1, 4] in seen


def test_requests_join_and_leave_between_steps():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=2)
    scheduler.add([new(1, [1, 2], 3), new(2, [3, 4], 5), new(3, [5, 6], 2)])
    counts = [set(rows(scheduler, runner)) for _ in range(5)]
    assert counts == [{1, 2}, {1, 2}, {1, 2}, {2, 3}, {2, 3}]


@pytest.mark.parametrize("budget", [4, 7, 16, 64, 1000])
def test_output_does_not_depend_on_the_chunk_size(budget):
    runner = FakeRunner(num_blocks=200)
    scheduler = make_scheduler(runner, max_num_batched_tokens=budget)
    prompts = {i: [i * 7 % 50 + 1 + j % 9 for j in range(5 + 11 * i)] for i in range(1, 8)}
    scheduler.add([new(i, prompt, 10) for i, prompt in prompts.items()])
    assert run_all(scheduler, runner) == {i: expected_tokens(prompt, 10) for i, prompt in prompts.items()}


def test_contradictory_bounds_are_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(8\) must be at least max_num_seqs \(16\)"):
        SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1"):
        SchedulerConfig(max_num_seqs=0)
    with pytest.raises(ValueError, match="max_waiting must not be negative"):
        SchedulerConfig(max_waiting=-1)


# --- admission ---------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(FakeRunner(num_blocks=5, block_size=4, max_model_len=128))
    with pytest.raises(NeverFits, match=r"has 16 tokens .* KV cache holds 16 tokens \(4 pages of 4\)"):
        scheduler.add([new(1, range(1, 17))])
    scheduler = make_scheduler(FakeRunner(max_model_len=10))
    with pytest.raises(NeverFits, match=r"has 10 tokens .* context holds 10"):
        scheduler.add([new(1, range(1, 11))])
    with pytest.raises(NeverFits, match="no tokens"):
        scheduler.add([new(1, [])])
    with pytest.raises(NeverFits, match="same id"):
        scheduler.add([new(1, [1]), new(1, [2])])
    scheduler.add([new(1, [1])])
    with pytest.raises(NeverFits, match="in use"):
        scheduler.add([new(1, [1])])


def test_the_longest_prompt_that_fits_is_served_and_ends_where_the_cache_ends():
    runner = FakeRunner(num_blocks=5, block_size=4, max_model_len=128)
    scheduler = make_scheduler(runner)
    scheduler.add([new(1, range(1, 16), 100)])
    plan_tokens = run_all(scheduler, runner)
    assert plan_tokens == {1: expected_tokens(range(1, 16), 1)}


def test_a_group_is_admitted_as_a_whole_or_not_at_all():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=2, max_waiting=3)
    with pytest.raises(NeverFits, match="6 answers asked for at once; this engine holds at most 5"):
        scheduler.add([new(i, [i]) for i in range(1, 7)])
    scheduler.add([new(1, [1]), new(2, [2])])
    rows(scheduler, runner)
    scheduler.add([new(3, [3]), new(4, [4])])
    with pytest.raises(QueueFull, match="2 requests are waiting and 2 running; the queue holds 3"):
        scheduler.add([new(5, [5]), new(6, [6])])
    assert scheduler.num_waiting == 2
    scheduler.add([new(5, [5])])
    with pytest.raises(QueueFull):
        scheduler.add([new(6, [6])])
    with pytest.raises(NeverFits):
        scheduler.add([new(7, [1]), new(8, [])])
    assert set(run_all(scheduler, runner)) == {1, 2, 3, 4, 5}


def test_free_rows_count_as_room_for_new_requests():
    scheduler = make_scheduler(FakeRunner(), max_num_seqs=2, max_waiting=0)
    scheduler.add([new(1, [1])])
    scheduler.add([new(2, [2])])
    with pytest.raises(QueueFull):
        scheduler.add([new(3, [3])])


def test_lost_pages_are_an_error_and_not_an_endless_loop():
    runner = FakeRunner(num_blocks=5, block_size=4)
    scheduler = make_scheduler(runner)
    for _ in range(3):
        scheduler.cache.pool.take()
    scheduler.add([new(1, range(1, 8))])
    with pytest.raises(SchedulerStalled, match=r"0 running and 1 waiting requests.*free 1, cached 0, used 3, total 4"):
        scheduler.schedule()


# --- prefix cache ------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_computed_once_and_reported_as_cached():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=64)
    prompt = list(range(1, 34))
    scheduler.add([new(1, prompt, 2)])
    run_all(scheduler, runner)
    before = runner.tokens_run
    scheduler.add([new(2, prompt, 2)])
    outputs = step(scheduler, runner)
    assert outputs[0].cached_tokens == 32
    assert runner.tokens_run - before == 1
    assert step(scheduler, runner)[0].cached_tokens is None, "reported once"


def test_generated_tokens_are_found_by_the_next_turn():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=64)
    scheduler.add([new(1, range(1, 9), 9)])
    answer = run_all(scheduler, runner)[1]
    scheduler.add([new(2, [*range(1, 9), *answer, 5], 1)])
    assert step(scheduler, runner)[0].cached_tokens == 16


def test_the_cache_changes_no_output():
    shared = list(range(1, 30))
    prompts = {i: shared[: 5 * i] + [40 + i] * i for i in range(1, 7)}
    results = []
    for prefix_cache in (True, False):
        runner = FakeRunner(num_blocks=40)
        scheduler = make_scheduler(runner, max_num_seqs=2, prefix_cache=prefix_cache)
        tokens = {}
        for turn in range(3):
            scheduler.add([new(100 * turn + i, prompt, 6) for i, prompt in prompts.items()])
            tokens |= run_all(scheduler, runner)
        results.append(tokens)
        assert (scheduler.cache.stats.hit_tokens > 0) == prefix_cache
    assert results[0] == results[1]


def test_salts_keep_tenants_apart():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=64)
    for number, salt in enumerate(("a", "b", "a", None), 1):
        scheduler.add([new(number, range(1, 34), 1, salt=salt)])
        assert step(scheduler, runner)[0].cached_tokens == (32 if number == 3 else 0)
