"""The gated activation of a SwiGLU block: `silu(gate) * up`, silu(x) = x / (1 + exp(-x)) (arXiv 2002.05202).

Gate and up projection come as one matrix, gate first, from one fused matrix product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch

BLOCK = 1024  # elements per program


@triton.jit
def silu_mul_kernel(
    out_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    stride_row: tl.tensor,
    INTERMEDIATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements of one row. Grid: (rows, ceil(INTERMEDIATE / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < INTERMEDIATE
    gate_place = gate_up_ptr + row * stride_row + column
    gate = tl.load(gate_place, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_place + INTERMEDIATE, mask=kept, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * INTERMEDIATE + column, y.to(out_ptr.dtype.element_ty), mask=kept)


def silu_mul_launch(gate_up: torch.Tensor, out: torch.Tensor) -> Launch:
    """gate_up: `[rows, 2 * intermediate]`, unit stride in the last dimension;
    out: `[rows, intermediate]`, contiguous."""
    rows, intermediate = out.shape
    return Launch(
        kernel=silu_mul_kernel,
        grid=(rows, -(-intermediate // BLOCK)),
        args={"out_ptr": out, "gate_up_ptr": gate_up, "stride_row": gate_up.stride(0)},
        constants={"INTERMEDIATE": intermediate, "BLOCK": BLOCK},
        num_warps=4,
        num_stages=1,
    )


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in plain torch, float32 `[rows, intermediate]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
