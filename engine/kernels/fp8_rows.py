"""Rows brought to eight-bit floats (e4m3) with a scale of their own, after a norm where there is one.

    scale[row, group] = max |y[row, group]| / 448,   codes = y / scale

per group of columns, or per row (per-token dynamic quantisation, arXiv 2211.10438, section 3; e4m3 and its largest
value, 448: arXiv 2209.05433). y is x itself, or its RMSNorm as in `rms_norm.py`, with the residual addition that
precedes it: what the next product reads is then made in one pass over the row. y is rounded to x's dtype first, so that
the fused result equals the separate ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch, next_power_of_2
from engine.kernels.rms_norm import normed_row, summed_row

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """codes: float8_e4m3fn `[rows, columns]`; scale: float32 `[rows, groups]`; both contiguous."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, groups: int, device: torch.device) -> Fp8Rows:
        return cls(
            torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(rows, groups, dtype=torch.float32, device=device),
        )


@triton.jit
def to_e4m3(x: tl.tensor, ROUND: tl.constexpr) -> tl.tensor:
    """float32 of at most 448 to the nearest e4m3, ties to even. ROUND: in arithmetic first, so that the conversion has
    nothing to round. The interpreter's forgets the carry into the exponent and cuts off what is below 2^-6."""
    if ROUND:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of fraction are left of 23
        normal = bits.to(tl.float32, bitcast=True)
        small = (x + 24576.0) - 24576.0  # 1.5 * 2^14, whose last digit is worth 2^-9
        x = tl.where(tl.abs(x) < 0.015625, small, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def fp8_rows_kernel(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    stride_x: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    ROUND: tl.constexpr,
) -> None:
    """One row. Grid: (rows,). GROUPS of equal size, 1 for the whole row; several must be of a power of two.

    NORM: of x first; ADD: after `residual += x`, of the residual. ROUND: see `to_e4m3`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS_PADDED)
    kept = column < COLUMNS
    y = summed_row(x_ptr + row * stride_x, residual_ptr + row * COLUMNS, column, kept, ADD)
    if NORM:
        y = normed_row(y, weight_ptr, eps, column, kept, COLUMNS)
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)

    GROUP: tl.constexpr = COLUMNS // GROUPS if GROUPS > 1 else COLUMNS_PADDED
    grouped = tl.reshape(y, [COLUMNS_PADDED // GROUP, GROUP])
    scale = tl.max(tl.abs(grouped), 1) / E4M3_MAX
    # A group of zeros has no scale to divide by: its codes are zero with any.
    codes = grouped / tl.where(scale > 0.0, scale, 1.0)[:, None]
    codes = to_e4m3(tl.reshape(codes, [COLUMNS_PADDED]), ROUND)
    tl.store(codes_ptr + row * COLUMNS + column, codes, mask=kept)
    group = tl.arange(0, COLUMNS_PADDED // GROUP)
    tl.store(scale_ptr + row * GROUPS + group, scale, mask=group < GROUPS)


def fp8_rows_launch(
    x: torch.Tensor,
    out: Fp8Rows,
    *,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    interpreted: bool = False,
) -> Launch:
    """x: `[rows, columns]`, unit stride in the last dimension; weight: `[columns]`, of the norm, None: there is none;
    residual: `[rows, columns]`, contiguous, added to; interpreted: by Triton's interpreter. `fp8_rows_reference` is the
    meaning.

    Raises ValueError for groups of other sizes than the kernel serves, and for a residual without a norm.
    """
    rows, columns = x.shape
    groups = out.scale.shape[1]
    group = columns // groups
    if columns % groups or (groups > 1 and group != next_power_of_2(group)):
        raise ValueError(f"{columns} columns do not make {groups} groups of a power of two")
    if residual is not None and weight is None:
        raise ValueError("a residual is added before a norm, and there is none")
    padded = next_power_of_2(columns)
    return Launch(
        kernel=fp8_rows_kernel,
        grid=(rows,),
        args={
            "codes_ptr": out.codes,
            "scale_ptr": out.scale,
            "x_ptr": x,
            "residual_ptr": x if residual is None else residual,  # not touched without ADD
            "weight_ptr": x if weight is None else weight,  # not touched without NORM
            "stride_x": x.stride(0),
            "eps": eps,
        },
        constants={
            "COLUMNS": columns,
            "COLUMNS_PADDED": padded,
            "GROUPS": groups,
            "NORM": weight is not None,
            "ADD": residual is not None,
            "ROUND": interpreted,
        },
        num_warps=min(16, max(1, padded // 512)),  # 16 elements a thread
        num_stages=1,
    )


def fp8_rows_reference(y: torch.Tensor, groups: int) -> Fp8Rows:
    """`[rows, columns]`, normed already, in plain torch."""
    grouped = y.float().view(y.shape[0], groups, -1)
    scale = grouped.abs().amax(dim=-1) / E4M3_MAX.value
    divisor = torch.where(scale > 0, scale, 1.0)
    codes = (grouped / divisor[..., None]).view(y.shape).to(torch.float8_e4m3fn)
    return Fp8Rows(codes, scale)
