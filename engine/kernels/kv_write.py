"""Write a step's keys and values to their pages.

Attention reads keys only from pages, the step's own included, so this runs before it in every layer. A slot is the
token's place in the cache, `page * block_size + offset`; -1 means that the token has none (padding) and is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch, next_power_of_2


@triton.jit(do_not_specialize=["slots_ptr"])
def kv_write_kernel(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
) -> None:
    """One token's K and V, all heads. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, KV_HEADS_PADDED)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    kept = (head < KV_HEADS) & (dims < HEAD_DIM)
    place = (slot * KV_HEADS + head) * HEAD_DIM + dims
    key = tl.load(k_ptr + token * stride_k_token + head * stride_k_head + dims, mask=kept)
    value = tl.load(v_ptr + token * stride_v_token + head * stride_v_head + dims, mask=kept)
    tl.store(k_cache_ptr + place, key, mask=kept)
    tl.store(v_cache_ptr + place, value, mask=kept)


def kv_write_launch(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> Launch:
    """k, v: `[tokens, kv_heads, head_dim]`, unit stride in the last dimension; k_cache, v_cache: `[num_blocks,
    block_size, kv_heads, head_dim]`, contiguous; slots: int64 (or int32) `[tokens]`."""
    tokens, kv_heads, head_dim = k.shape
    padded = next_power_of_2(kv_heads) * next_power_of_2(head_dim)
    return Launch(
        kernel=kv_write_kernel,
        grid=(tokens,),
        args={
            "k_cache_ptr": k_cache,
            "v_cache_ptr": v_cache,
            "k_ptr": k,
            "v_ptr": v,
            "slots_ptr": slots,
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_v_token": v.stride(0),
            "stride_v_head": v.stride(1),
        },
        constants={
            "KV_HEADS": kv_heads,
            "KV_HEADS_PADDED": next_power_of_2(kv_heads),
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": next_power_of_2(head_dim),
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
