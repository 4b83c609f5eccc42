"""Several answers to one prompt: its pages are computed once, shared, and copied where an answer goes its own way."""

from dataclasses import replace

import pytest

from engine.messages import NewRequest
from engine.types import RowResult, SamplingParams
from tests.engine.fakes import FakeRunner, check_plan, expected_scores, expected_tokens, make_scheduler, run_all, step


def new(request_id: int, prompt, max_tokens: int = 4, group: int | None = 9, **params):
    return NewRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **params), None, group)


def rows(scheduler, runner):
    """One step; how many tokens it computed of which request."""
    plan = scheduler.schedule()
    check_plan(scheduler, plan)
    scheduler.update(plan, runner.execute(plan))
    scheduler.check()
    return {row.request_id: len(row.token_ids) for row in plan.rows}


def test_siblings_wait_for_the_first_ones_prompt_and_share_its_pages():
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(i, range(1, 35)) for i in (1, 2, 3)])
    scheduler.add([new(4, range(50, 54), group=None)])
    assert rows(scheduler, runner) == {1: 12, 4: 4}, "who stands behind waiting siblings may go"
    assert rows(scheduler, runner) == {1: 15, 4: 1}
    assert rows(scheduler, runner) == {1: 7, 4: 1}
    assert [request.num_generated_tokens for request in scheduler.requests()] == [1, 1, 1, 3], "drawn from one row"
    plan = scheduler.schedule()
    assert {row.request_id: len(row.token_ids) for row in plan.rows} == {1: 1, 2: 1, 3: 1, 4: 1}
    tables = [row.block_table for row in plan.rows if row.request_id < 4]
    assert tables[0][:8] == tables[1][:8] == tables[2][:8]
    assert len({table[8] for table in tables}) == 3, "the page that all three go on writing to is copied"
    assert len(plan.copies) == 2, "the last one takes the original"
    check_plan(scheduler, plan)
    scheduler.update(plan, runner.execute(plan))
    tokens = run_all(scheduler, runner)
    assert tokens[2] == expected_tokens(range(1, 35), 4)[2:]
    assert scheduler.cache.stats.hit_tokens == 0, "nothing was looked up for them"


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 33])
def test_a_prompt_is_computed_once_whatever_its_length(length, max_tokens, seed, prefix_cache):
    """Five answers, two at a time: the prompt once, and all tokens but the last of each answer."""
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner, max_num_seqs=2, prefix_cache=prefix_cache)
    prompt = range(1, length + 1)
    scheduler.add([new(i, prompt, max_tokens, seed=seed) for i in range(1, 6)])
    assert run_all(scheduler, runner) == {i: expected_tokens(prompt, max_tokens) for i in range(1, 6)}
    assert runner.tokens_run == length + 5 * (max_tokens - 1)
    assert scheduler.stats.preemptions == 0


def test_when_the_first_sibling_goes_the_next_one_leads():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(i, range(1, 34), 2) for i in (1, 2, 3)])
    rows(scheduler, runner)
    scheduler.abort([1])
    assert rows(scheduler, runner) == {2: 16}, "its first pages are in the cache"
    assert set(run_all(scheduler, runner)) == {2, 3}


def test_groups_of_different_requests_have_nothing_to_do_with_each_other():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_batched_tokens=64)
    scheduler.add([new(1, range(1, 9))])
    scheduler.add([new(2, range(11, 19))])
    assert rows(scheduler, runner) == {1: 8, 2: 8}


def test_pages_held_for_siblings_go_with_the_last_of_them():
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=1, prefix_cache=False)
    scheduler.add([new(i, range(1, 11), 2) for i in (1, 2, 3)])
    step(scheduler, runner)
    scheduler.abort([1])
    assert scheduler.cache.pool.num_used == 3, "the first answer has ended, its prompt is held"
    scheduler.abort([2])
    assert scheduler.cache.pool.num_used == 3
    scheduler.abort([3])
    assert scheduler.cache.pool.num_used == 0
    scheduler.check()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_held_for_siblings_make_room_for_the_oldest(prefix_cache):
    """Eight pages: three are held for a waiting sibling while an older request comes back for all eight."""
    runner = FakeRunner(num_blocks=9)
    scheduler = make_scheduler(runner, max_num_seqs=2, max_num_batched_tokens=8, prefix_cache=prefix_cache)
    scheduler.add([new(1, range(100, 104), 28, group=None)])
    step(scheduler, runner)
    scheduler.add([new(i, range(1, 11), 12) for i in (2, 3, 4)])
    tokens = run_all(scheduler, runner)
    assert tokens[1] == expected_tokens(range(100, 104), 28)[1:]
    assert all(tokens[i] == expected_tokens(range(1, 11), 12) for i in (2, 3, 4))


