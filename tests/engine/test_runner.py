"""The runner as the scheduler uses it: mixed rows, any chunking, any pages, faults that stay in their row."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.geometry import step_geometry
from engine.layers import native
from engine.load_runner import load_runner
from engine.loader import ModelFileError
from engine.memory import EngineMemoryError
from engine.runner import ModelRunner
from engine.types import RowResult, SamplingParams, StepPlan, StepRow
from engine.warm_up import largest_steps
from tests.engine.models import generate, row, write_model

PROMPT = [int(t) for t in np.random.default_rng(1).integers(2, 320, 70)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runner") / "tiny.gguf"
    write_model(path, encoding=GGMLQuantizationType.Q4_1)
    return path


def load(path: Path, **options: object) -> ModelRunner:
    standard = {"precision": "float32", "max_model_len": 160, "kv_cache_bytes": 4 << 20}
    runner = load_runner(path, **standard | options)  # type: ignore[arg-type]
    # Everything that a row does not own may hold anything.
    runner.attention.kv_cache.fill_(torch.nan)
    return runner


@pytest.fixture(params=["compiled", "torch"])
def runner(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    return load(path)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[int]:
    tokens = generate(load(path), PROMPT, 40, pages=range(1, 10))
    assert len(set(tokens)) > 10, "a model that repeats itself would hide mistakes"
    return tokens


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1000])
def test_chunk_size_does_not_matter(runner: ModelRunner, expected: list[int], chunk: int) -> None:
    assert generate(runner, PROMPT, 40, pages=range(1, 10), chunk=chunk) == expected


def test_page_order_does_not_matter(runner: ModelRunner, expected: list[int]) -> None:
    pages = random.Random(3).sample(range(1, runner.geometry.num_blocks), 9)
    assert generate(runner, PROMPT, 40, pages=pages) == expected


@pytest.mark.parametrize("block_size", [1, 8, 32, 64])
def test_page_size_does_not_matter(path: Path, expected: list[int], block_size: int) -> None:
    runner = load(path, block_size=block_size)
    pages = random.Random(4).sample(range(1, runner.geometry.num_blocks), -(-110 // block_size))
    assert generate(runner, PROMPT, 40, pages=pages, chunk=13) == expected


def test_long_contexts_are_joined_from_chunks(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    write_model(path)
    prompt = [int(t) for t in np.random.default_rng(2).integers(2, 320, 440)]
    runner = load(path, max_model_len=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        plain = load(path, max_model_len=512)
    # The reference attends to all keys at once; the compiled kernel in chunks of 256.
    assert generate(runner, prompt, 60, pages=range(1, 33)) == generate(plain, prompt, 60, pages=range(1, 33))


def test_batch_mates_do_not_matter(runner: ModelRunner) -> None:
    """Six requests of random length, started at random times, prefilled in random chunks, on shuffled pages."""
    dice = random.Random(5)
    prompts = [[dice.randrange(2, 320) for _ in range(dice.randrange(1, 60))] for _ in range(6)]
    alone = [generate(runner, prompt, 12, pages=range(1, 10)) for prompt in prompts]
    runner.attention.kv_cache.fill_(torch.nan)
    pages = dice.sample(range(1, runner.geometry.num_blocks), 6 * 5)
    tables = [pages[5 * i : 5 * i + 5] for i in range(6)]
    sequences, done, waiting = [list(prompt) for prompt in prompts], [0] * 6, set(range(6))
    while any(len(s) < len(p) + 12 for s, p in zip(sequences, prompts, strict=True)):
        if waiting and dice.random() < 0.5:
            waiting.remove(dice.choice(sorted(waiting)))
        rows: list[StepRow] = []
        for i in range(6):
            if i in waiting or len(sequences[i]) == len(prompts[i]) + 12:
                continue
            left = len(sequences[i]) - done[i]
            stop = done[i] + (1 if left == 1 else dice.randrange(1, left + 1))
            rows.append(row(list(sequences[i]), tables[i], start=done[i], stop=stop, request_id=i))
        rows.sort(key=lambda r: len(r.token_ids) > 1)
        for planned, result in zip(rows, runner.execute(StepPlan(rows)), strict=True):
            assert result.error is None
            assert (result.token_id is not None) == planned.sample
            done[planned.request_id] += len(planned.token_ids)
            if result.token_id is not None:
                sequences[planned.request_id].append(result.token_id)
    assert [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)] == alone


@pytest.mark.parametrize("where", ["page", "token"])
def test_a_fault_stays_in_its_row(runner: ModelRunner, where: str) -> None:
    """A NaN in one row's cache, or a token that does not exist, is that row's error and no one else's."""
    tables = [[1, 2], [3, 4], [5, 6]]
    prompts = [PROMPT[:20], PROMPT[20:42], PROMPT[42:70]]
    healthy = [generate(runner, p, 2, pages=t) for p, t in zip(prompts, tables, strict=True)]
    sequences = [[*p, h[0]] for p, h in zip(prompts, healthy, strict=True)]
    if where == "page":
        runner.attention.kv_cache[0, 0, 3, 7] = torch.nan
    else:
        sequences[1][-1] = 320
    rows = [row(s, t, start=len(s) - 1, request_id=i) for i, (s, t) in enumerate(zip(sequences, tables, strict=True))]
    results = runner.execute(StepPlan(rows))
    assert results[0] == RowResult(0, (healthy[0][1],))
    assert results[2] == RowResult(2, (healthy[2][1],))
    assert results[1].token_id is None
    assert results[1].error is not None
    assert ("not finite" if where == "page" else "outside the vocabulary") in results[1].error


