"""Packed weights decoded to floats, for as many rows of x that a dense product is the faster one.

`W[n, k] = scale[group, n] * u[n, k] + minimum[group, n]`, computed in float32 and rounded once. The layout is that of
`packed_gemm.PackedWeight`. A prompt's product reads each decoded weight many times, so decoding costs little beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch
from engine.kernels.packed_gemm import PackedWeight

_BLOCK_N = 32  # rows of W per program


@triton.jit(do_not_specialize=["first_row", "rows"])
def decode_weight_kernel(
    out_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """BLOCK_N rows of W, one group of columns. Grid: (groups, ceil(rows / BLOCK_N)).

    Row `first_row + i` of the weights becomes row i of `out[rows, in_features]`.
    """
    WIDTH: tl.constexpr = GROUP * BITS // 8
    group = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = row < rows
    byte = tl.arange(0, WIDTH)
    of_group = group.to(tl.int64) * out_features + first_row + row
    packed = tl.load(packed_ptr + of_group[:, None] * WIDTH + byte[None, :], mask=kept[:, None], other=0)
    scale = tl.load(scale_ptr + of_group, mask=kept, other=0.0).to(tl.float32)[:, None]
    minimum = tl.load(minimum_ptr + of_group, mask=kept, other=0.0).to(tl.float32)[:, None]
    column = byte
    if BITS == 4:
        column = byte // 16 * 32 + byte % 16
    place = out_ptr + row[:, None].to(tl.int64) * in_features + group * GROUP + column[None, :]
    if BITS == 4:
        high = (packed >> 4).to(tl.float32) * scale + minimum
        tl.store(place + 16, high.to(out_ptr.dtype.element_ty), mask=kept[:, None])
        packed = packed & 15
    low = packed.to(tl.float32) * scale + minimum
    tl.store(place, low.to(out_ptr.dtype.element_ty), mask=kept[:, None])


def decode_weight_launch(weight: PackedWeight, first_row: int, out: torch.Tensor) -> Launch:
    """out: `[rows, in_features]`, contiguous: rows `first_row` and after of the weights, decoded to its dtype.

    `packed_gemm.unpacked_reference` is the meaning.
    """
    rows = out.shape[0]
    return Launch(
        kernel=decode_weight_kernel,
        grid=(weight.num_groups, -(-rows // _BLOCK_N)),
        args={
            "out_ptr": out,
            "packed_ptr": weight.packed,
            "scale_ptr": weight.scale,
            "minimum_ptr": weight.minimum,
            "first_row": first_row,
            "rows": rows,
            "out_features": weight.out_features,
            "in_features": weight.in_features,
        },
        constants={"GROUP": weight.group_size, "BITS": weight.bits, "BLOCK_N": _BLOCK_N},
        num_warps=4,
        num_stages=1,
    )
