"""The activation of a gated feed-forward network: `silu(gate) * up` (SwiGLU, arXiv 2002.05202) and its relatives.

Gate and up projection come as one matrix, gate first, from one fused matrix product. What each kind computes stands
at `engine.models.spec.Activation`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch
from engine.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

BLOCK = 1024  # elements per program


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Both float32. KIND: the value of an `Activation`."""
    if KIND == "silu":
        y = gate * sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z); z = sqrt(2 / pi) * (gate + 0.044715 * gate ** 3), arXiv 1606.08415
        y = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # and not minimum, which would hide a NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = gate * sigmoid(ALPHA * gate) * (up + 1.0)
    return y


@triton.jit
def gated_kernel(
    out_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    stride_row: tl.tensor,
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """BLOCK elements of one row. Grid: (rows, ceil(INTERMEDIATE / BLOCK)). KIND: the value of an `Activation`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < INTERMEDIATE
    gate_place = gate_up_ptr + row * stride_row + column
    gate = tl.load(gate_place, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_place + INTERMEDIATE, mask=kept, other=0.0).to(tl.float32)
    y = activate(gate, up, KIND, ALPHA, LIMIT)
    tl.store(out_ptr + row * INTERMEDIATE + column, y.to(out_ptr.dtype.element_ty), mask=kept)


def gated_launch(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = Activation.SILU) -> Launch:
    """gate_up: `[rows, 2 * intermediate]`, unit stride in the last dimension;
    out: `[rows, intermediate]`, contiguous."""
    rows, intermediate = out.shape
    return Launch(
        kernel=gated_kernel,
        grid=(rows, -(-intermediate // BLOCK)),
        args={"out_ptr": out, "gate_up_ptr": gate_up, "stride_row": gate_up.stride(0)},
        constants={
            "INTERMEDIATE": intermediate,
            "BLOCK": BLOCK,
            "KIND": activation.value,
            "ALPHA": SWIGLU_ALPHA,
            "LIMIT": SWIGLU_LIMIT,
        },
        num_warps=4,
        num_stages=1,
    )