def test_a_prefill_chunk_reports_its_nan_too(runner: ModelRunner) -> None:
    """A chunk that does not sample must not be published when it is not finite."""
    runner.execute(StepPlan([row(PROMPT, range(1, 6), stop=32)]))
    runner.attention.kv_cache[1, 1, 2, 5] = torch.inf
    (result,) = runner.execute(StepPlan([row(PROMPT, range(1, 6), start=32, stop=64)]))
    assert result.token_id is None
    assert result.error is not None
    assert "not finite" in result.error


def test_a_broken_plan_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(ValueError, match="do not fit max_model_len 160"):
        runner.execute(StepPlan([row([5] * 161, range(1, 12))]))
    with pytest.raises(ValueError, match="2 pages for 70 tokens"):
        runner.execute(StepPlan([row(PROMPT, [1, 2])]))
    with pytest.raises(ValueError, match="do not fit"):
        runner.execute(StepPlan([dataclasses.replace(row(PROMPT, range(1, 6)), token_ids=[])]))
    assert runner.execute(StepPlan([])) == []


def test_step_geometry_lays_rows_end_to_end() -> None:
    rows = [row(PROMPT[:18], [4, 9], start=17), row(PROMPT[:6], [7], start=2), row(PROMPT[:1], [3])]
    step = step_geometry(rows, 16, 160)
    assert step.query_starts.tolist() == [0, 1, 5, 6]
    assert step.seq_lens.tolist() == [18, 6, 1]
    assert step.positions.tolist() == [17, 2, 3, 4, 5, 0]
    assert step.slots.tolist() == [9 * 16 + 1, 7 * 16 + 2, 7 * 16 + 3, 7 * 16 + 4, 7 * 16 + 5, 3 * 16]
    assert step.block_tables.tolist() == [[4, 9], [7, 0], [3, 0]]
    assert (step.num_decode_rows, step.max_query_len, step.max_seq_len) == (1, 4, 18)


def test_seeds_repeat_in_any_company(runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=42, top_p=0.9)
    plain = row(PROMPT, range(1, 6), params=params, request_id=1)
    mates = [row(PROMPT[:n], range(10 + 5 * n, 15 + 5 * n), params=SamplingParams(), request_id=n) for n in (3, 9)]
    (alone,) = runner.execute(StepPlan([plain]))
    together = runner.execute(StepPlan([*mates, dataclasses.replace(plain, request_id=77)]))
    assert together[-1].token_id == alone.token_id


def test_sizes_follow_the_budget(path: Path) -> None:
    runner = load(path, kv_cache_bytes=100 * 16 * 2 * 2 * 2 * 32 * 4)
    assert (runner.geometry.num_blocks, runner.geometry.bytes_per_token) == (100, 2 * 2 * 2 * 32 * 4)
    ledger = runner.ledger()
    assert ledger.kv_cache_bytes == runner.attention.kv_cache.nbytes == 100 * 16 * runner.geometry.bytes_per_token
    assert ledger.kv_capacity_tokens == 99 * 16
    assert ledger.weights_bytes > 4 * runner.spec.num_parameters
    description = runner.describe()
    assert description["memory"] == ledger.as_dict()
    assert description["dtype"] == "float32"


def test_loading_refuses_what_cannot_work(path: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineMemoryError, match="raise kv_cache_bytes"):
        load(path, kv_cache_bytes=1000)
    with pytest.raises(ValueError, match="context length"):
        load(path, max_model_len=513)
    with pytest.raises(ValueError, match="precision 'int3'"):
        load(path, precision="int3")
    with pytest.raises(ValueError, match="device"):
        load(path, device="meta")
    with pytest.raises(ValueError, match="at least 1"):
        load(path, max_num_seqs=0)
    with pytest.raises(ModelFileError, match="no such file"):
        load(tmp_path / "none.gguf")


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_weights_with_which_nothing_can_be_computed_are_refused(tmp_path: Path, value: float) -> None:
    write_model(tmp_path / "spoilt.gguf")
    reader = gguf.GGUFReader(tmp_path / "spoilt.gguf", "r+")
    [matrix] = [tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight"]
    matrix.data[:] = value
    reader.data.flush()
    with pytest.raises(
        ModelFileError, match=r"spoilt.gguf: the model computed a .* not finite. Its weights are damaged"
    ):
        load(tmp_path / "spoilt.gguf")


def test_warm_up_leaves_the_cache_clean(path: Path) -> None:
    runner = load_runner(path, precision="float32", max_model_len=160, kv_cache_bytes=4 << 20)
    assert not runner.attention.kv_cache.any()


def test_the_largest_steps_reach_every_bound_and_run(path: Path) -> None:
    runner = load(path, max_num_seqs=4, max_num_batched_tokens=400)
    many, few = largest_steps(runner)
    assert (len(many.rows), many.num_tokens) == (4, 400)
    assert few.num_tokens >= 390
    assert len(few.rows) == 3  # of 160 tokens at most
    for plan in (many, few):
        results = runner.execute(plan)
        assert all(result.error is None and result.prompt_logprobs for result in results)
