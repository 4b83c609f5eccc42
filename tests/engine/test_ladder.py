"""The ladder on a small real model: cache, chunks, pages, batch mates, preemption and abort at every step, drafts.

What each request says alone, without a cache and in one chunk, is the measure; in float32 nothing may change it. The
requests have every sampling option between them (`test_schedules.py`), one has its prompt scored.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from engine.load_runner import load_runner
from engine.messages import Output
from engine.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.spec.ngram import NgramProposer
from engine.spec.proposer import Proposer
from engine.spec.speculator import Speculator
from tests.engine.test_schedules import alone, made, requests, run, runner, said, scheduler_of
from tests.engine.test_spec_real import Wild

__all__ = ["alone", "made", "runner"]  # fixtures

SCORED = 7  # the request with `prompt_logprobs`
ALL = 1000


@pytest.fixture(scope="module")
def wide(made) -> ModelRunner:
    """The same model with pages of 32 tokens."""
    wide = load_runner(
        made[0], precision="float32", max_model_len=96, kv_cache_bytes=8 << 20, max_num_seqs=16, block_size=32
    )
    wide.attention.kv_cache.fill_(torch.nan)
    return wide


@pytest.fixture(scope="module")
def scores(runner, alone) -> list[float]:
    """Log-probabilities of the scored prompt, computed in one chunk."""
    outputs = run(scheduler_of(runner, cache=False), runner, [requests()[SCORED]])
    return scores_of(outputs, SCORED)


def scores_of(outputs: dict[int, list[Output]], request_id: int) -> list[float]:
    return [entry.logprob for output in outputs[request_id] for entry in output.prompt_logprobs or ()]


def steps_of(runner: ModelRunner, make: Callable[[], Scheduler]) -> int:
    """How many steps it takes when nothing happens."""
    numbers: list[int] = []
    run(make(), runner, requests(), numbers.append)
    return len(numbers)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, ALL])
@pytest.mark.parametrize("page", [16, 32])
def test_chunks_pages_and_cache(runner, wide, alone, scores, page, chunk, cache):
    used = runner if page == 16 else wide
    scheduler = scheduler_of(used, budget=chunk, rows=min(chunk, 16), cache=cache)
    cold = run(scheduler, used, requests())
    assert said(cold) == alone
    assert scores_of(cold, SCORED) == pytest.approx(scores, abs=1e-4)
    warm = run(scheduler, used, requests(100))
    assert {i - 100: tokens for i, tokens in said(warm).items()} == alone
    assert scores_of(warm, 100 + SCORED) == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_batch_mates_come_and_go(runner, alone, seed):
    """A few at a time, in any order, each perhaps several times."""
    dice = random.Random(seed)
    scheduler = scheduler_of(runner, budget=dice.choice([18, 33, 64]))
    left = [request for first in (0, 100, 200) for request in requests(first)]
    dice.shuffle(left)
    found: dict[int, list[int]] = {request.request_id: [] for request in left}
    while left or scheduler.has_work:
        if left and dice.random() < 0.4:
            scheduler.add([left.pop() for _ in range(min(len(left), dice.randint(1, 4)))])
        if scheduler.has_work:
            plan = scheduler.schedule()
            for output in scheduler.update(plan, runner.execute(plan)):
                found[output.request_id] += output.token_ids
    assert found == {i: alone[i % 100] for i in found}


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("who", ["all", "the last", "the first"])
def test_preempted_at_every_step(runner, alone, who, cache):
    def make() -> Scheduler:
        return scheduler_of(runner, budget=40, cache=cache)

    for at in range(steps_of(runner, make)):
        scheduler = make()

        def preempt(number: int, at: int = at, scheduler: Scheduler = scheduler) -> None:
            if number == at:
                running = list(scheduler._running)
                for victim in {"all": running, "the last": running[-1:], "the first": running[:1]}[who]:
                    scheduler._preempt(victim)

        assert said(run(scheduler, runner, requests(), preempt)) == alone, f"preempted at step {at}"
        assert at == 0 or scheduler.stats.preemptions, "nobody ran"


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "within a step"])
def test_aborted_at_every_step(runner, alone, in_flight):
    def make() -> Scheduler:
        return scheduler_of(runner, budget=40, blocks=14)

    for at in range(steps_of(runner, make)):
        scheduler = make()
        gone = {at % 8, (3 * at + 1) % 8}
        found: dict[int, list[int]] = {i: [] for i in alone}
        scheduler.add(requests())
        number = 0
        while scheduler.has_work:
            if number == at and not in_flight:
                scheduler.abort(gone)
            if not scheduler.has_work:
                break
            plan = scheduler.schedule()
            results = runner.execute(plan)
            if number == at and in_flight:
                scheduler.abort(gone)
            for output in scheduler.update(plan, results):
                found[output.request_id] += output.token_ids
            scheduler.check()
            number += 1
        pool = scheduler.cache.pool
        assert (pool.num_used, pool.num_free + pool.num_cached) == (0, pool.total)
        for i, tokens in found.items():
            want = alone[i]
            assert tokens == (want[: len(tokens)] if i in gone else want), f"request {i}, aborted {gone} at step {at}"


@pytest.mark.slow
@pytest.mark.parametrize("source", [NgramProposer, Wild])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_drafts_and_preemption_at_every_step(runner, alone, source: Callable[[], Proposer], cache):
    def make() -> Scheduler:
        return scheduler_of(runner, budget=40, cache=cache, speculator=Speculator(source(), 4, adaptive=False))

    for at in range(steps_of(runner, make)):
        scheduler = make()

        def preempt(number: int, at: int = at, scheduler: Scheduler = scheduler) -> None:
            if number == at:
                for victim in list(scheduler._running)[1::2]:
                    scheduler._preempt(victim)

        assert said(run(scheduler, runner, requests(), preempt)) == alone, f"preempted at step {at}"
    assert source is NgramProposer or scheduler.speculator.stats.drafted_tokens > 20


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, ALL])
def test_drafts_and_chunks(runner, alone, chunk):
    speculator = Speculator(Wild(), 4, adaptive=False)
    scheduler = scheduler_of(runner, budget=chunk, rows=min(chunk, 16), speculator=speculator)
    assert said(run(scheduler, runner, requests())) == alone
    assert {i - 100: tokens for i, tokens in said(run(scheduler, runner, requests(100))).items()} == alone
