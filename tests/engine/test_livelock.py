"""Nobody waits for what never comes: in a cache that is too small for all, someone always gets on, and all end."""

from __future__ import annotations

import pytest

from engine.messages import NewRequest
from engine.spec.speculator import Speculator
from engine.types import SamplingParams
from tests.engine.fakes import Clairvoyant, FakeRunner, expected_tokens, make_scheduler, run_all, step

PAGES, PAGE = 8, 4
ROOM = PAGES * PAGE


def new(number: int, prompt, max_tokens: int, **fields) -> NewRequest:
    return NewRequest(number, list(prompt), SamplingParams(max_tokens=max_tokens), **fields)


def small(**options):
    runner = FakeRunner(num_blocks=PAGES + 1, block_size=PAGE)
    return runner, make_scheduler(runner, **options)


@pytest.mark.parametrize("length", [ROOM - 1, ROOM - PAGE, ROOM - PAGE - 1])
def test_a_prompt_as_long_as_the_cache_runs_again_where_the_cache_is_full_of_it(length: int) -> None:
    runner, scheduler = small()
    prompt = range(1, length + 1)
    for number in (1, 2, 3):
        scheduler.add([new(number, prompt, 1)])
        assert run_all(scheduler, runner)[number] == expected_tokens(prompt, 1)
    assert scheduler.cache.stats.hit_tokens > 0


@pytest.mark.parametrize("length", [ROOM - 1, ROOM - PAGE])
def test_an_empty_engine_starts_whatever_it_has_let_in(length: int) -> None:
    """With the cache full of others' pages, all of which may go."""
    runner, scheduler = small()
    for number in range(1, 6):
        scheduler.add([new(number, range(100 * number, 100 * number + ROOM - 1), 1)])
        run_all(scheduler, runner)
        assert scheduler.cache.pool.num_cached
    scheduler.add([new(9, range(1, length + 1), 1)])
    assert 9 in {row.request_id for row in scheduler.schedule().rows}


def test_who_waits_starts_in_the_step_after_those_who_ran_have_left() -> None:
    runner, scheduler = small()
    scheduler.add([new(1, range(1, 17), 16), new(2, range(31, 45), 16)])
    step(scheduler, runner)
    step(scheduler, runner)
    scheduler.add([new(3, range(61, 85), 3)])
    step(scheduler, runner)
    assert 3 in {request.request_id for request in scheduler._waiting}
    scheduler.abort([1, 2])
    assert [row.request_id for row in scheduler.schedule().rows] == [3]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_requests_that_all_want_the_whole_cache_end_one_after_the_other(count: int, cache: bool, drafts: int) -> None:
    """The first gets on in every step, so that they take no more steps than one after the other would."""
    speculator = Speculator(Clairvoyant(0.3), drafts, adaptive=False) if drafts else None
    runner, scheduler = small(prefix_cache=cache, speculator=speculator)
    prompts = {number: range(10 * number, 10 * number + 6) for number in range(1, count + 1)}
    scheduler.add([new(number, prompt, ROOM - 6) for number, prompt in prompts.items()])
    tokens: dict[int, list[int]] = {number: [] for number in prompts}
    steps = 0
    while scheduler.has_work:
        first = min(scheduler._running or list(scheduler._waiting), key=lambda request: request.standing)
        before = first.num_tokens, first.num_computed_tokens
        for output in step(scheduler, runner):
            tokens[output.request_id] += output.token_ids
        assert (first.num_tokens, first.num_computed_tokens) > before or first.is_finished, "the first stood still"
        steps += 1
    assert tokens == {number: expected_tokens(prompt, ROOM - 6) for number, prompt in prompts.items()}
    alone = ROOM  # one step for the prompt, one for each token, and what is left
    assert steps <= count * alone
    assert scheduler.stats.preemptions <= steps
    assert scheduler.cache.pool.num_used == 0


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_answers_to_one_prompt_in_a_cache_that_holds_one_of_them(cache: bool) -> None:
    runner, scheduler = small(prefix_cache=cache)
    prompt = range(1, 14)
    scheduler.add([new(number, prompt, ROOM - 13, group=1) for number in range(1, 5)])
    want = expected_tokens(prompt, ROOM - 13)
    assert run_all(scheduler, runner, max_steps=5 * ROOM) == dict.fromkeys(range(1, 5), want)


def test_urgent_ones_that_keep_coming_do_not_keep_the_first_from_its_end() -> None:
    """Each newcomer is more urgent and wants all pages; the old one gives way, but not for ever."""
    runner, scheduler = small(max_num_seqs=2)
    scheduler.add([new(1, range(1, 9), ROOM - 8, priority=100)])
    number, steps = 1, 0
    while any(request.request_id == 1 for request in scheduler.requests()):
        if steps % 12 == 0:
            number += 1
            scheduler.add([new(number, range(10 * number, 10 * number + 8), ROOM - 8, priority=-100)])
        step(scheduler, runner)
        steps += 1
        assert steps < 40 * ROOM, "it never ends"
    assert scheduler.stats.preemptions > 0
