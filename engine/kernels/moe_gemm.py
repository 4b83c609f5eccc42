"""The experts' matrix products, all experts in one launch: rows sorted by expert, each block of rows with its weights.

    gate_up   h[p] = activation(x[order[p] // top_k] W1_e^T + b1_e)      p: place in the order, e: its expert
    down      y[order[p]] = h[p] W2_e^T + b2_e

One program takes one entry of the block table (`moe_routing.py`), at most BLOCK_M rows of one expert, and BLOCK_N
columns; entries that nobody uses end at once. Gate and up rows of W1 alternate, so that a tile holds both of a pair
and the activation is applied before anything is stored. Sums are float32. With few rows an expert's weights are read
once and that is what takes the time; blocks of one expert are neighbours in the grid, so that more share the cache.

Packed weights stand as `[experts, columns / 32, rows, 16]`: the 32 columns of a group in 16 bytes, column i low and
column i + 16 high, the same group of all rows side by side, so that a tile is one run of memory. The small integers go
to the tensor cores as they are, exact in 16 bits; a group's scale is applied to its sum:

    int4    w = scale * q + minimum    float16 scale and minimum per group
    mxfp4   w = 2 ** (e - 127) * v     v: four-bit float (OCP Microscaling Formats 1.0, section 5.3), e: one byte
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.expert_table import ExpertTile
from engine.kernels.gated import activate
from engine.kernels.launch import Launch
from engine.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

GROUP = 32  # columns per scale of packed weights


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix per expert on the device. `rows`, `columns`: of each matrix as it is multiplied.

    `data`: floats `[experts, rows, columns]`, or packed uint8 `[experts, columns / 32, rows, 16]`. `scale`:
    `[experts, columns / 32, rows]`, float16 for "int4", uint8 exponents for "mxfp4"; `minimum`: as it, "int4" alone.
    """

    encoding: str  # "dense", "int4" or "mxfp4"
    data: torch.Tensor
    scale: torch.Tensor | None = None
    minimum: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # float32 [experts, rows]

    @property
    def rows(self) -> int:
        return self.data.shape[1 if self.encoding == "dense" else 2]

    @property
    def columns(self) -> int:
        return self.data.shape[2] if self.encoding == "dense" else self.data.shape[1] * GROUP

    @property
    def num_bytes(self) -> int:
        parts = (self.data, self.scale, self.minimum, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


@triton.jit
def dense_sum(
    acc: tl.tensor,
    x_place: tl.tensor,
    kept_row: tl.tensor,
    w_ptr: tl.tensor,
    expert: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """acc + x w^T. acc: float32 `[BLOCK_M, BLOCK_N]`; x_place: pointers to the rows."""
    w_place = w_ptr + (expert * N + column) * K
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_place[:, None] + k[None, :], mask=kept_row[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_place[None, :] + k[:, None], mask=(column < N)[None, :] & (k < K)[:, None], other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def small_floats(code: tl.tensor) -> tl.tensor:
    """Twice the value of four-bit floats: 0 1 2 3 4 6 8 12, negative from code 8 on. code: int32."""
    size = code & 7
    twice = tl.maximum(size, tl.maximum(2 * size - 4, 4 * size - 16))
    return tl.where(code >= 8, -twice, twice)


@triton.jit
def packed_sum(
    acc: tl.tensor,
    x_place: tl.tensor,
    kept_row: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    expert: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    N: tl.constexpr,
    ENCODING: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tensor:
    """acc + x w^T, group by group. As `dense_sum`."""
    byte = tl.arange(0, 16)
    kept_column = column < N
    zeros = tl.zeros_like(acc)
    for group in range(K // 32):
        row = (expert * (K // 32) + group) * N + column
        x_low = tl.load(x_place[:, None] + (group * 32 + byte)[None, :], mask=kept_row[:, None], other=0.0)
        x_high = tl.load(x_place[:, None] + (group * 32 + 16 + byte)[None, :], mask=kept_row[:, None], other=0.0)
        codes = tl.load(w_ptr + row[None, :] * 16 + byte[:, None], mask=kept_column[None, :], other=0).to(tl.int32)
        low, high = codes & 15, codes >> 4
        scale = tl.load(scale_ptr + row, mask=kept_column, other=0)
        if ENCODING == "mxfp4":
            low, high = small_floats(low), small_floats(high)
            # The exponent's bits are those of a float32, halved for `small_floats`.
            factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 0.5
        else:
            factor = scale.to(tl.float32)
        if UPCAST:
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        part = tl.dot(x_low, low.to(x_low.dtype), zeros, input_precision="ieee")
        part = tl.dot(x_high, high.to(x_high.dtype), part, input_precision="ieee")
        acc += part * factor[None, :]
        if ENCODING == "int4":
            minimum = tl.load(minimum_ptr + row, mask=kept_column, other=0.0).to(tl.float32)
            inputs = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), 1)
            acc += inputs[:, None] * minimum[None, :]
    return acc


@triton.jit
def expert_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    order_ptr: tl.tensor,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    ENCODING: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One block of rows, BLOCK_N columns. Grid: (entries of the block table, ceil(N / BLOCK_N)).

    ACTIVATION: the value of an `Activation` for gate_up, "" for down.
    """
    entry = blocks_ptr + 3 * tl.program_id(0)
    first_row = tl.load(entry + 1)
    stop = tl.load(entry + 2)
    if first_row >= stop:
        return
    expert = tl.load(entry).to(tl.int64)
    row = first_row + tl.arange(0, BLOCK_M)
    kept_row = row < stop
    slot = tl.load(order_ptr + row, mask=kept_row, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if ACTIVATION == "":
        x_row, out_row = row, slot
    else:
        x_row, out_row = slot // TOP_K, row
    x_place = x_ptr + x_row.to(tl.int64) * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if ENCODING == "dense":
        acc = dense_sum(acc, x_place, kept_row, w_ptr, expert, column, K, N, BLOCK_K, UPCAST)
    else:
        acc = packed_sum(
            acc, x_place, kept_row, w_ptr, scale_ptr, minimum_ptr, expert, column, K, N, ENCODING, UPCAST
        )  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + column, mask=column < N, other=0.0)[None, :]
    if ACTIVATION == "":
        place = out_ptr + out_row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=kept_row[:, None] & (column < N)[None, :])
    else:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        result = activate(gate, up, ACTIVATION, ALPHA, LIMIT)
        out_column = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        place = out_ptr + out_row.to(tl.int64)[:, None] * (N // 2) + out_column[None, :]
        kept = kept_row[:, None] & (out_column < N // 2)[None, :]
        tl.store(place, result.to(out_ptr.dtype.element_ty), mask=kept)


def expert_launch(
    x: torch.Tensor,
    weights: ExpertWeights,
    blocks: torch.Tensor,
    order: torch.Tensor,
    out: torch.Tensor,
    *,
    top_k: int,
    tile: ExpertTile,
    activation: Activation | None = None,
    upcast: bool = False,
) -> Launch:
    """One of the two products; `engine.layers.moe.MixtureOfExperts` is the meaning of both together.

    blocks, order: of `moe_routing.Routing`, made with `tile.block_m`; x, out: contiguous, in one dtype.
    With `activation` (gate_up): x `[tokens, columns]`, out `[tokens * top_k, rows / 2]` by place in the order.
    Without (down): x `[tokens * top_k, columns]` by place, out `[tokens * top_k, rows]` by slot.
    """
    return Launch(
        kernel=expert_kernel,
        grid=(blocks.shape[0], -(-weights.rows // tile.block_n)),
        args={
            "out_ptr": out,
            "x_ptr": x,
            "w_ptr": weights.data,
            # What an encoding does not have is not touched.
            "scale_ptr": weights.data if weights.scale is None else weights.scale,
            "minimum_ptr": weights.data if weights.minimum is None else weights.minimum,
            "bias_ptr": x if weights.bias is None else weights.bias,
            "blocks_ptr": blocks,
            "order_ptr": order,
        },
        constants={
            "K": weights.columns,
            "N": weights.rows,
            "TOP_K": top_k,
            "ENCODING": weights.encoding,
            "BIAS": weights.bias is not None,
            "ACTIVATION": "" if activation is None else activation.value,
            "ALPHA": SWIGLU_ALPHA,
            "LIMIT": SWIGLU_LIMIT,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "UPCAST": upcast,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
