"""Split-KV decode equals plain attention, whatever the lengths, groups, head sizes, splits and garbage around."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.attn_decode import decode_launches
from engine.kernels.attn_tile import paged_attention_reference
from engine.kernels.heuristics import DecodeTile, SplitRule, attention_tiles, decode_splits
from tests.engine.kernel_support import PagedBatch, assert_close, serving_tiles

AT_LEAST = SplitRule(size=64, fixed=False)
SCALE = 0.125


def run_decode(
    batch: PagedBatch,
    *,
    max_splits: int,
    rule: SplitRule = AT_LEAST,
    tile: DecodeTile | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    seqs, heads, head_dim = batch.q.shape
    out = torch.full(batch.q.shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    scratch = torch.full((seqs * heads * max_splits, head_dim + 1), float("nan"), device=batch.q.device)
    for launch in decode_launches(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.seq_lens,
        out,
        scratch[:, 1:].contiguous(),
        scratch[:, 0].contiguous(),
        scale=SCALE,
        max_splits=max_splits,
        tile=tile or serving_tiles(head_dim, batch.q.dtype).decode,
        split_rule=rule,
        window=window,
        softcap=softcap,
        sinks=sinks,
        upcast=batch.q.dtype == torch.bfloat16,
    ):
        launch.run()
    return out


def expected(
    batch: PagedBatch, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return paged_attention_reference(
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_tables,
        batch.query_starts,
        batch.seq_lens,
        SCALE,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


@pytest.mark.parametrize("max_splits", [1, 3])
def test_lengths_around_pages_and_tiles(max_splits: int) -> None:
    lengths = [0, 1, 15, 16, 17, 63, 64, 65, 200]
    batch = PagedBatch.random([1] * len(lengths), lengths, heads=4, kv_heads=2, head_dim=64)
    out = run_decode(batch, max_splits=max_splits)
    assert_close(out, expected(batch), torch.float32)
    assert not out[0].any(), "a sequence without keys gives zeros"


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_groups_of_query_heads(group: int) -> None:
    batch = PagedBatch.random([1, 1], [130, 70], heads=2 * group, kv_heads=2, head_dim=64, seed=group)
    assert_close(run_decode(batch, max_splits=2), expected(batch), torch.float32)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    batch = PagedBatch.random([1, 1], [129, 40], heads=3, kv_heads=1, head_dim=head_dim, dtype=dtype, seed=head_dim)
    assert_close(run_decode(batch, max_splits=2), expected(batch), dtype)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_page_size_is_independent_of_the_tile(block_size: int) -> None:
    batch = PagedBatch.random([1, 1], [100, 33], heads=2, kv_heads=1, head_dim=64, block_size=block_size)
    tile = DecodeTile(block_n=32, num_warps=4, num_stages=3)
    assert_close(run_decode(batch, max_splits=2, tile=tile), expected(batch), torch.float32)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 500])
def test_sliding_window_sees_exactly_that_many_keys(window: int) -> None:
    batch = PagedBatch.random([1, 1, 1], [1, 129, 320], heads=2, kv_heads=1, head_dim=64)
    for max_splits in (1, 2):
        out = run_decode(batch, max_splits=max_splits, window=window)
        assert_close(out, expected(batch, window=window), torch.float32)


def test_softcap_bounds_scores() -> None:
    batch = PagedBatch.random([1, 1], [100, 10], heads=2, kv_heads=1, head_dim=64)
    batch.q.mul_(50.0)  # far beyond the cap: tanh must not overflow
    assert_close(run_decode(batch, max_splits=2, softcap=5.0), expected(batch, softcap=5.0), torch.float32)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("max_splits", [1, 3])
def test_a_sink_counts_once_however_many_splits(max_splits: int, window: int) -> None:
    batch = PagedBatch.random([1, 1, 1], [1, 100, 400], heads=6, kv_heads=2, head_dim=64)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 5.0, 30.0, -40.0], device=batch.q.device)
    out = run_decode(batch, max_splits=max_splits, window=window, sinks=sinks)
    assert_close(out, expected(batch, window=window, sinks=sinks), torch.float32)


def test_pages_beyond_32_bit_element_offsets() -> None:
    """Elements past 2**31 are addressed in 64 bits. The cache is virtual memory: only the pages in use are touched."""
    num_blocks, block_size, head_dim = 2**31 // (16 * 64) + 8, 16, 64
    k_cache = torch.empty(num_blocks, block_size, 1, head_dim, dtype=torch.float16)
    v_cache = torch.empty_like(k_cache)
    small = PagedBatch.random([1], [30], heads=2, kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    if small.q.is_cuda:
        k_cache, v_cache = k_cache.cuda(), v_cache.cuda()
    table = small.block_tables.clone()
    for index in range(2):
        table[0, index] = num_blocks - 1 - index
        k_cache[num_blocks - 1 - index] = small.k_cache[small.block_tables[0, index]]
        v_cache[num_blocks - 1 - index] = small.v_cache[small.block_tables[0, index]]
    far = PagedBatch(small.q, k_cache, v_cache, table, small.query_starts, small.seq_lens)
    torch.testing.assert_close(run_decode(far, max_splits=1), run_decode(small, max_splits=1), atol=0, rtol=0)


def test_fixed_split_size_makes_a_result_independent_of_its_batch() -> None:
    rule = SplitRule(size=64, fixed=True)
    lengths = [150, 64, 333, 1]
    batch = PagedBatch.random([1] * 4, lengths, heads=3, kv_heads=1, head_dim=64, dtype=torch.float16)
    together = run_decode(batch, max_splits=decode_splits(4, 1, 132, max(lengths), rule), rule=rule)
    assert_close(together, expected(batch), torch.float16)
    for seq, length in enumerate(lengths):
        alone = PagedBatch(
            batch.q[seq : seq + 1],
            batch.k_cache,
            batch.v_cache,
            batch.block_tables[seq : seq + 1],
            batch.query_starts[:2],
            batch.seq_lens[seq : seq + 1],
        )
        splits = decode_splits(1, 1, 132, length, rule)
        assert torch.equal(run_decode(alone, max_splits=splits, rule=rule)[0], together[seq])


@pytest.mark.parametrize("window", [0, 100])
def test_splits_need_not_be_whole_tiles(window: int) -> None:
    rule = SplitRule(size=48, fixed=True)
    batch = PagedBatch.random([1, 1], [250, 49], heads=2, kv_heads=1, head_dim=64)
    assert_close(run_decode(batch, max_splits=6, rule=rule, window=window), expected(batch, window), torch.float32)


def test_more_splits_than_are_combined_at_once() -> None:
    batch = PagedBatch.random([1, 1], [600, 300], heads=2, kv_heads=1, head_dim=64)
    batch.q.mul_(8.0)  # far from uniform weights: each group of splits may hold a new maximum
    tile = DecodeTile(block_n=16, num_warps=4, num_stages=3)
    out = run_decode(batch, max_splits=38, rule=SplitRule(size=16, fixed=True), tile=tile)
    assert_close(out, expected(batch), torch.float32)


def test_too_little_scratch_is_refused() -> None:
    batch = PagedBatch.random([1], [300], heads=2, kv_heads=1, head_dim=64)
    with pytest.raises(ValueError, match="scratch for 1"):
        decode_launches(
            batch.q,
            batch.k_cache,
            batch.v_cache,
            batch.block_tables,
            batch.seq_lens,
            torch.empty_like(batch.q),
            torch.empty(64),
            torch.empty(1),
            scale=SCALE,
            max_splits=4,
            tile=DecodeTile(block_n=64, num_warps=4, num_stages=3),
            split_rule=AT_LEAST,
        )


def test_splits_fill_the_chip_and_no_more() -> None:
    at_least = SplitRule(size=128, fixed=False)
    assert decode_splits(1, 8, 132, 100_000, at_least) == 64  # one sequence: up to the bound
    assert decode_splits(64, 8, 132, 100_000, at_least) == 2
    assert decode_splits(256, 8, 132, 100_000, at_least) == 1  # the batch alone fills it
    assert decode_splits(1, 8, 132, 100, at_least) == 1  # too short to split
    assert decode_splits(1, 8, 132, 0, at_least) == 1
    assert decode_splits(256, 8, 132, 1000, SplitRule(size=256, fixed=True)) == 4


def test_unserved_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="head sizes"):
        attention_tiles(90, 72, torch.bfloat16)
    with pytest.raises(ValueError, match="compute capability"):
        attention_tiles(75, 64, torch.float16)
    with pytest.raises(ValueError, match="float64"):
        attention_tiles(90, 64, torch.float64)
