"""Attention of one tile of query rows over a range of paged keys: what both attention kernels do inside.

The online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1) with keys and values read through a block table
as in PagedAttention (arXiv 2309.06180). `attn_decode` calls `attend_keys` for the query heads of one token,
`attn_prefill` for those of several tokens; sharing it means that both give a key the same score and that a fault has
one place.

Promises: whatever lies in pages, or parts of pages, outside the given range (NaN included) does not reach the result;
addresses are 64-bit wherever a page number enters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Score of a row that has seen no key yet. Finite, so that the difference of two such maxima is 0 and not NaN.
NO_SCORE: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def attend(
    query: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc: tl.tensor,
    query_pos: tl.tensor,
    key_start: tl.tensor,
    key_end: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    stride_page: tl.tensor,
    stride_token: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
    FP8: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Fold keys `key_start .. key_end - 1` into the running softmax of `BLOCK_M` query rows.

    query: `[BLOCK_M, HEAD_DIM_PADDED]`, zero beyond HEAD_DIM. row_max, row_sum: float32 `[BLOCK_M]`, acc: float32
    `[BLOCK_M, HEAD_DIM_PADDED]`; start them at NO_SCORE, 0 and 0. Scores are in base 2: weights are
    `2 ** (score - row_max)`. query_pos: int32 `[BLOCK_M]`, the position of each row's token.
    k_ptr, v_ptr: the KV head's first element on page 0; a token's HEAD_DIM elements are adjacent.
    table_ptr: the sequence's page numbers, int32.

    With MASKED a row sees key `n` of the range if `query_pos - WINDOW < n <= query_pos` (WINDOW 0: no lower bound).
    Without it every row sees every key of the range, whose length must be a multiple of BLOCK_N: the interior of the
    causal triangle, where comparing positions is wasted work.
    SOFTCAP > 0 replaces a score `s` by `SOFTCAP * tanh(s / SOFTCAP)` (Gemma 2, arXiv 2408.00118, section 2).
    UPCAST multiplies in float32 (the interpreter's bfloat16 product is wrong).

    FP8: keys and values are e4m3 codes with a scale per token and head behind the codes of their page, at k_scale_ptr
    and v_scale_ptr for this head on page 0 (`fp8_pages.py`). Codes are multiplied in the query's dtype, in which
    they are exact, so that sums are float32 throughout; a key's scale is applied to its score, a value's to its weight.
    Weights take 448 times the scale, the largest value, and acc is 448 times too large: none is lost below float16's
    range.

    Returns the three running values.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    for tile_start in range(key_start, key_end, BLOCK_N):
        key_pos = tile_start + tl.arange(0, BLOCK_N)
        if MASKED:
            page = tl.load(table_ptr + key_pos // PAGE_SIZE, mask=key_pos < key_end, other=0)
        else:
            page = tl.load(table_ptr + key_pos // PAGE_SIZE)
        token = page.to(tl.int64) * stride_page + (key_pos % PAGE_SIZE) * stride_token
        offsets = token[:, None] + dims[None, :]
        # Lanes outside the range are set to zero in K and in V: a weight of zero times NaN would still be NaN.
        if MASKED:
            inside = (key_pos < key_end)[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(k_ptr + offsets, mask=inside, other=0.0)
            value = tl.load(v_ptr + offsets, mask=inside, other=0.0)
        elif HEAD_DIM == HEAD_DIM_PADDED:
            key = tl.load(k_ptr + offsets)
            value = tl.load(v_ptr + offsets)
        else:
            key = tl.load(k_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(v_ptr + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        if UPCAST:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        if FP8:
            key, value = key.to(query.dtype), value.to(query.dtype)
            # In float32 elements: a page is stride_page codes of a byte each long, a token has one scale per head.
            of_scale = page.to(tl.int64) * (stride_page // 4) + (key_pos % PAGE_SIZE) * (stride_token // HEAD_DIM)
            k_scale = tl.load(k_scale_ptr + of_scale, mask=key_pos < key_end, other=0.0)
            v_scale = tl.load(v_scale_ptr + of_scale, mask=key_pos < key_end, other=0.0)

        score = tl.dot(query, tl.trans(key), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if FP8:
            score *= k_scale[None, :]
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)): right at both ends, where exp gives 0 or infinity.
            capped = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(score * (2.0 * scale / SOFTCAP))))
            score = capped * 1.4426950408889634
        else:
            score = score * (scale * 1.4426950408889634)  # log2(e): exp2 is the hardware's exponential
        if MASKED:
            visible = (key_pos[None, :] <= query_pos[:, None]) & (key_pos < key_end)[None, :]
            if WINDOW > 0:
                visible = visible & (key_pos[None, :] > query_pos[:, None] - WINDOW)
            score = tl.where(visible, score, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weight, 1)
        if FP8:
            weight *= (v_scale * 448.0)[None, :]
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def attend_keys(
    query: tl.tensor,
    query_pos: tl.tensor,
    key_start: tl.tensor,
    tail_start: tl.tensor,
    key_end: tl.tensor,
    kv_head: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    head: tl.tensor,
    has_sink: tl.tensor,
    stride_page: tl.tensor,
    stride_token: tl.tensor,
    scale: tl.tensor,
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
) -> tuple[tl.tensor, ...]:
    """`BLOCK_M` query rows over keys `key_start .. key_end - 1` of `kv_head`: `(result, row_max, row_sum)`.

    Every row must see the keys before `tail_start`, a whole number of tiles: they are attended without a mask. With a
    window no key is such, and `tail_start` is where the keys begin. result: float32 `[BLOCK_M, HEAD_DIM_PADDED]`,
    divided by row_sum. k_ptr, v_ptr: the cache; k_scale_ptr, v_scale_ptr: its scales with
    FP8; table_ptr: the sequence's row; the rest as for `attend`.

    With SINKS the rows for which has_sink (`[BLOCK_M]`) holds begin with the score `sinks[head]`, which has no value
    (arXiv 2309.17453): a sequence in several splits has it in one of them.
    """
    row_max = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=has_sink, other=0.0).to(tl.float32)
        row_max = tl.where(has_sink, sink * 1.4426950408889634, row_max)
        row_sum = tl.where(has_sink, 1.0, row_sum)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * HEAD_DIM
    if WINDOW == 0:
        row_max, row_sum, acc = attend(
            query, row_max, row_sum, acc, query_pos, key_start, tail_start, k_head_ptr, v_head_ptr,
            k_scale_ptr + kv_head, v_scale_ptr + kv_head, table_ptr, stride_page, stride_token, scale, HEAD_DIM,
            HEAD_DIM_PADDED, PAGE_SIZE, BLOCK_N, WINDOW, SOFTCAP, False, UPCAST, FP8,
        )  # fmt: skip
    row_max, row_sum, acc = attend(
        query, row_max, row_sum, acc, query_pos, tail_start, key_end, k_head_ptr, v_head_ptr, k_scale_ptr + kv_head,
        v_scale_ptr + kv_head, table_ptr, stride_page, stride_token, scale, HEAD_DIM, HEAD_DIM_PADDED, PAGE_SIZE,
        BLOCK_N, WINDOW, SOFTCAP, True, UPCAST, FP8,
    )  # fmt: skip
    if FP8:
        acc *= 1.0 / 448.0
    return acc / row_sum[:, None], row_max, row_sum


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `attn_decode` and `attn_prefill` compute, in plain float32 torch, sequence by sequence.

    q: `[tokens, heads, head_dim]`; k_cache, v_cache: `[num_blocks, block_size, kv_heads, head_dim]`; block_tables:
    `[seqs, width]`; query_starts: `[seqs + 1]`; seq_lens: `[seqs]`, keys the sequence's last token sees. The queries
    are the sequence's last tokens. Query head `h` attends over KV head `h // (heads // kv_heads)`. sinks: `[heads]`, a
    score per head without a value.
    Returns float32 `[tokens, heads, head_dim]`; rows of a sequence without keys are zero.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    for seq, seq_len in enumerate(seq_lens.tolist()):
        first, last = int(query_starts[seq]), int(query_starts[seq + 1])
        if seq_len == 0 or first == last:
            continue
        position = torch.arange(seq_len, device=q.device)
        page = block_tables[seq, position // block_size].long()
        group = q.shape[1] // kv_heads
        key = k_cache[page, position % block_size].float().repeat_interleave(group, dim=1)  # [seq_len, heads, dim]
        value = v_cache[page, position % block_size].float().repeat_interleave(group, dim=1)
        score = torch.einsum("qhd,khd->hqk", q[first:last].float(), key) * scale
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        query_pos = torch.arange(seq_len - (last - first), seq_len, device=q.device)[:, None]
        hidden = position[None, :] > query_pos
        if window > 0:
            hidden |= position[None, :] <= query_pos - window
        score = score.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            score = torch.cat((score, sinks.float()[:, None, None].expand(-1, last - first, 1)), dim=-1)
        weight = score.softmax(dim=-1)[..., :seq_len]
        out[first:last] = torch.einsum("hqk,khd->qhd", weight, value)
    return out
