"""Scheduler, prefix cache and the real model together: whatever the scheduling, the same tokens in exact arithmetic."""

import pytest

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.messages import NewRequest
from engine.scheduling.scheduler import Scheduler
from engine.types import SamplingParams
from tests.engine.fakes import check_plan

SHARED = list(range(2000, 2037))
PROMPTS = {1: [*SHARED, 5, 6, 7], 2: [*SHARED, 9], 3: [11, 12, 13], 4: SHARED[:20]}
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def runner(smollm2_path):
    import torch

    from engine.load_runner import load_runner

    before = torch.get_num_threads()
    # A page of 16 tokens takes 16 * 46,080 bytes in float32; 64 pages are plenty.
    runner = load_runner(
        smollm2_path,
        precision="float32",
        threads=1,
        max_model_len=256,
        kv_cache_bytes=64 * 16 * 46_080,
        device="cpu",
        max_num_batched_tokens=128,
        max_num_seqs=8,
    )
    yield runner
    torch.set_num_threads(before)


def make_scheduler(runner, *, num_blocks=64, budget=128, prefix_cache=True, max_num_seqs=8):
    cache = PrefixCache(
        BlockPool(min(num_blocks, runner.geometry.num_blocks)),
        runner.geometry.block_size,
        model_digest=b"",
        kv_dtype="float32",
        enabled=prefix_cache,
    )
    config = SchedulerConfig(max_num_seqs, budget, max_model_len=runner.max_model_len)
    return Scheduler(config, cache, eos_token_ids=frozenset())


def run(scheduler, runner, prompts, before_step=lambda number: None, temperature=0.0, start_id=0):
    """Generated tokens by prompt number."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    scheduler.add([NewRequest(start_id + i, prompt, params) for i, prompt in prompts.items()])
    tokens = {i: [] for i in prompts}
    number = 0
    while scheduler.has_work:
        number += 1
        before_step(number)
        plan = scheduler.schedule()
        check_plan(scheduler, plan)
        for output in scheduler.update(plan, runner.execute(plan)):
            assert output.error is None
            tokens[output.request_id - start_id] += output.token_ids
        scheduler.check()
    return tokens


@pytest.fixture(scope="module")
def alone(runner):
    """Each prompt by itself, without a prefix cache: what every other schedule must reproduce."""
    return {i: run(make_scheduler(runner, prefix_cache=False), runner, {i: prompt})[i] for i, prompt in PROMPTS.items()}


def test_batched_and_with_the_prefix_cache_warm_or_cold(runner, alone):
    scheduler = make_scheduler(runner)
    assert run(scheduler, runner, PROMPTS) == alone
    hits = scheduler.cache.stats.hit_tokens
    assert run(scheduler, runner, PROMPTS, start_id=100) == alone
    assert scheduler.cache.stats.hit_tokens - hits >= 32 + 32 + 16


@pytest.mark.parametrize("budget", [8, 17, 40])
def test_chunk_sizes(runner, alone, budget):
    assert run(make_scheduler(runner, budget=budget), runner, PROMPTS) == alone


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_under_a_small_pool(runner, alone, prefix_cache):
    scheduler = make_scheduler(runner, num_blocks=7, prefix_cache=prefix_cache)
    assert run(scheduler, runner, PROMPTS) == alone
    if not prefix_cache:
        assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize("at", [2, 4, 7])
def test_preempted_in_the_middle(runner, alone, at):
    scheduler = make_scheduler(runner)

    def preempt(number):
        if number == at:
            for victim in list(scheduler._running)[1:]:
                scheduler._preempt(victim)

    assert run(scheduler, runner, PROMPTS, preempt) == alone
    assert scheduler.stats.preemptions == 3


def test_aborted_neighbours_change_nothing(runner, alone):
    scheduler = make_scheduler(runner)

    def abort(number):
        if number == 4:
            scheduler.abort([1, 3])

    tokens = run(scheduler, runner, PROMPTS, abort)
    assert {i: tokens[i] for i in (2, 4)} == {i: alone[i] for i in (2, 4)}
    assert scheduler.cache.pool.num_used == 0


def test_a_seed_gives_the_same_draw_in_any_schedule(runner):
    one = run(make_scheduler(runner), runner, PROMPTS, temperature=1.0)
    small = run(make_scheduler(runner, num_blocks=8, budget=16), runner, PROMPTS, temperature=1.0, start_id=50)
    assert one == small
