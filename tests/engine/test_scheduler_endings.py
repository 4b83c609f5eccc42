"""The scheduler when things go differently: preemption, abort, errors, and how requests end."""

import pytest

from engine.messages import NewRequest
from engine.types import FinishReason, RowResult, SamplingParams
from tests.engine.fakes import EOS, FakeRunner, expected_tokens, make_scheduler, run_all, step


def new(request_id: int, prompt, max_tokens: int = 8, group: int | None = None, salt: str | None = None, **params):
    return NewRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **params), salt, group)


def rows(scheduler, runner):
    """Run one step; returns {request: tokens}."""
    plan = scheduler.schedule()
    counts = {row.request_id: len(row.token_ids) for row in plan.rows}
    scheduler.update(plan, runner.execute(plan))
    scheduler.check()
    return counts


# --- preemption --------------------------------------------------------------------------------------------------


def test_the_last_in_gives_way_and_resumes_with_the_same_output():
    runner = FakeRunner(num_blocks=13, block_size=4)  # 12 pages = 48 tokens
    scheduler = make_scheduler(runner)
    prompts = {i: [i, i + 1, i + 2] for i in (1, 2, 3)}
    scheduler.add([new(i, prompt, 25) for i, prompt in prompts.items()])
    finished = []
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
    while scheduler.has_work:
        for output in step(scheduler, runner):
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                finished.append(output.request_id)
    assert scheduler.stats.preemptions > 0
    assert finished == [1, 2, 3], "first come, first served"
    assert tokens == {i: expected_tokens(prompt, 25) for i, prompt in prompts.items()}


def test_resuming_finds_its_own_pages_and_is_not_counted_as_a_hit():
    work = {}
    for prefix_cache in (True, False):
        runner = FakeRunner(num_blocks=13, block_size=4)
        scheduler = make_scheduler(runner, prefix_cache=prefix_cache)
        scheduler.add([new(1, [1, 2, 3], 30), new(2, [4, 5, 6], 30)])
        run_all(scheduler, runner)
        assert scheduler.stats.preemptions > 0
        assert scheduler.stats.recomputed_tokens > 0
        assert scheduler.cache.stats.hit_tokens == 0
        work[prefix_cache] = runner.tokens_run
    assert work[True] < work[False]


def test_a_victim_that_was_already_planned_leaves_the_plan():
    runner = FakeRunner(num_blocks=9, block_size=4)  # 8 pages
    scheduler = make_scheduler(runner, max_num_batched_tokens=8, prefix_cache=False)
    scheduler.add([new(1, range(1, 29), 4), new(2, range(30, 33), 20)])
    assert rows(scheduler, runner) == {1: 5, 2: 3}
    scheduler._preempt(scheduler._running[0])  # now the older one computes chunks beside the younger one's decoding
    seen = [rows(scheduler, runner) for _ in range(4)]
    assert seen == [{1: 7, 2: 1}, {1: 7, 2: 1}, {1: 7, 2: 1}, {1: 7}], "the older one takes the younger one's pages"
    assert scheduler.stats.preemptions == 2
    assert run_all(scheduler, runner)[2][-1] == expected_tokens(range(30, 33), 20)[-1]


@pytest.mark.parametrize("at", range(1, 14))
def test_preempted_at_every_step_the_output_stays_the_same(at):
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner)
    prompts = {1: list(range(1, 30)), 2: [5, 6, 7], 3: list(range(1, 20))}
    scheduler.add([new(i, prompt, 8, seed=i) for i, prompt in prompts.items()])
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
    number = 0
    while scheduler.has_work:
        number += 1
        if number == at:
            for victim in list(scheduler._running):
                scheduler._preempt(victim)
            scheduler.check()
        for output in step(scheduler, runner):
            tokens[output.request_id] += output.token_ids
    assert tokens == {i: expected_tokens(prompt, 8) for i, prompt in prompts.items()}


# --- abort, errors, endings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 12))
def test_aborted_at_every_step_pages_return_and_the_others_do_not_notice(at):
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner)
    prompts = {1: list(range(1, 30)), 2: [5, 6, 7], 3: list(range(1, 20)), 4: [9], 5: [8]}
    scheduler.add([new(i, prompt, 8) for i, prompt in prompts.items()])
    tokens: dict[int, list[int]] = {i: [] for i in prompts}
    number = 0
    while scheduler.has_work:
        number += 1
        if number == at:
            alive = {r.request_id for r in scheduler.requests()}
            scheduler.abort([1, 5])
            scheduler.abort([1, 5, 77])
            scheduler.check()
            assert scheduler.stats.aborts == len(alive & {1, 5})
        for output in step(scheduler, runner):
            tokens[output.request_id] += output.token_ids
    for i in (2, 3, 4):
        assert tokens[i] == expected_tokens(prompts[i], 8)
    for i in (1, 5):
        assert tokens[i] == expected_tokens(prompts[i], 8)[: len(tokens[i])]
    assert scheduler.cache.pool.num_used == 0


