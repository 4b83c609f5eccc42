"""Varlen paged prefill equals plain causal attention, for prompts, chunks of prompts and single tokens side by side."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.attn_prefill import prefill_launch
from engine.kernels.attn_tile import paged_attention_reference
from engine.kernels.heuristics import PrefillTile
from tests.engine.kernel_support import PagedBatch, assert_close, serving_tiles

TALL = PrefillTile(block_m=64, block_n=64, num_warps=4, num_stages=3)
SHORT = PrefillTile(block_m=16, block_n=64, num_warps=4, num_stages=3)
SCALE = 0.125


def check(
    batch: PagedBatch,
    tile: PrefillTile = TALL,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    out = torch.full(batch.q.shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    pages = (batch.k_cache, batch.v_cache, batch.block_tables, batch.query_starts, batch.seq_lens)
    launch = prefill_launch(
        batch.q,
        *pages,
        out,
        scale=SCALE,
        tile=tile,
        window=window,
        softcap=softcap,
        sinks=sinks,
        upcast=batch.q.dtype == torch.bfloat16,
    )
    launch.run()
    want = paged_attention_reference(batch.q, *pages, SCALE, window=window, softcap=softcap, sinks=sinks)
    assert_close(out, want, batch.q.dtype)


@pytest.mark.parametrize("tile", [TALL, SHORT], ids=["tall", "short"])
def test_chunks_of_all_lengths_with_and_without_context(tile: PrefillTile) -> None:
    query_lens = [1, 17, 0, 64, 5, 16, 33]
    contexts = [0, 0, 48, 15, 100, 64, 1]
    seq_lens = [query + context for query, context in zip(query_lens, contexts, strict=True)]
    check(PagedBatch.random(query_lens, seq_lens, heads=4, kv_heads=2, head_dim=64), tile)


def test_many_short_sequences_find_their_own_keys() -> None:
    """The search on the device: as many sequences as not to fit one tile, lengths that no tile divides."""
    query_lens = [1 + (7 * seq) % 5 for seq in range(23)]
    seq_lens = [query + (11 * seq) % 40 for seq, query in enumerate(query_lens)]
    check(PagedBatch.random(query_lens, seq_lens, heads=2, kv_heads=1, head_dim=64), SHORT)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 24])
def test_groups_of_query_heads(group: int) -> None:
    batch = PagedBatch.random([37, 3], [70, 3], heads=2 * group, kv_heads=2, head_dim=64, seed=group)
    check(batch, SHORT if group == 24 else TALL)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    batch = PagedBatch.random([20, 9], [90, 9], heads=3, kv_heads=1, head_dim=head_dim, dtype=dtype, seed=head_dim)
    check(batch, serving_tiles(head_dim, dtype).prefill)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_page_size_is_independent_of_the_tile(block_size: int) -> None:
    batch = PagedBatch.random([40, 2], [100, 65], heads=2, kv_heads=1, head_dim=64, block_size=block_size)
    check(batch, PrefillTile(block_m=32, block_n=32, num_warps=4, num_stages=3))


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 68, 500])  # 68: the first visible key ends a tile
def test_sliding_window_sees_exactly_that_many_keys(window: int) -> None:
    check(PagedBatch.random([80, 10], [80, 140], heads=2, kv_heads=1, head_dim=64), window=window)


def test_softcap_bounds_scores() -> None:
    batch = PagedBatch.random([20, 5], [20, 60], heads=2, kv_heads=1, head_dim=64)
    batch.q.mul_(50.0)
    check(batch, softcap=5.0)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("tile", [TALL, SHORT], ids=["tall", "short"])
def test_sinks_take_their_share(tile: PrefillTile, window: int) -> None:
    batch = PagedBatch.random([40, 3], [90, 3], heads=6, kv_heads=2, head_dim=64)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 5.0, 30.0, -40.0], device=batch.q.device)
    check(batch, tile, window=window, sinks=sinks)


def test_nothing_to_do_is_nothing_done() -> None:
    check(PagedBatch.random([0, 0], [5, 16], heads=2, kv_heads=1, head_dim=64))
