"""Deadlines: who passes one is ended, who cannot keep one is ended before it takes a step, and nobody else notices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import NewRequest, Output
from engine.scheduling.scheduler import Scheduler
from engine.types import BeamParams, FinishReason, SamplingParams
from tests.engine.fakes import FakeRunner, expected_tokens, make_scheduler, run_all, step

NOW = 1000.0


def new(
    request_id: int, length: int = 8, max_tokens: int = 20, *, seconds: float | None = None, **more: int
) -> NewRequest:
    prompt = [request_id, *range(1, length)]
    deadline = None if seconds is None else NOW + seconds
    return NewRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, **more), deadline=deadline)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(num_blocks=400, max_model_len=1000)


@pytest.fixture
def scheduler(runner: FakeRunner) -> Scheduler:
    return make_scheduler(runner)


def knows(scheduler: Scheduler, seconds: float) -> None:
    """Steps of all sizes have taken so long."""
    for tokens in (1, 16):
        scheduler.speculator.timed(tokens, seconds)


def ended(outputs: list[Output]) -> dict[int, str]:
    assert all(output.finish_reason is FinishReason.DEADLINE for output in outputs)
    return {output.request_id: output.error or "" for output in outputs}


def test_whose_deadline_passes_in_the_queue_takes_no_step(scheduler: Scheduler, runner: FakeRunner) -> None:
    scheduler.add([new(i) for i in range(1, 5)])
    step(scheduler, runner)
    scheduler.add([new(9, seconds=1)])
    assert scheduler.expire(NOW + 0.99) == []
    text = "The request's deadline passed while it waited for its turn; nothing was computed."
    assert ended(scheduler.expire(NOW + 1)) == {9: text}
    assert set(run_all(scheduler, runner)) == {1, 2, 3, 4}
    assert 9 in runner.finished or not scheduler.has_work


def test_whose_deadline_passes_while_it_runs_is_ended_with_its_pages(scheduler: Scheduler, runner: FakeRunner) -> None:
    scheduler.add([new(1, seconds=1), new(2)])
    for _ in range(4):
        step(scheduler, runner)
    scheduler.add([new(3, seconds=3)])
    step(scheduler, runner)
    assert ended(scheduler.expire(NOW + 5)) == {
        1: "The request's deadline passed after 5 tokens of the answer.",
        3: "The request's deadline passed after 1 token of the answer.",
    }
    scheduler.check()
    assert run_all(scheduler, runner)[2] == expected_tokens(new(2).prompt_token_ids, 20)[5:]


def test_whose_deadline_passes_in_its_prompt(scheduler: Scheduler, runner: FakeRunner) -> None:
    scheduler.add([new(1, 100, seconds=1)])
    step(scheduler, runner)
    (text,) = ended(scheduler.expire(NOW + 5)).values()
    assert text == "The request's deadline passed when 16 of 100 tokens of its prompt were there."
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_used == 0


def test_who_cannot_keep_it_is_ended_at_once(scheduler: Scheduler, runner: FakeRunner) -> None:
    knows(scheduler, 0.1)
    # 160 tokens are ten steps: a second, or half of one with luck.
    scheduler.add([new(1, 160, seconds=0.49), new(2, 160, seconds=0.51)])
    found = ended(scheduler.expire(NOW))
    assert found == {
        1: "The request cannot keep its deadline, 490 ms from now: computing 160 tokens before its next "
        "one takes about 1000 ms here. That was found while it waited for its turn; nothing was computed."
    }
    assert runner.tokens_run == 0
    assert len(run_all(scheduler, runner)[2]) == 20


def test_tokens_that_have_to_come_count(scheduler: Scheduler, runner: FakeRunner) -> None:
    knows(scheduler, 0.1)
    scheduler.add([new(1, 16, 30, seconds=1, min_tokens=21), new(2, 16, 30, seconds=1, min_tokens=5)])
    (text,) = ended(scheduler.expire(NOW)).values()
    assert "computing 16 tokens before its next one and 20 more that it asks for takes" in text


def test_nothing_is_foretold_before_anything_is_known(scheduler: Scheduler) -> None:
    scheduler.add([new(1, 900, seconds=0.001)])
    assert scheduler.expire(NOW) == []


def test_what_others_have_computed_meanwhile_counts(scheduler: Scheduler, runner: FakeRunner) -> None:
    knows(scheduler, 0.1)
    prompt = new(1, 160).prompt_token_ids
    scheduler.add([NewRequest(1, prompt, SamplingParams(max_tokens=1))])
    scheduler.add([NewRequest(2, prompt, SamplingParams(max_tokens=1), deadline=NOW + 0.49)])
    while not any(r.request_id == 1 and r.num_computed_tokens > 100 for r in scheduler.requests()):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
    assert scheduler.expire(NOW) == []


def test_beams_end_together(scheduler: Scheduler, runner: FakeRunner) -> None:
    asked = SamplingParams(max_tokens=20, beam=BeamParams(3))
    scheduler.add([NewRequest(i, [1, 2, 3], asked, group=1, deadline=NOW + 1) for i in (1, 2, 3)])
    assert set(ended(scheduler.expire(NOW + 2))) == {1, 2, 3}
    assert not scheduler.has_work
    scheduler.check()


def test_in_the_middle_of_a_step_its_pages_stay_until_that_is_over(scheduler: Scheduler, runner: FakeRunner) -> None:
    scheduler.add([new(1, seconds=1)])
    plan = scheduler.schedule()
    assert set(ended(scheduler.expire(NOW + 2))) == {1}
    assert scheduler.cache.pool.num_used > 0
    assert scheduler.update(plan, runner.execute(plan)) == []
    assert scheduler.cache.pool.num_used == 0
    scheduler.check()


def test_not_while_a_step_is_scheduled_ahead(scheduler: Scheduler) -> None:
    scheduler.add([new(1, seconds=1)])
    scheduler.schedule()
    assert scheduler.schedule().rows
    with pytest.raises(RuntimeError, match="looking ahead"):
        scheduler.expire(NOW + 2)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=10),
    blocks=st.integers(24, 80),
    pace=st.floats(0.2, 3.0),
)
def test_ended_too_late_or_complete_and_right(asked: list[tuple[int, int, int]], blocks: int, pace: float) -> None:
    """On a clock by which each step takes `pace`, whoever is ended early could not have been done alone either."""
    runner = FakeRunner(num_blocks=blocks, max_model_len=90)
    scheduler = make_scheduler(runner, prefix_cache=False)
    knows(scheduler, pace)
    prompts = {}
    for i, (length, max_tokens, seconds) in enumerate(asked, 1):
        scheduler.add([new(i, length, max_tokens, seconds=seconds)])
        prompts[i] = length
    tokens: dict[int, list[int]] = {i: [] for i in prompts}
    over: dict[int, FinishReason] = {}
    now = NOW
    while scheduler.has_work:
        for output in scheduler.expire(now):
            length, _, seconds = asked[output.request_id - 1]
            over[output.request_id] = FinishReason.DEADLINE
            alone = pace * -(-length // 16) / 2
            assert now >= NOW + seconds or now + alone * 1.01 > NOW + seconds
        scheduler.check()
        if not scheduler.has_work:
            break
        for output in step(scheduler, runner):
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                over[output.request_id] = output.finish_reason
        now += pace
    assert set(over) == set(prompts)
    for i, (length, max_tokens, _) in enumerate(asked, 1):
        assert tokens[i] == expected_tokens(new(i, length).prompt_token_ids, len(tokens[i]))
        assert over[i] is FinishReason.DEADLINE or len(tokens[i]) == max_tokens
    assert scheduler.cache.pool.num_used == 0