def test_an_abort_in_the_middle_of_a_step_frees_when_the_step_ends_and_gives_no_output():
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([new(1, range(1, 6)), new(2, range(10, 14))])
    plan = scheduler.schedule()
    scheduler.abort([1])
    assert scheduler.cache.pool.num_used == 3, "the step still writes to its pages"
    scheduler.check()
    outputs = scheduler.update(plan, runner.execute(plan))
    assert [output.request_id for output in outputs] == [2]
    assert scheduler.cache.pool.num_used == 1
    scheduler.check()


def test_the_runner_hears_of_every_request_that_ended():
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([new(1, [1], 1), new(2, [2], 5), new(3, [3], 5)])
    step(scheduler, runner)
    scheduler.abort([3])
    step(scheduler, runner)
    assert sorted(runner.finished) == [1, 3]


def test_an_error_in_one_row_ends_that_request_only_and_publishes_nothing_of_it():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=64)
    scheduler.add([new(1, range(1, 10)), new(2, range(20, 29))])
    runner.row_errors[1] = "not finite"
    outputs = {output.request_id: output for output in step(scheduler, runner)}
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert outputs[1].error == "not finite"
    assert outputs[2].finish_reason is None
    scheduler.add([new(3, range(1, 10), 1)])
    tokens = run_all(scheduler, runner)
    assert tokens[3] == expected_tokens(range(1, 10), 1)
    assert scheduler.cache.stats.hit_tokens == 0


def test_a_failed_step_ends_its_requests_and_leaves_the_others():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=2)
    scheduler.add([new(i, range(i, i + 6), 3) for i in (1, 20, 40)])
    scheduler.schedule()
    outputs = scheduler.fail_step("boom")
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        (1, FinishReason.ERROR, "boom"),
        (20, FinishReason.ERROR, "boom"),
    ]
    scheduler.check()
    assert scheduler.cache.pool.num_cached == 0, "nothing of the failed step is published"
    assert run_all(scheduler, runner) == {40: expected_tokens(range(40, 46), 3)}


def test_fail_all_ends_everything():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=1)
    scheduler.add([new(1, [1]), new(2, [2])])
    step(scheduler, runner)
    assert {o.request_id for o in scheduler.fail_all("over")} == {1, 2}
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_used == 0


def test_results_of_another_plan_are_refused():
    scheduler = make_scheduler(FakeRunner())
    scheduler.add([new(1, [1])])
    plan = scheduler.schedule()
    assert [row.request_id for row in scheduler.schedule().rows] == [1], "one step may be begun ahead"
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="do not match"):
        scheduler.update(plan, [RowResult(2, (5,))])


def finish_with(token_ids, **params):
    """Feed chosen tokens to one request; returns its outputs."""
    scheduler = make_scheduler(FakeRunner())
    scheduler.add([new(1, [1, 2], **params)])
    outputs = []
    for token in token_ids:
        plan = scheduler.schedule()
        outputs += scheduler.update(plan, [RowResult(1, (token,))])
        scheduler.check()
        if not scheduler.has_work:
            break
    return [(o.token_ids[0], o.finish_reason, o.stop_token_id) for o in outputs]


def test_how_requests_end():
    assert finish_with([5, 6, 7], max_tokens=2) == [(5, None, None), (6, FinishReason.LENGTH, None)]
    assert finish_with([5, EOS, 7]) == [(5, None, None), (EOS, FinishReason.STOP, EOS)]
    assert finish_with([5, EOS, 7], max_tokens=3, ignore_eos=True)[1:] == [
        (EOS, None, None),
        (7, FinishReason.LENGTH, None),
    ]
    stop = {"stop_token_ids": frozenset({9})}
    assert finish_with([5, 9], **stop) == [(5, None, None), (9, FinishReason.STOP, 9)]
    assert finish_with([9, 9, 9], min_tokens=3, **stop)[2] == (9, FinishReason.STOP, 9)
    assert finish_with([9, 9, 9], min_tokens=3, **stop)[:2] == [(9, None, None), (9, None, None)]
    # The last allowed token is an end token: that the model was done is the better news.
    assert finish_with([5, EOS], max_tokens=2)[1] == (EOS, FinishReason.STOP, EOS)
    # `ignore_eos` does not touch the client's own stop tokens.
    assert finish_with([EOS], ignore_eos=True, stop_token_ids=frozenset({EOS})) == [(EOS, FinishReason.STOP, EOS)]
