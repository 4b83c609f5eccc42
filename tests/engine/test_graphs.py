"""Recorded decode steps: padding, buckets, and, on a tape that stands in for CUDA graphs, the same results as eager."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.tape import TapeRecorder
from engine.geometry import padded, step_geometry
from engine.graphs import buckets
from engine.layers.staging import Staging
from engine.types import StepPlan
from tests.engine.models import GREEDY, row, write_model
from tests.engine.test_kernel_engine import generate_together, triton_runner

BLOCK = 16


@given(st.integers(1, 700))
def test_buckets_end_at_the_most_rows_and_waste_little(most: int) -> None:
    sizes = buckets(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for rows in range(33, most + 1):
        bucket = min(size for size in sizes if size >= rows)
        assert bucket < rows * 1.25


@given(st.lists(st.integers(1, 80), min_size=1, max_size=6), st.integers(0, 5))
def test_padding_adds_rows_that_touch_nothing(lengths: list[int], extra: int) -> None:
    rows = [row([0] * n, range(1 + 8 * i, 9 + 8 * i), start=n - 1, request_id=i) for i, n in enumerate(lengths)]
    step = step_geometry(rows, BLOCK, 128)
    whole = padded(step, len(rows) + extra)
    assert whole.num_rows == whole.num_decode_rows == whole.num_tokens == len(rows) + extra
    for name in ("seq_lens", "block_tables", "positions", "slots"):
        np.testing.assert_array_equal(getattr(whole, name)[: len(rows)], getattr(step, name))
        assert getattr(whole, name).dtype == getattr(step, name).dtype
    assert (whole.slots[len(rows) :] == -1).all()  # nothing is written
    assert not whole.block_tables[len(rows) :].any()  # the null page, zeros, is all that is read
    assert (whole.seq_lens[len(rows) :] == 1).all()
    assert whole.query_starts.tolist() == list(range(len(rows) + extra + 1))


def test_only_decode_steps_are_padded_and_only_to_more_rows() -> None:
    longer = step_geometry([row([0] * 3, [1])], BLOCK, 128)
    with pytest.raises(ValueError, match="no decode step"):
        padded(longer, 4)
    two = step_geometry([row([0], [1]), row([0], [2])], BLOCK, 128)
    with pytest.raises(ValueError, match="no decode step of 1"):
        padded(two, 1)


def test_staged_arrays_keep_their_addresses_and_refuse_what_is_too_long() -> None:
    staging = Staging({"a": (3, torch.int32), "b": (2, torch.int64)}, torch.device("cpu"))
    a, b = staging.on_device("a"), staging.on_device("b")
    staging.put("a", np.array([1, 2, 3], dtype=np.int32))
    staging.put("b", np.array([1 << 40, 7], dtype=np.int64))
    assert not a.any()
    staging.send()
    assert (a.tolist(), b.tolist()) == ([1, 2, 3], [1 << 40, 7])
    staging.put("a", np.array([9], dtype=np.int32))
    staging.send()
    assert (a.tolist(), b.tolist()) == ([9, 2, 3], [1 << 40, 7])
    assert staging.on_device("a").data_ptr() == a.data_ptr()
    with pytest.raises(ValueError, match="exceeds the 3"):
        staging.put("a", np.zeros(4, dtype=np.int32))


def test_replayed_steps_generate_what_eager_ones_do(tmp_path: Path) -> None:
    """The tape keeps every launch as it was recorded, so a length from the host would give other tokens."""
    path = tmp_path / "tiny.gguf"
    write_model(path)
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 320, size).tolist() for size in (30, 3, 17)]
    eager = triton_runner(path)
    expected = generate_together(eager, prompts, count=3, chunk=9)
    recorded = triton_runner(path)
    tape = TapeRecorder()
    recorded.record(tape, most_tokens=32)
    before = recorded.attention.kv_cache.clone()
    assert generate_together(recorded, prompts, count=3, chunk=9) == expected
    # 4, 2 and 1 rows; then 32 and 16 tokens, three pieces for two blocks, the largest first
    assert tape.num_recorded == 3 + 2 * 3
    large, small = [3, 4, 5], [6, 7, 8]
    # 9 + 3 + 9 tokens, 9 + 1 + 8, 9 + 1 + 1, then what is left of the longest prompt beside one that goes on
    assert tape.replayed[:12] == [*large, *large, *small, *small]
    assert set(tape.replayed[12:]) == {2}, "and single rows"
    assert not recorded.attention.kv_cache[:, :, 0].any(), "the null page was written to"
    assert not before[:, :, 0].any()


def test_what_waits_for_the_device_cannot_be_recorded() -> None:
    with pytest.raises(RuntimeError, match="waits for the device"):
        TapeRecorder().record(lambda: torch.ones(1).item())  # type: ignore[arg-type, return-value]


def test_a_length_from_the_host_shows_on_the_tape() -> None:
    values, out = torch.arange(4), torch.zeros(1, dtype=torch.int64)
    length = [2]
    replay = TapeRecorder().record(lambda: out.copy_(values[: length[0]].sum(0, keepdim=True)))  # type: ignore[arg-type, return-value]
    values += 10
    length[0] = 4
    replay()
    assert out.item() == 10 + 11  # the new values, the old length


def test_a_replayed_step_is_the_eager_step_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path)
    tokens = list(range(40, 75))
    params = replace(GREEDY, logprobs=5)
    results = []
    for is_recorded in (False, True):
        runner = triton_runner(path)
        if is_recorded:
            runner.record(TapeRecorder(), most_tokens=16)
        runner.execute(StepPlan([row(tokens, [3, 1, 2], stop=34)]))
        results.append(runner.execute(StepPlan([row(tokens, [3, 1, 2], start=34, params=params)])))
    assert results[1] == results[0]
    assert results[0][0].logprobs
