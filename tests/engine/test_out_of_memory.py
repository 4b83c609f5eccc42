"""A step that finds too little memory fails the requests that cannot run alone, and nobody else, wherever it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import engine.flight
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.load_runner import load_runner
from engine.memory import EngineMemoryError
from engine.messages import NewRequest
from engine.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.stepper import Stepper
from engine.types import Draw, SamplingParams, StepPlan, nothing
from engine.warm_up import rehearse
from tests.engine.models import row, write_model

SEEDED = SamplingParams(temperature=1.0, seed=3, logprobs=2, repetition_penalty=1.2)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=1)
# Where memory is asked for in a step, and what is patched there.
PLACES = ("inputs", "copies", "forward", "logits", "draw", "way back", "prompt scores")


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    write_model(tmp_path / "tiny.gguf")
    return load_runner(tmp_path / "tiny.gguf", precision="float32", max_model_len=160, kv_cache_bytes=4 << 20)


def at(runner: ModelRunner, place: str) -> tuple[object, str]:
    """Object and attribute of a place."""
    return {
        "inputs": (runner._inputs, "send"),
        "copies": (runner, "copy_pages"),
        "forward": (runner.decoder, "hidden"),
        "logits": (runner.decoder, "logits"),
        "draw": (runner.sampler, "draw"),
        "way back": (engine.flight, "Download"),
        "prompt scores": (engine.flight.PromptScores, "compute"),
    }[place]  # type: ignore[return-value]


def starve(
    patch: pytest.MonkeyPatch, runner: ModelRunner, place: str, is_too_much: Callable[[StepPlan], bool]
) -> list[StepPlan]:
    """From now on a step for which this holds finds too little memory at the place. Returns those that did."""
    owner, name = at(runner, place)
    plain, begin = getattr(owner, name), runner.begin
    current: list[StepPlan] = []
    failed: list[StepPlan] = []

    def begun(plan: StepPlan) -> object:
        current[:] = [plan]
        return begin(plan)

    def asked(*arguments: object, **keywords: object) -> object:
        if is_too_much(current[0]):
            failed.append(current[0])
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return plain(*arguments, **keywords)

    patch.setattr(runner, "begin", begun)
    patch.setattr(owner, name, asked)
    return failed


def plan() -> StepPlan:
    """Two that go on, two prompts, the second with a sibling; and a page that is copied for the first of them."""
    old = list(range(40, 57))
    rows = [
        row(old, [1, 2], start=16, request_id=1, params=SEEDED),
        row(old, [1, 3], start=16, request_id=2),
        row(list(range(5, 30)), [4, 5], request_id=3, params=SCORED),
        row(list(range(60, 69)), [6], request_id=4, params=SEEDED),
    ]
    rows[2].score_from = 0
    rows[3].draws = (Draw(5, SamplingParams(temperature=0.0)),)
    return StepPlan(rows, copies=[(7, 2)])


@pytest.fixture
def expected(runner: ModelRunner) -> list[object]:
    for page in (1, 7):  # the beginning of the two that go on, and something to be copied
        runner.execute(StepPlan([row(list(range(40, 57)), [page, 8], stop=16)]))
    return list(runner.execute(plan()))


@pytest.mark.parametrize("most_rows", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_in_pieces_yields_what_it_does_in_one(
    runner: ModelRunner, expected: list[object], monkeypatch: pytest.MonkeyPatch, place: str, most_rows: int
) -> None:
    failed = starve(monkeypatch, runner, place, lambda step: len(step.rows) > most_rows)
    calls: list[int] = []
    assert runner.execute(plan(), lambda: calls.append(1)) == expected
    assert failed
    assert calls == [1], "what is done meanwhile is done once"


@pytest.mark.parametrize("place", ["inputs", "forward", "logits", "draw", "way back"])
def test_who_does_not_fit_alone_fails_alone(
    runner: ModelRunner, expected: list[object], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    starve(monkeypatch, runner, place, lambda step: step.num_tokens > 20)
    results = runner.execute(plan())
    assert [result.error is None for result in results] == [True, True, False, True]
    assert [results[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
    assert "a step of 25 tokens in 1 rows found too little memory" in (results[2].error or "")


@pytest.mark.parametrize("place", ["forward", "draw", "way back"])
def test_where_nothing_fits_all_fail_and_the_next_step_runs(
    runner: ModelRunner, expected: list[object], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with monkeypatch.context() as patch:
        starve(patch, runner, place, lambda step: True)
        assert all(result.error for result in runner.execute(plan()))
    assert runner.execute(plan()) == expected


def test_the_rehearsal_of_the_largest_steps_does_not_make_do_with_less(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    starve(monkeypatch, runner, "draw", lambda step: len(step.rows) > 1)
    with pytest.raises(EngineMemoryError, match="lower max_num_batched_tokens"):
        rehearse(runner)


def generate(runner: ModelRunner, *, ahead: bool) -> dict[int, list[int]]:
    cache = PrefixCache(BlockPool(60), 16, model_digest=b"", kv_dtype="float32")
    config = SchedulerConfig(4, 24, max_model_len=runner.max_model_len)
    scheduler = Scheduler(config, cache, eos_token_ids=frozenset())
    params = [SEEDED, SamplingParams(temperature=0.0), SamplingParams(seed=9)]
    scheduler.add([NewRequest(i, [i + 2, *range(7, 30 + i)], p) for i, p in enumerate(params)])
    stepper, found = Stepper(runner, scheduler, None, ahead=ahead), {i: list[int]() for i in range(len(params))}
    while scheduler.has_work:
        for done in stepper.step(nothing):
            assert not done.has_failed
            for output in done.outputs:
                assert output.error is None
                found[output.request_id] += output.token_ids
        scheduler.check()
    assert cache.pool.num_used == 0
    return found


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("place", ["inputs", "forward", "logits", "draw"])
def test_answers_are_the_same_when_any_step_is_starved(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, place: str, ahead: bool
) -> None:
    expected = generate(runner, ahead=False)
    assert generate(runner, ahead=ahead) == expected
    number = 0

    def sometimes(step: StepPlan) -> bool:
        nonlocal number
        number += 1
        return len(step.rows) > 1 and number % 3 == 0

    failed = starve(monkeypatch, runner, place, sometimes)
    assert generate(runner, ahead=ahead) == expected
    assert len(failed) > 3
