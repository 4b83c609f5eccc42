"""Answer `i` of a request with a seed is the answer to the same request alone with `seed + i`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.load_runner import load_runner
from engine.messages import NewRequest
from engine.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.types import SamplingParams
from tests.engine.models import write_model

PROMPT = [5, 17, 93, 45, 201, 88, 139, 77, 17, 93, 45, 301, 9, 12, 44, 100, 101, 102, 103]
N, LENGTH = 6, 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeds") / "tiny.gguf"
    write_model(path, encoding=GGMLQuantizationType.Q4_1)
    return path


@pytest.fixture(scope="module", params=["float32", "auto"])
def runner(request: pytest.FixtureRequest, path: Path) -> ModelRunner:
    runner = load_runner(path, precision=request.param, max_model_len=160, kv_cache_bytes=4 << 20, device="cpu")
    runner.attention.kv_cache.fill_(torch.nan)
    return runner


def make_scheduler(runner: ModelRunner, **options: bool) -> Scheduler:
    cache = PrefixCache(BlockPool(80), 16, model_digest=b"", kv_dtype="float32", **options)
    return Scheduler(SchedulerConfig(16, 64, max_model_len=160), cache, eos_token_ids=frozenset({1}))


def run(scheduler: Scheduler, runner: ModelRunner) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of every answer."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        for output in scheduler.update(plan, runner.execute(plan)):
            assert output.error is None
            tokens, logprobs = found.setdefault(output.request_id, ([], []))
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs or ()]
        scheduler.check()
    return found


def params(index: int) -> SamplingParams:
    return SamplingParams(seed=11 + index, logprobs=0, max_tokens=LENGTH)


def ask(scheduler: Scheduler, indices: range, prompt: list[int] = PROMPT) -> None:
    scheduler.add([NewRequest(i, prompt, params(i), None, 1) for i in indices])


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[tuple[list[int], list[float]]]:
    found = []
    for i in range(N):
        scheduler = make_scheduler(runner)
        ask(scheduler, range(i, i + 1))
        found.append(run(scheduler, runner)[i])
    assert len({tuple(tokens) for tokens, _ in found}) == N, "each seed has an answer of its own"
    return found


def check(found: dict[int, tuple[list[int], list[float]]], alone: list[tuple[list[int], list[float]]]) -> None:
    for i, (tokens, logprobs) in enumerate(alone):
        assert found[i][0] == tokens
        assert found[i][1] == pytest.approx(logprobs, abs=1e-5)
        assert found[i][1][0] == logprobs[0], "the first tokens are drawn from the very same logits"


def test_together_as_alone(runner: ModelRunner, alone: list[tuple[list[int], list[float]]]) -> None:
    scheduler = make_scheduler(runner)
    ask(scheduler, range(N))
    check(run(scheduler, runner), alone)


def test_among_others_and_with_a_prompt_that_is_cached(
    runner: ModelRunner, alone: list[tuple[list[int], list[float]]]
) -> None:
    scheduler = make_scheduler(runner)
    scheduler.add([NewRequest(100, [*PROMPT, 3, 4, 5], SamplingParams(max_tokens=8))])
    run(scheduler, runner)
    scheduler.add([NewRequest(100 + i, [7] * (3 + 20 * i), SamplingParams(max_tokens=30)) for i in range(3)])
    ask(scheduler, range(N))
    found = run(scheduler, runner)
    for i, (tokens, logprobs) in enumerate(alone):
        assert found[i][0] == tokens
        assert found[i][1] == pytest.approx(logprobs, abs=1e-5)
