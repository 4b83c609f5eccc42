"""Write a step's keys and values to their pages as eight-bit floats, each head of a token with a scale of its own.

`scale = max |k| / 448`, `codes = k / scale` (as `fp8_rows.py`). A page is one stretch of bytes: the codes of all its
tokens and heads, then their scales, so that whoever moves pages moves both. `Fp8Pages` gives the two views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.fp8_rows import E4M3_MAX, to_e4m3
from engine.kernels.launch import Launch, next_power_of_2

SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Fp8Pages:
    """K or V of one layer. codes: float8_e4m3fn `[num_blocks, block_size, kv_heads, head_dim]`; scale: float32
    `[num_blocks, block_size, kv_heads]`. Both are views of one buffer: adjacent within a page, pages apart."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, raw: torch.Tensor, block_size: int, kv_heads: int, head_dim: int) -> Fp8Pages:
        """raw: uint8 `[num_blocks, page_bytes]`, contiguous."""
        blocks, code_bytes = raw.shape[0], block_size * kv_heads * head_dim
        codes = raw.view(torch.float8_e4m3fn)[:, :code_bytes].view(blocks, block_size, kv_heads, head_dim)
        scale = raw.view(torch.float32)[:, code_bytes // SCALE_BYTES :].view(blocks, block_size, kv_heads)
        return cls(codes, scale)

    def dequantize(self) -> torch.Tensor:
        """float32 of the codes' shape."""
        return self.codes.float() * self.scale[..., None]


def page_bytes(block_size: int, kv_heads: int, head_dim: int) -> int:
    """Of K or V of one page."""
    return block_size * kv_heads * (head_dim + SCALE_BYTES)


@triton.jit
def write_head_rows(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    x: tl.tensor,
    place: tl.tensor,
    scale_place: tl.tensor,
    kept: tl.tensor,
    head_kept: tl.tensor,
    ROUND: tl.constexpr,
) -> None:
    """x: float32 `[KV_HEADS_PADDED, HEAD_DIM_PADDED]`, zero where it is not kept."""
    scale = tl.max(tl.abs(x), 1) / E4M3_MAX
    codes = x / tl.where(scale > 0.0, scale, 1.0)[:, None]
    tl.store(codes_ptr + place, to_e4m3(codes, ROUND), mask=kept)
    tl.store(scale_ptr + scale_place, scale, mask=head_kept)


@triton.jit(do_not_specialize=["slots_ptr"])
def kv_write_fp8_kernel(
    k_codes_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_codes_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    ROUND: tl.constexpr,
) -> None:
    """One token's K and V, all heads. Grid: (tokens,). A slot of -1 is skipped. ROUND: see `to_e4m3`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, KV_HEADS_PADDED)
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    head_kept = head < KV_HEADS
    kept = head_kept[:, None] & (dims < HEAD_DIM)
    page, head_row = slot // PAGE_SIZE, (slot % PAGE_SIZE) * KV_HEADS + head
    place = page * PAGE_BYTES + head_row[:, None] * HEAD_DIM + dims
    scale_place = page * (PAGE_BYTES // 4) + head_row
    key = tl.load(k_ptr + token * stride_k_token + head[:, None] * stride_k_head + dims, mask=kept, other=0.0)
    value = tl.load(v_ptr + token * stride_v_token + head[:, None] * stride_v_head + dims, mask=kept, other=0.0)
    write_head_rows(k_codes_ptr, k_scale_ptr, key.to(tl.float32), place, scale_place, kept, head_kept, ROUND)
    write_head_rows(v_codes_ptr, v_scale_ptr, value.to(tl.float32), place, scale_place, kept, head_kept, ROUND)


def kv_write_fp8_launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: Fp8Pages,
    v_pages: Fp8Pages,
    slots: torch.Tensor,
    *,
    interpreted: bool = False,
) -> Launch:
    """k, v: `[tokens, kv_heads, head_dim]`, unit stride in the last dimension; slots: int64 (or int32) `[tokens]`;
    interpreted: by Triton's interpreter. `kv_write_fp8_reference` is the meaning."""
    tokens, kv_heads, head_dim = k.shape
    padded = next_power_of_2(kv_heads) * next_power_of_2(head_dim)
    return Launch(
        kernel=kv_write_fp8_kernel,
        grid=(tokens,),
        args={
            "k_codes_ptr": k_pages.codes,
            "k_scale_ptr": k_pages.scale,
            "v_codes_ptr": v_pages.codes,
            "v_scale_ptr": v_pages.scale,
            "k_ptr": k,
            "v_ptr": v,
            "slots_ptr": slots,
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_v_token": v.stride(0),
            "stride_v_head": v.stride(1),
        },
        constants={
            "PAGE_SIZE": k_pages.codes.shape[1],
            "KV_HEADS": kv_heads,
            "KV_HEADS_PADDED": next_power_of_2(kv_heads),
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": next_power_of_2(head_dim),
            "PAGE_BYTES": k_pages.codes.stride(0),
            "ROUND": interpreted,
        },
        num_warps=4 if padded > 512 else 1,
        num_stages=1,
    )


def kv_write_fp8_reference(x: torch.Tensor, pages: Fp8Pages, slots: torch.Tensor) -> None:
    """K or V of a step in plain torch, in place."""
    kept = slots >= 0
    page, offset = slots[kept] // pages.codes.shape[1], slots[kept] % pages.codes.shape[1]
    values = x[kept].float()
    scale = values.abs().amax(dim=-1) / E4M3_MAX.value
    divisor = torch.where(scale > 0, scale, 1.0)
    codes = (values / divisor[..., None]).to(torch.float8_e4m3fn)
    pages.codes.view(torch.uint8)[page, offset] = codes.view(torch.uint8)
    pages.scale[page, offset] = scale
