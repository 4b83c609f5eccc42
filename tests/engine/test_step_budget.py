"""The token budget that holds a time per output token, on simulated step times: affine, convex, noisy, changing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.limits import SchedulerConfig
from engine.messages import NewRequest
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_budget import LEAST_CHUNK, StepBudget
from engine.spec.speculator import Speculator
from engine.types import RowResult, SamplingParams, StepPlan
from tests.engine.fakes import Clairvoyant, FakeRunner, expected_tokens, make_scheduler
from tests.engine.test_turns import new

TARGET = 0.05


def scheduler_with(
    runner: FakeRunner, *, target: float | None = TARGET, rows: int = 16, budget: int = 128, drafts: int = 0
) -> Scheduler:
    scheduler = make_scheduler(
        runner,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_waiting=400,
        speculator=Speculator(Clairvoyant(), drafts, adaptive=False) if drafts else None,
    )
    scheduler.step_budget = StepBudget(budget, target)
    return scheduler


class Simulation:
    """Runs a scheduler on a model whose steps take `seconds(tokens)`; keeps the time per output token of each step."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, seconds: Callable[[int], float]) -> None:
        self.scheduler, self.runner, self.seconds = scheduler, runner, seconds
        self.per_token: list[float] = []
        self.least: list[float] = []  # the same, or what its answers alone would have taken, if it had a least chunk
        self.sizes: list[int] = []
        self.tokens: dict[int, list[int]] = {}

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.rows
        answering = [row for row in plan.rows if row.sample and row.start >= row.num_prompt_tokens]
        single = sum(len(row.token_ids) - row.num_drafts == 1 for row in plan.rows)
        results = self.runner.execute(plan)
        took = self.seconds(plan.num_tokens)
        allowed = max(self.scheduler.step_budget.tokens, single + LEAST_CHUNK)
        if answering:
            assert plan.num_tokens <= allowed
            generated = sum(len(r.token_ids) for r, row in zip(results, plan.rows, strict=True) if row in answering)
            self.per_token.append(took * len(answering) / generated)
            has_least_chunk = 0 < plan.num_tokens - single <= LEAST_CHUNK
            self.least.append(self.seconds(single) if has_least_chunk else self.per_token[-1])
        self.sizes.append(plan.num_tokens)
        for output in self.scheduler.update(plan, results):
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        self.scheduler.step_budget.timed(plan, results, took)
        return plan


@settings(max_examples=25, deadline=None)
@given(
    fixed=st.floats(0.001, 0.03),
    per_token=st.floats(0.0002, 0.003),
    curve=st.floats(0.0, 5e-6),
    noise=st.floats(0.0, 0.15),
    seed=st.integers(0, 1000),
)
def test_the_target_is_held_where_it_can_be(
    fixed: float, per_token: float, curve: float, noise: float, seed: int
) -> None:
    """Under more load than the target leaves room for, steps come to take as long as they may, and no longer.

    But for the least chunk of a prompt that has begun, beside answers that hold the target by themselves.
    """
    dice = random.Random(seed)

    def seconds(tokens: int) -> float:
        return (fixed + per_token * tokens + curve * tokens**2) * dice.uniform(1 - noise, 1 + noise)

    runner = FakeRunner(num_blocks=600, max_model_len=128)
    scheduler = scheduler_with(runner)
    simulation = Simulation(scheduler, runner, seconds)
    number = 0
    for _ in range(160):
        while scheduler.num_waiting < 4:
            number += 1
            scheduler.add([new(number, dice.randint(1, 60), dice.randint(1, 25))])
        simulation.step()
    settled = list(zip(simulation.per_token, simulation.least, strict=True))[-80:]
    late = [taken for taken, least in settled if min(taken, least) > TARGET * (1.25 + 2 * noise)]
    assert len(late) <= len(settled) // 10
    largest = fixed + per_token * 128 + curve * 128**2
    if largest > 1.5 * TARGET:  # it is the target that bounds the steps, and a good part of what it allows is used
        assert sum(taken for taken, _ in settled) / len(settled) >= TARGET / 3


