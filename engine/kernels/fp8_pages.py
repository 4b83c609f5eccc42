"""Pages of keys or values in eight-bit floats, each head of a token with a scale of its own.

`scale = max |k| / 448`, `codes = k / scale` (as `fp8_rows.py`). A page is one stretch of bytes: the codes of all its
tokens and heads, then their scales, so that whoever moves pages moves both. `Fp8Pages` gives the two views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.fp8_rows import E4M3_MAX, to_e4m3

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
    """Codes and scales of one token's heads. x: float32 `[heads, head_dim]`, both padded, zero where it is not kept."""
    scale = tl.max(tl.abs(x), 1) / E4M3_MAX
    codes = x / tl.where(scale > 0.0, scale, 1.0)[:, None]
    tl.store(codes_ptr + place, to_e4m3(codes, ROUND), mask=kept)
    tl.store(scale_ptr + scale_place, scale, mask=head_kept)


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