def test_held_pages_alone_never_stall():
    """The held prompt and a sibling's copy need more pages than there are."""
    runner = FakeRunner(num_blocks=4)
    scheduler = make_scheduler(runner, max_num_seqs=1, prefix_cache=False)
    scheduler.add([new(i, range(1, 11), 2) for i in (1, 2, 3)])  # three pages, all there are
    assert run_all(scheduler, runner) == {i: expected_tokens(range(1, 11), 2) for i in (1, 2, 3)}


def test_one_token_of_each_costs_the_prompt_alone():
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner, max_num_seqs=1)
    scheduler.add([new(i, range(1, 11), 1) for i in range(40)])
    assert run_all(scheduler, runner) == {i: expected_tokens(range(1, 11), 1) for i in range(40)}
    assert (runner.steps, runner.tokens_run) == (1, 10)


@pytest.mark.parametrize("gone", [1, 2])
def test_who_leaves_while_the_prompt_is_computed_takes_no_token(gone):
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner, max_num_seqs=2)
    scheduler.add([new(i, range(1, 11), 3) for i in (1, 2, 3)])
    plan = scheduler.schedule()
    results = runner.execute(plan)
    scheduler.abort([gone])
    said = [output.request_id for output in scheduler.update(plan, results)]
    assert said == ([1, 3] if gone == 2 else []), "without the one that computed it, the next one does"
    scheduler.check()
    tokens = run_all(scheduler, runner)
    for request_id in {1, 2, 3} - {gone}:
        assert tokens[request_id] == expected_tokens(range(1, 11), 3)[len(said) // 2 :]


def test_a_sibling_whose_first_token_fails_ends_alone():
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner)
    scheduler.add([new(i, range(1, 11), 3) for i in (1, 2, 3)])
    plan = scheduler.schedule()
    [result] = runner.execute(plan)
    broken = replace(result, draws=(RowResult(2, error="nothing to draw from"), *result.draws[1:]))
    errors = {output.request_id: output.error for output in scheduler.update(plan, [broken])}
    assert errors == {1: None, 2: "nothing to draw from", 3: None}
    assert set(run_all(scheduler, runner)) == {1, 3}


# --- scored prompts ----------------------------------------------------------------------------------------------


def scores(outputs):
    return [(entry.token_id, entry.logprob) for o in outputs for entry in o.prompt_logprobs or ()]


@pytest.mark.parametrize("budget", [4, 5, 16, 64])
def test_a_prompt_is_scored_chunk_by_chunk_and_never_from_the_cache(budget):
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner, max_num_batched_tokens=budget)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
    for request_id in (1, 2):
        scheduler.add([new(request_id, prompt, group=None, prompt_logprobs=0)])
        outputs = []
        while scheduler.has_work:
            outputs += step(scheduler, runner)
        assert scores(outputs) == expected_scores(prompt)
        assert [t for o in outputs for t in o.token_ids] == expected_tokens(prompt, 4)
    assert scheduler.cache.stats.hit_tokens == 0
    scheduler.add([new(3, prompt, group=None)])
    assert step(scheduler, runner)[0].cached_tokens == 16


@pytest.mark.parametrize("at", range(1, 7))
def test_a_preempted_prompt_is_scored_once(at):
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner, max_num_batched_tokens=5)
    prompt = list(range(1, 19))
    scheduler.add([new(1, prompt, group=None, prompt_logprobs=0)])
    outputs = []
    for number in range(40):
        if number == at and scheduler.num_running:
            scheduler._preempt(scheduler._running[0])
        if scheduler.has_work:
            outputs += step(scheduler, runner)
    assert scores(outputs) == expected_scores(prompt)
    assert [t for o in outputs for t in o.token_ids] == expected_tokens(prompt, 4)


def test_one_sibling_scores_the_prompt_for_all():
    runner = FakeRunner(num_blocks=60)
    scheduler = make_scheduler(runner)
    prompt = list(range(1, 19))
    scheduler.add([new(1, prompt, prompt_logprobs=0), new(2, prompt), new(3, prompt, prompt_logprobs=0)])
    outputs = []
    while scheduler.has_work:
        outputs += step(scheduler, runner)
    found = {i: scores(o for o in outputs if o.request_id == i) for i in (1, 2, 3)}
    assert found == {1: expected_scores(prompt), 2: [], 3: expected_scores(prompt)}
    assert runner.tokens_run == 2 * 18 + 3 * 3, "who asks for scores of its own computes the prompt again"
