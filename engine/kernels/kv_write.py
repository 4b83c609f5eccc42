"""Write a step's keys and values to their pages, as they are or as eight-bit floats.

Attention reads keys only from pages, the step's own included, so this runs before it in every layer. A slot is the
token's place in the cache, `page * block_size + offset`; -1 means that the token has none (padding) and is skipped.
What a page of eight-bit floats looks like says `fp8_pages.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.fp8_pages import Fp8Pages, write_head_rows
from engine.kernels.launch import Launch, next_power_of_2


@triton.jit(do_not_specialize=["slots_ptr"])
def kv_write_kernel(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    FP8: tl.constexpr,
    ROUND: tl.constexpr,
) -> None:
    """One token's K and V, all heads. Grid: (tokens,). PAGE_STRIDE: elements from a page to the next.

    FP8: as codes, each head with a scale behind the codes of its page. ROUND: see `fp8_rows.to_e4m3`.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, KV_HEADS_PADDED)
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    head_kept = head < KV_HEADS
    kept = head_kept[:, None] & (dims < HEAD_DIM)
    key = tl.load(k_ptr + token * stride_k_token + head[:, None] * stride_k_head + dims, mask=kept, other=0.0)
    value = tl.load(v_ptr + token * stride_v_token + head[:, None] * stride_v_head + dims, mask=kept, other=0.0)
    page, head_row = slot // PAGE_SIZE, (slot % PAGE_SIZE) * KV_HEADS + head
    place = page * PAGE_STRIDE + head_row[:, None] * HEAD_DIM + dims
    if FP8:
        scale_place = page * (PAGE_STRIDE // 4) + head_row  # in float32 elements of four codes each
        write_head_rows(k_cache_ptr, k_scale_ptr, key.to(tl.float32), place, scale_place, kept, head_kept, ROUND)
        write_head_rows(v_cache_ptr, v_scale_ptr, value.to(tl.float32), place, scale_place, kept, head_kept, ROUND)
    else:
        tl.store(k_cache_ptr + place, key, mask=kept)
        tl.store(v_cache_ptr + place, value, mask=kept)


def kv_write_launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor | Fp8Pages,
    v_pages: torch.Tensor | Fp8Pages,
    slots: torch.Tensor,
    *,
    interpreted: bool = False,
) -> Launch:
    """k, v: `[tokens, kv_heads, head_dim]`, unit stride in the last dimension; slots: int64 (or int32) `[tokens]`.

    k_pages, v_pages: both `[num_blocks, block_size, kv_heads, head_dim]`, contiguous, or both `Fp8Pages`; interpreted:
    by Triton's interpreter. `kv_write_reference` and `kv_write_fp8_reference` are the meaning.
    """
    tokens, kv_heads, head_dim = k.shape
    padded = next_power_of_2(kv_heads) * next_power_of_2(head_dim)
    fp8 = isinstance(k_pages, Fp8Pages) and isinstance(v_pages, Fp8Pages)
    # Without FP8 the scales are not touched.
    k_cache, k_scale = (k_pages.codes, k_pages.scale) if isinstance(k_pages, Fp8Pages) else (k_pages, k)
    v_cache, v_scale = (v_pages.codes, v_pages.scale) if isinstance(v_pages, Fp8Pages) else (v_pages, v)
    return Launch(
        kernel=kv_write_kernel,
        grid=(tokens,),
        args={
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "k_scale_ptr": k_scale,
            "v_scale_ptr": v_scale,
            "k_ptr": k,
            "v_ptr": v,
            "slots_ptr": slots,
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_v_token": v.stride(0),
            "stride_v_head": v.stride(1),
        },
        constants={
            "PAGE_SIZE": k_cache.shape[1],
            "PAGE_STRIDE": k_cache.stride(0),
            "KV_HEADS": kv_heads,
            "KV_HEADS_PADDED": next_power_of_2(kv_heads),
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": next_power_of_2(head_dim),
            "FP8": fp8,
            "ROUND": interpreted,
        },
        num_warps=4 if padded > 512 else 1,
        num_stages=1,
    )


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """The same in plain torch, in place: `cache[slot // block_size, slot % block_size] = k[token]`."""
    kept = slots >= 0
    page, offset = slots[kept] // k_cache.shape[1], slots[kept] % k_cache.shape[1]
    k_cache[page, offset] = k[kept].to(k_cache.dtype)
    v_cache[page, offset] = v[kept].to(v_cache.dtype)
