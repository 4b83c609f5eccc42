"""A tiny real model behind the real scheduler: whatever runs beside a request and however it is scheduled, its answer
is the same, with every sampling option; siblings and beams on shared pages say what they say alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.load_runner import load_runner
from engine.messages import NewRequest, Output
from engine.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.spec.speculator import Speculator
from engine.stepper import Stepper
from engine.types import AWAITED, BeamParams, Flight, RowResult, SamplingParams, StepPlan, nothing
from tests.engine.fakes import check_plan
from tests.engine.models import write_model

OPTIONS: list[dict[str, object]] = [
    {"seed": 1},
    {"seed": 2, "top_p": 0.8, "temperature": 0.7},
    {"seed": 3, "top_k": 9, "logprobs": 2},
    {"seed": 4, "typical_p": 0.6},
    {"seed": 5, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.4},
    {"seed": 6, "bad_words": ((7,), (9, 11)), "logit_bias": {5: 4.0, 6: -100.0}},
    {"seed": 7, "min_tokens": 9, "stop_token_ids": frozenset(range(0, 320, 3))},
    {"temperature": 0.0, "prompt_logprobs": 1},
]
_DICE = random.Random(8)
SHARED = [_DICE.randrange(2, 320) for _ in range(23)]
PROMPTS = [[*SHARED[: _DICE.randrange(1, 24)], *(_DICE.randrange(2, 320) for _ in range(9))] for _ in OPTIONS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    path = tmp_path_factory.mktemp("schedules") / "tiny.gguf"
    model = write_model(path)
    model.generation_config.eos_token_id = None
    return path, model


@pytest.fixture(scope="module")
def runner(made: tuple[Path, transformers.PreTrainedModel]) -> ModelRunner:
    runner = load_runner(made[0], precision="float32", max_model_len=96, kv_cache_bytes=8 << 20, max_num_seqs=16)
    runner.attention.kv_cache.fill_(torch.nan)
    return runner


def scheduler_of(
    runner: ModelRunner,
    *,
    blocks: int = 200,
    budget: int = 64,
    cache: bool = True,
    rows: int = 16,
    speculator: Speculator | None = None,
) -> Scheduler:
    pages = PrefixCache(
        BlockPool(min(blocks, runner.geometry.num_blocks)),
        runner.geometry.block_size,
        model_digest=b"",
        kv_dtype="float32",
        enabled=cache,
    )
    config = SchedulerConfig(rows, budget, max_model_len=runner.max_model_len)
    return Scheduler(config, pages, eos_token_ids=frozenset(), speculator=speculator)


def run(
    scheduler: Scheduler,
    runner: ModelRunner,
    new: Sequence[NewRequest],
    before_step: Callable[[int], None] = lambda number: None,
    *,
    ahead: bool = False,
) -> dict[int, list[Output]]:
    """`ahead`: begin each step before the one before it is over."""
    outputs: dict[int, list[Output]] = {request.request_id: [] for request in new}
    scheduler.add(new)
    stepper, number = Stepper(Checked(runner, scheduler), scheduler, None, ahead=ahead), 0
    while scheduler.has_work:
        before_step(number)
        for output in (output for done in stepper.step(nothing) for output in done.outputs):
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
        scheduler.check()
        number += 1
    assert scheduler.cache.pool.num_used == 0
    return outputs


class Checked:
    """A runner that looks at every plan, and counts the tokens that were still on the device when they were used."""

    num_awaited = 0

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.geometry, self.max_model_len = runner.geometry, runner.max_model_len
        self._runner, self._scheduler = runner, scheduler

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] = nothing) -> list[RowResult]:
        check_plan(self._scheduler, plan)
        return self._runner.execute(plan, meanwhile)

    def launch(self, plan: StepPlan) -> Flight:
        check_plan(self._scheduler, plan)
        Checked.num_awaited += sum(row.token_ids[0] == AWAITED for row in plan.rows)
        return self._runner.launch(plan)


def said(outputs: dict[int, list[Output]]) -> dict[int, list[int]]:
    return {i: [token for output in mine for token in output.token_ids] for i, mine in outputs.items()}


def requests(first_id: int = 0) -> list[NewRequest]:
    return [
        NewRequest(first_id + i, prompt, SamplingParams(max_tokens=14, ignore_eos=True, **options))  # type: ignore[arg-type]
        for i, (prompt, options) in enumerate(zip(PROMPTS, OPTIONS, strict=True))
    ]


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for request in requests():
        found |= said(run(scheduler_of(runner, cache=False), runner, [request]))
    return found


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cache": False},
        {"budget": 16},
        {"budget": 19, "rows": 3},
        {"blocks": 9},
        {"blocks": 8, "cache": False, "budget": 17},
        {"rows": 1},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_the_schedule(
    runner: ModelRunner, alone: dict[int, list[int]], how: dict[str, int]
) -> None:
    scheduler = scheduler_of(runner, **how)
    assert said(run(scheduler, runner, requests())) == alone
    again = said(run(scheduler, runner, list(reversed(requests(100)))))
    assert {i - 100: tokens for i, tokens in again.items()} == alone
    before = Checked.num_awaited
    ahead = said(run(scheduler_of(runner, **how), runner, requests(), ahead=True))
    assert ahead == alone
    assert Checked.num_awaited - before > 20, "most tokens are used before anybody has seen them"


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("cache", [True, False])
def test_answers_do_not_depend_on_preemption(
    runner: ModelRunner, alone: dict[int, list[int]], cache: bool, ahead: bool
) -> None:
    scheduler = scheduler_of(runner, cache=cache, budget=40)
    dice = random.Random(2)

    def preempt(number: int) -> None:
        for request in list(scheduler._running):
            if number % 3 == 1 and dice.random() < 0.4:
                scheduler._preempt(request)

    assert said(run(scheduler, runner, requests(), preempt, ahead=ahead)) == alone
    assert scheduler.stats.preemptions > 5


def test_other_lots_give_other_answers(runner: ModelRunner, alone: dict[int, list[int]]) -> None:
    """What the tests above compare is drawn indeed."""
    other = [replace_seed(request) for request in requests()]
    found = said(run(scheduler_of(runner), runner, other))
    assert all(found[i] != alone[i] for i in range(5))


def replace_seed(request: NewRequest) -> NewRequest:
    seed = None if request.params.seed is None else request.params.seed + 50
    return NewRequest(request.request_id, request.prompt_token_ids, replace(request.params, seed=seed))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33])
def test_siblings_say_what_they_say_alone(runner: ModelRunner, length: int, cache: bool) -> None:
    prompt = [*SHARED, *SHARED][:length]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=i) for i in range(5)]
    params[3] = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    want = {}
    for i, one in enumerate(params):
        want |= said(run(scheduler_of(runner, cache=False), runner, [NewRequest(i, prompt, one)]))
    scheduler = scheduler_of(runner, cache=cache, rows=3)
    group = [NewRequest(i, prompt, one, group=1) for i, one in enumerate(params)]
    assert said(run(scheduler, runner, group)) == want
    assert scheduler.stats.prefill_tokens == length - 1, "the prompt is computed once"
    assert said(run(scheduler_of(runner, cache=cache, rows=3), runner, group, ahead=True)) == want


@pytest.mark.parametrize("how", [{}, {"cache": False}, {"blocks": 16, "budget": 16}, {"rows": 4}], ids=str)
@pytest.mark.parametrize("beam", [BeamParams(4), BeamParams(3, 0.0, "never"), BeamParams(2, 2.0, True)], ids=str)
def test_beams_are_those_of_transformers(
    made: tuple[Path, transformers.PreTrainedModel], runner: ModelRunner, beam: BeamParams, how: dict[str, int]
) -> None:
    """With a plain request beside them, and tokens that end an answer."""
    ends = frozenset(int(t) for t in np.random.default_rng(4).integers(2, 320, 9))
    asked = SamplingParams(max_tokens=20, stop_token_ids=ends, beam=beam)
    prompt = PROMPTS[0]
    new = [NewRequest(i, prompt, asked, group=1) for i in range(beam.width)]
    mate = NewRequest(50, SHARED, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    found = said(run(scheduler_of(runner, **how), runner, [*new, mate], ahead=beam.width == 3))
    want = made[1].generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=beam.width,
        num_return_sequences=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=sorted(ends),
        pad_token_id=0,
    )
    for i, sequence in enumerate(want):
        assert sequence[len(prompt) :][: len(found[i])].tolist() == found[i]
        assert found[i][-1] in ends or len(found[i]) == 20
    (plain,) = said(run(scheduler_of(runner, cache=False), runner, [mate])).values()
    assert found[50] == plain