def test_it_follows_a_machine_that_gets_slower_and_faster() -> None:
    runner = FakeRunner(num_blocks=600, max_model_len=128)
    scheduler = scheduler_with(runner)
    pace = 0.0008
    simulation = Simulation(scheduler, runner, lambda tokens: 0.01 + pace * tokens)
    number = 0
    sizes = []
    for pace in (0.0008, 0.003, 0.0008):
        for _ in range(120):
            while scheduler.num_waiting < 4:
                number += 1
                scheduler.add([new(number, 50, 20)])
            simulation.step()
        sizes.append(scheduler.step_budget.tokens)
        assert 0.7 * 0.04 / pace <= sizes[-1] <= 1.3 * 0.04 / pace
    assert sizes[1] < sizes[0] / 2 < sizes[2]


@settings(max_examples=30, deadline=None)
@given(took=st.floats(0.2, 50), rows=st.integers(1, 6), lengths=st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_a_target_out_of_reach_still_lets_all_of_them_finish(took: float, rows: int, lengths: list[int]) -> None:
    runner = FakeRunner(num_blocks=200, max_model_len=128)
    scheduler = scheduler_with(runner, rows=rows, budget=32)
    simulation = Simulation(scheduler, runner, lambda tokens: took)
    for number, length in enumerate(lengths, 1):
        scheduler.add([new(number, length, 6)])
    for _ in range(sum(lengths) + 8 * len(lengths) + 10):
        if not scheduler.has_work:
            break
        simulation.step()
    assert not scheduler.has_work
    for number, length in enumerate(lengths, 1):
        assert simulation.tokens[number] == expected_tokens(new(number, length).prompt_token_ids, 6)
    assert scheduler.step_budget.tokens <= 8, "it comes down, if not at once"


def test_no_more_run_than_can_have_their_next_token_in_time() -> None:
    runner = FakeRunner(num_blocks=600, max_model_len=128)
    scheduler = scheduler_with(runner)
    simulation = Simulation(scheduler, runner, lambda tokens: 0.01 * tokens)  # five at most
    scheduler.add([new(i, 1, 100) for i in range(1, 80)])
    rows = [len(simulation.step().rows) for _ in range(400)]
    assert rows[0] == 16, "nothing was known then"
    assert 4 <= sum(rows[200:]) / 200 <= 5.5
    assert scheduler.num_waiting > 0


def test_without_answers_that_wait_a_step_is_as_large_as_it_can_be() -> None:
    runner = FakeRunner(num_blocks=600, max_model_len=1000)
    scheduler = scheduler_with(runner)
    scheduler.step_budget.timed(*answered(100), 5.0)
    assert scheduler.step_budget.tokens < 128
    scheduler.add([new(1, 600)])
    assert scheduler.schedule().num_tokens == 128


def test_without_a_target_nothing_changes() -> None:
    runner = FakeRunner(num_blocks=600, max_model_len=128)
    scheduler = scheduler_with(runner, target=None)
    simulation = Simulation(scheduler, runner, lambda tokens: 9.0)
    scheduler.add([new(i, 100, 20) for i in range(1, 40)])
    for _ in range(10):
        simulation.step()
    assert scheduler.step_budget.tokens == 128
    assert max(simulation.sizes) == 128


def test_several_tokens_of_a_step_count_as_several() -> None:
    """With drafts that hold, a step may take as many times longer."""
    found = []
    for drafts in (0, 3):
        runner = FakeRunner(num_blocks=600, max_model_len=500)
        scheduler = scheduler_with(runner, rows=4, drafts=drafts)
        simulation = Simulation(scheduler, runner, lambda tokens: 0.12)
        scheduler.add([new(i, 4, 400) for i in (1, 2)])
        for _ in range(30):
            simulation.step()
        found.append(scheduler.step_budget.tokens)
    assert found == [1, 128]


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan")])
def test_a_target_must_be_a_time(target: float) -> None:
    with pytest.raises(ValueError, match="positive time per output token"):
        StepBudget(10, target)


def test_the_scheduler_takes_it_from_its_bounds() -> None:
    assert SchedulerConfig(target_tpot_seconds=0.1).target_tpot_seconds == 0.1
    assert SchedulerConfig().target_tpot_seconds is None


def answered(rows: int) -> tuple[StepPlan, list[RowResult]]:
    """A step in which so many answers got a token."""
    runner = FakeRunner(num_blocks=600)
    scheduler = make_scheduler(runner, max_num_seqs=rows, max_num_batched_tokens=rows)
    scheduler.add([NewRequest(i, [i], SamplingParams(max_tokens=5)) for i in range(1, rows + 1)])
    for _ in range(2):
        plan = scheduler.schedule()
        results = runner.execute(plan)
        scheduler.update(plan, results)
    return plan, results
