"""RMSNorm, with the residual addition that precedes it folded in.

`y = x / sqrt(mean(x**2) + eps) * weight` over the last dimension (arXiv 1910.07467, equation 4), in float32 inside.
With a residual: `residual = residual + x`, stored, and the norm is that of the stored (rounded) residual, so that
the fused result equals the separate ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch, next_power_of_2


@triton.jit
def summed_row(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, column: tl.tensor, kept: tl.tensor, ADD: tl.constexpr
) -> tl.tensor:
    """The row at x_ptr in float32; with ADD, plus the row at residual_ptr, where the rounded sum is stored."""
    x = tl.load(x_ptr + column, mask=kept, other=0.0).to(tl.float32)
    if ADD:
        summed = x + tl.load(residual_ptr + column, mask=kept, other=0.0).to(tl.float32)
        rounded = summed.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + column, rounded, mask=kept)
        x = rounded.to(tl.float32)
    return x


@triton.jit
def normed_row(
    x: tl.tensor, weight_ptr: tl.tensor, eps: tl.tensor, column: tl.tensor, kept: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """The norm of a row of WIDTH elements, float32, zero where it is not kept."""
    weight = tl.load(weight_ptr + column, mask=kept, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight


@triton.jit
def rms_norm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    stride_x: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """One row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HIDDEN_PADDED)
    kept = column < HIDDEN
    x = summed_row(x_ptr + row * stride_x, residual_ptr + row * HIDDEN, column, kept, ADD)
    y = normed_row(x, weight_ptr, eps, column, kept, HIDDEN)
    tl.store(out_ptr + row * HIDDEN + column, y.to(out_ptr.dtype.element_ty), mask=kept)


def rms_norm_launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> Launch:
    """x: `[rows, hidden]`, unit stride in the last dimension; weight: `[hidden]`; out, residual: as x, contiguous.

    With `residual`, it is added to and the norm is that of the sum.
    """
    rows, hidden = x.shape
    padded = next_power_of_2(hidden)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(rows,),
        args={
            "out_ptr": out,
            "x_ptr": x,
            "residual_ptr": out if residual is None else residual,  # not touched without ADD
            "weight_ptr": weight,
            "stride_x": x.stride(0),
            "eps": eps,
        },
        constants={"HIDDEN": hidden, "HIDDEN_PADDED": padded, "ADD": residual is not None},
        num_warps=min(16, max(1, padded // 512)),  # 16 elements a thread
        num_stages=1,
    )


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`[rows, hidden]` to float32 `[rows, hidden]`, in plain torch."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
