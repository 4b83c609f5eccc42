"""Paged attention for rows of one new token: split over the keys, then combined.

A decode step reads every key once per sequence and does little with it, so what counts is bytes in flight: one
program per (sequence, KV head, split of the keys) keeps all multiprocessors busy even at batch size one
(Flash-Decoding, section "Flash-Decoding: faster attention for decoding" of the FlashAttention authors' 2023 report).
The query heads that share a KV head form one tile, so K and V are read once for all of them. A second kernel
combines the splits by their log-sum-exp.

The host fixes the grid; each program reads its sequence's length on the device and leaves early if its split does
not exist, so a captured graph stays valid as sequences grow. In deterministic mode the split *size* is fixed: a
sequence's result then depends on nothing but itself, whatever shares its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attn_tile import NO_SCORE, attend_keys
from engine.kernels.heuristics import DecodeTile, SplitRule
from engine.kernels.launch import Launch, next_power_of_2


@triton.jit
def split_range(
    seq_len: tl.tensor,
    max_splits: tl.tensor,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    FIXED_SIZE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """How a sequence's visible keys are split: (first key, keys per split, number of splits).

    With FIXED_SIZE a split has SPLIT_SIZE keys; else at least that many, more if `max_splits` would not do, rounded up
    to whole tiles of BLOCK_N. Starting exactly at the window means that every split holds a key that is visible.
    """
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    keys = seq_len - first
    if FIXED_SIZE:
        size = seq_len * 0 + SPLIT_SIZE
    else:
        size = tl.maximum(tl.cdiv(tl.cdiv(keys, max_splits), BLOCK_N) * BLOCK_N, SPLIT_SIZE)
    return first, size, tl.cdiv(keys, size)


# Lengths, split counts and metadata pointers are not specialised: a value that happens to be 1 or a multiple of 16, or
# a buffer that happens to be aligned, must not compile another kernel in the middle of serving.
@triton.jit(do_not_specialize=["table_ptr", "seq_lens_ptr", "max_splits", "stride_table"])
def decode_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    max_splits: tl.tensor,
    scale: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_table: tl.tensor,
    stride_page: tl.tensor,
    stride_token: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    FIXED_SIZE: tl.constexpr,
    DIRECT: tl.constexpr,
    UPCAST: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """One split of one sequence for the GROUP query heads of one KV head. Grid: (sequences, KV heads, max_splits).

    Writes the split's normalised result to `partial[seq, head, split, :]` and log2 of its sum of weights to
    `lse[seq, head, split]`; with DIRECT (max_splits is 1) it writes the result to `out[seq, head, :]` instead.
    """
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    first, size, num_splits = split_range(seq_len, max_splits, BLOCK_N, WINDOW, SPLIT_SIZE, FIXED_SIZE)

    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    dims = tl.arange(0, HEAD_DIM_PADDED)
    kept = (row < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out_row = seq.to(tl.int64) * HEADS + head
    if DIRECT:
        if seq_len == 0:  # nobody combines: the zeros are written here
            tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :], 0.0, mask=kept)
            return
    elif split >= num_splits:
        return

    key_start = first + split * size
    key_end = tl.minimum(key_start + size, seq_len)
    query = tl.load(
        q_ptr + seq.to(tl.int64) * stride_q_token + head[:, None] * stride_q_head + dims[None, :], mask=kept, other=0.0
    )
    if UPCAST:
        query = query.to(tl.float32)
    query_pos = tl.full([BLOCK_M], 0, tl.int32) + (seq_len - 1)
    tail_start = key_start
    if WINDOW == 0:
        tail_start = key_start + (key_end - key_start) // BLOCK_N * BLOCK_N
    sink_rows = tl.where(split == 0, GROUP, 0)
    result, row_max, row_sum = attend_keys(
        query, query_pos, key_start, tail_start, key_end, kv_head, k_ptr, v_ptr,
        k_scale_ptr, v_scale_ptr, table_ptr + seq.to(tl.int64) * stride_table,
        sinks_ptr, head, row < sink_rows, stride_page, stride_token,
        scale, HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, SINKS, UPCAST, FP8,
    )  # fmt: skip
    if DIRECT:
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        partial_row = out_row * max_splits + split
        tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + dims[None, :], result, mask=kept)
        tl.store(lse_ptr + partial_row, row_max + tl.log2(row_sum), mask=row < GROUP)


@triton.jit(do_not_specialize=["seq_lens_ptr", "max_splits"])
def combine_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    max_splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    FIXED_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Join one head's splits. Grid: (sequences, heads).

    `out = sum_s 2**(lse_s - m) partial_s / sum_s 2**(lse_s - m)`, m the largest lse, taken BLOCK_S splits at a time
    in a fixed order. A sequence without keys gets zeros.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    _first, _size, num_splits = split_range(seq_len, max_splits, BLOCK_N, WINDOW, SPLIT_SIZE, FIXED_SIZE)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    out_row = seq.to(tl.int64) * HEADS + head

    total_max = tl.full([], NO_SCORE, tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        row = out_row * max_splits + split
        lse = tl.load(lse_ptr + row, mask=split < num_splits, other=float("-inf"))
        partial = tl.load(
            partial_ptr + row[:, None] * HEAD_DIM + dims[None, :],
            mask=(split < num_splits)[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(total_max, tl.max(lse, 0))
        weight = tl.exp2(lse - new_max)
        shrink = tl.exp2(total_max - new_max)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * partial, 0)
        total_max = new_max
    result = acc / tl.where(num_splits > 0, total, 1.0)
    tl.store(out_ptr + out_row * HEAD_DIM + dims, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_launches(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    max_splits: int,
    tile: DecodeTile,
    split_rule: SplitRule,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    upcast: bool = False,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[Launch]:
    """The launches, in order, that attend for one new token per sequence; `paged_attention_reference` is the meaning.

    q: `[seqs, heads, head_dim]`, unit stride in the last dimension; k_cache, v_cache: `[num_blocks, block_size,
    kv_heads, head_dim]`, contiguous; block_tables: int32 `[seqs, width]`, unit stride in the last dimension;
    seq_lens: int32 `[seqs]`; out: `[seqs, heads, head_dim]`, contiguous. Scratch, not needed when max_splits is 1:
    partial, float32, at least `seqs * heads * max_splits * head_dim` elements; lse, float32, `seqs * heads *
    max_splits`. `max_splits` must be at least the longest sequence's splits if the rule fixes their size.
    kv_scales: of K and V, the caches then being the codes, both as `fp8_pages.Fp8Pages` has them.
    """
    seqs, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    padded = next_power_of_2(head_dim)
    direct = max_splits == 1
    if not direct and lse.numel() < seqs * heads * max_splits:
        raise ValueError(f"scratch for {lse.numel()} partial results, {seqs * heads * max_splits} needed")
    splitting = {
        "BLOCK_N": tile.block_n,
        "WINDOW": window,
        "SPLIT_SIZE": split_rule.size,
        "FIXED_SIZE": split_rule.fixed,
    }
    attend_splits = Launch(
        kernel=decode_kernel,
        grid=(seqs, kv_heads, max_splits),
        args={
            "out_ptr": out,
            "partial_ptr": partial,
            "lse_ptr": lse,
            "q_ptr": q,
            "k_ptr": k_cache,
            "v_ptr": v_cache,
            "k_scale_ptr": q if kv_scales is None else kv_scales[0],  # not touched without FP8
            "v_scale_ptr": q if kv_scales is None else kv_scales[1],
            "table_ptr": block_tables,
            "sinks_ptr": q if sinks is None else sinks,  # not touched without SINKS
            "seq_lens_ptr": seq_lens,
            "max_splits": max_splits,
            "scale": scale,
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_table": block_tables.stride(0),
            "stride_page": k_cache.stride(0),
            "stride_token": k_cache.stride(1),
        },
        constants={
            "HEADS": heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": padded,
            "PAGE_SIZE": block_size,
            "BLOCK_M": max(16, next_power_of_2(group)),
            "SOFTCAP": softcap,
            "SINKS": sinks is not None,
            "DIRECT": direct,
            "UPCAST": upcast,
            "FP8": kv_scales is not None,
            **splitting,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        # As many as four of its programs leave each other: without a word, some releases spill to make room for more.
        max_registers=128 if tile.num_warps == 4 else None,
    )
    if direct:
        return [attend_splits]
    combine = Launch(
        kernel=combine_kernel,
        grid=(seqs, heads),
        args={
            "out_ptr": out,
            "partial_ptr": partial,
            "lse_ptr": lse,
            "seq_lens_ptr": seq_lens,
            "max_splits": max_splits,
        },
        constants={
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": padded,
            "BLOCK_S": 16,
            **splitting,
        },
        num_warps=4,
        num_stages=1,
    )
    return [attend_splits, combine]
