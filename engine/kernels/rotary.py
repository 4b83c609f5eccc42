"""Rotary position embedding of a step's queries and keys, in place, in one launch.

Halves convention ("NeoX"): element `i` pairs with element `i + rotary_dim / 2` and both turn by the angle
`position * frequency_i` (arXiv 2104.09864, section 3.2.2). Elements beyond `rotary_dim` stay as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch, next_power_of_2


@triton.jit
def rotate_heads(
    ptr: tl.tensor,
    stride_head: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> None:
    """Rotate the HEADS heads of one token that start at `ptr`, in place. cos, sin: float32 `[HALF_PADDED]`."""
    head = tl.arange(0, HEADS_PADDED)[:, None]
    pair = tl.arange(0, HALF_PADDED)[None, :]
    kept = (head < HEADS) & (pair < HALF)
    place = ptr + head * stride_head + pair
    first = tl.load(place, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=kept, other=0.0).to(tl.float32)
    turned_first = first * cos[None, :] - second * sin[None, :]
    turned_second = second * cos[None, :] + first * sin[None, :]
    tl.store(place, turned_first.to(ptr.dtype.element_ty), mask=kept)
    tl.store(place + HALF, turned_second.to(ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["positions_ptr"])
def rotary_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_cos_sin: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> None:
    """One token's queries and keys. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, HALF_PADDED)
    angles = cos_sin_ptr + position * stride_cos_sin + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    rotate_heads(
        q_ptr + token * stride_q_token, stride_q_head, cos, sin, HEADS, HEADS_PADDED, HALF, HALF_PADDED
    )  # fmt: skip
    rotate_heads(
        k_ptr + token * stride_k_token, stride_k_head, cos, sin, KV_HEADS, KV_HEADS_PADDED, HALF, HALF_PADDED
    )  # fmt: skip


def rotary_launch(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> Launch:
    """Rotates q and k in place.

    q: `[tokens, heads, head_dim]`, k: `[tokens, kv_heads, head_dim]`, unit stride in the last dimension; cos_sin:
    float32 `[max_positions, rotary_dim]`, cosines then sines; positions: int64 (or int32) `[tokens]`, each below
    max_positions.
    """
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    half = cos_sin.shape[1] // 2
    padded = next_power_of_2(heads) * next_power_of_2(half)
    return Launch(
        kernel=rotary_kernel,
        grid=(tokens,),
        args={
            "q_ptr": q,
            "k_ptr": k,
            "cos_sin_ptr": cos_sin,
            "positions_ptr": positions,
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_cos_sin": cos_sin.stride(0),
        },
        constants={
            "HEADS": heads,
            "HEADS_PADDED": next_power_of_2(heads),
            "KV_HEADS": kv_heads,
            "KV_HEADS_PADDED": next_power_of_2(kv_heads),
            "HALF": half,
            "HALF_PADDED": next_power_of_2(half),
        },
        num_warps=min(8, max(1, padded // 512)),
        num_stages=1,
    )


def rotary_reference(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The rotation of `[tokens, heads, head_dim]` in plain torch; float32, not in place."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions, None, :half], cos_sin[positions, None, half:]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :].float()), dim=-1)
