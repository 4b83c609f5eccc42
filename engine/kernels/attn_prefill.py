"""Paged causal attention for rows of several new tokens (prompts, chunks of them, tokens to verify).

The sequences' queries lie end to end without padding. One program takes BLOCK_M query rows of one KV head: the GROUP
query heads that share it, of BLOCK_M // GROUP consecutive tokens, so that K and V are read once for all of them.
Keys come through the block table, the chunk's own included (they are written to the pages first), so new and cached
keys need no separate branches. Keys that every row sees are attended without a mask, the diagonal with one.

The host knows no lengths that the device would have to report: the grid is bounded by `tokens // BLOCK_Q + seqs` and
each program finds its sequence by a binary search (as published in arXiv 2511.11581, section 4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attn_tile import attend_keys
from engine.kernels.heuristics import PrefillTile
from engine.kernels.launch import Launch, next_power_of_2


@triton.jit
def find_sequence(
    query_starts_ptr: tl.tensor, num_seqs: tl.tensor, block: tl.tensor, BLOCK_Q: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """The sequence that query block `block` belongs to, and that sequence's first block: `(seq, first_block)`.

    Sequence `i` owns blocks from `query_starts[i] // BLOCK_Q + i` up to the next sequence's first: never fewer than
    its tokens need, so the programs of all sequences can be numbered before any length is looked at.
    """
    low = block * 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low, tl.load(query_starts_ptr + low) // BLOCK_Q + low


@triton.jit(do_not_specialize=["table_ptr", "query_starts_ptr", "seq_lens_ptr", "num_seqs", "stride_table"])
def prefill_kernel(
    out_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    num_seqs: tl.tensor,
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
    UPCAST: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """BLOCK_M query rows of one KV head. Grid: (at least all query blocks, KV heads)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Late blocks attend over the most keys: they start first, so that no long one is left alone at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, first_block = find_sequence(query_starts_ptr, num_seqs, block, BLOCK_Q)
    query_start = tl.load(query_starts_ptr + seq)
    query_len = tl.load(query_starts_ptr + seq + 1) - query_start
    first_query = (block - first_block) * BLOCK_Q  # counted within the sequence's new tokens
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)

    row = tl.arange(0, BLOCK_M)
    query_index = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    dims = tl.arange(0, HEAD_DIM_PADDED)
    kept_row = (row < BLOCK_Q * GROUP) & (query_index < query_len)
    kept = kept_row[:, None] & (dims < HEAD_DIM)[None, :]
    token = (query_start + query_index).to(tl.int64)
    query = tl.load(
        q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + dims[None, :], mask=kept, other=0.0
    )
    if UPCAST:
        query = query.to(tl.float32)
    context_len = seq_len - query_len
    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    query_pos = context_len + tl.minimum(query_index, last_query)  # rows that are not kept see what the last one sees
    key_end = context_len + last_query + 1
    if WINDOW > 0:
        tail_start = tl.maximum(context_len + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        tail_start = (context_len + first_query + 1) // BLOCK_N * BLOCK_N
    result, _row_max, _row_sum = attend_keys(
        query, query_pos, 0, tail_start, key_end, kv_head, k_ptr, v_ptr,
        k_scale_ptr, v_scale_ptr, table_ptr + seq.to(tl.int64) * stride_table,
        sinks_ptr, head, kept_row, stride_page, stride_token, scale,
        HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, SINKS, UPCAST, FP8,
    )  # fmt: skip
    out = out_ptr + (token * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=kept)


def prefill_launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    tile: PrefillTile,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    upcast: bool = False,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Launch:
    """The launch that attends for several new tokens per sequence; `paged_attention_reference` is the meaning.

    q: `[tokens, heads, head_dim]`, unit stride in the last dimension; k_cache, v_cache: `[num_blocks, block_size,
    kv_heads, head_dim]`, contiguous; block_tables: int32 `[seqs, width]`, unit stride in the last dimension;
    query_starts: int32 `[seqs + 1]`, from 0 to `tokens`; seq_lens: int32 `[seqs]`, at least each sequence's number of
    new tokens; out: `[tokens, heads, head_dim]`, contiguous; kv_scales: as for `decode_launches`.
    """
    tokens, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    block_m = max(tile.block_m, next_power_of_2(group))
    seqs = seq_lens.shape[0]
    blocks = tokens // (block_m // group) + seqs if tokens else 0
    return Launch(
        kernel=prefill_kernel,
        grid=(blocks, kv_heads),
        args={
            "out_ptr": out,
            "q_ptr": q,
            "k_ptr": k_cache,
            "v_ptr": v_cache,
            "k_scale_ptr": q if kv_scales is None else kv_scales[0],  # not touched without FP8
            "v_scale_ptr": q if kv_scales is None else kv_scales[1],
            "table_ptr": block_tables,
            "sinks_ptr": q if sinks is None else sinks,  # not touched without SINKS
            "query_starts_ptr": query_starts,
            "seq_lens_ptr": seq_lens,
            "num_seqs": seqs,
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
            "HEAD_DIM_PADDED": next_power_of_2(head_dim),
            "PAGE_SIZE": block_size,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "WINDOW": window,
            "SOFTCAP": softcap,
            "SINKS": sinks is not None,
            "UPCAST": upcast,
            "FP8": kv_scales is not None,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
