"""Both attention kernels for every group of query heads and every head size: random lengths, pages of both kinds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.kernels.attn_decode import decode_launches
from engine.kernels.attn_prefill import prefill_launch
from engine.kernels.attn_tile import paged_attention_reference
from engine.kernels.fp8_pages import Fp8Pages, page_bytes
from engine.kernels.heuristics import SplitRule
from engine.kernels.launch import Launch
from tests.engine.kernel_support import PagedBatch, assert_close, serving_tiles

GROUPS, HEAD_DIMS = range(1, 9), (64, 80, 96, 128, 256)
KV_HEADS, PAGE, SCALE = 2, 16, 0.125
DTYPE = torch.float32
# Each group and each size in one of them.
SOME = [(group, HEAD_DIMS[group % len(HEAD_DIMS)]) for group in GROUPS]
OTHERS = [(group, size) for group in GROUPS for size in HEAD_DIMS if (group, size) not in SOME]


def batch(group: int, head_dim: int, *, decode: bool) -> PagedBatch:
    """A sequence without keys, one of a single key, one on each side of a page's end, and a random one."""
    lengths = random.Random(1000 * group + head_dim)
    seq_lens = [0, 1, PAGE * lengths.randint(1, 4) + lengths.choice((-1, 0, 1)), lengths.randint(40, 150)]
    query_lens = [1] * 4 if decode else [0, 1, lengths.randint(1, seq_lens[2]), lengths.randint(1, seq_lens[3])]
    sizes = {"heads": KV_HEADS * group, "kv_heads": KV_HEADS, "head_dim": head_dim}
    return PagedBatch.random(query_lens, seq_lens, **sizes, block_size=PAGE, dtype=DTYPE, seed=group)


def as_fp8(cache: torch.Tensor) -> Fp8Pages:
    """The same pages in eight-bit floats; what is no number stays none."""
    blocks, _, heads, head_dim = cache.shape
    raw = torch.zeros(blocks, page_bytes(PAGE, heads, head_dim), dtype=torch.uint8, device=cache.device)
    pages = Fp8Pages.of(raw, PAGE, heads, head_dim)
    scale = cache.abs().amax(-1) / 448
    pages.scale.copy_(scale)
    pages.codes.view(torch.uint8).copy_((cache / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8))
    return pages


def launches(of: PagedBatch, out: torch.Tensor, *, decode: bool, fp8: tuple[Fp8Pages, Fp8Pages] | None) -> list[Launch]:
    tiles = serving_tiles(out.shape[2], DTYPE)
    k, v = (of.k_cache, of.v_cache) if fp8 is None else (fp8[0].codes, fp8[1].codes)
    scales = None if fp8 is None else (fp8[0].scale, fp8[1].scale)
    if not decode:
        tile, starts = tiles.prefill, of.query_starts
        return [
            prefill_launch(
                of.q, k, v, of.block_tables, starts, of.seq_lens, out, scale=SCALE, tile=tile, kv_scales=scales
            )
        ]
    splits, rows = 3, out.shape[0] * out.shape[1]
    partial = torch.full((splits * rows * out.shape[2],), torch.nan, device=out.device)
    lse = torch.full((splits * rows,), torch.nan, device=out.device)
    rule = SplitRule(size=32, fixed=False)
    tables, lengths = of.block_tables, of.seq_lens
    return decode_launches(
        of.q, k, v, tables, lengths, out, partial, lse,
        scale=SCALE, max_splits=splits, tile=tiles.decode, split_rule=rule, kv_scales=scales,
    )  # fmt: skip


def check(group: int, head_dim: int) -> None:
    for decode in (True, False):
        of = batch(group, head_dim, decode=decode)
        fp8 = as_fp8(of.k_cache), as_fp8(of.v_cache)
        decoded = replace(of, k_cache=fp8[0].dequantize(), v_cache=fp8[1].dequantize())
        for pages, reference in ((None, of), (fp8, decoded)):
            out = torch.full(of.q.shape, torch.nan, device=of.q.device)
            for launch in launches(of, out, decode=decode, fp8=pages):
                launch.run()
            read = reference.k_cache, reference.v_cache, of.block_tables, of.query_starts, of.seq_lens
            assert_close(out, paged_attention_reference(of.q, *read, SCALE), DTYPE)


@pytest.mark.parametrize(("group", "head_dim"), SOME)
def test_every_group_and_every_size(group: int, head_dim: int) -> None:
    check(group, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "head_dim"), OTHERS)
def test_every_group_with_every_size(group: int, head_dim: int) -> None:
    check(group, head_dim)
