"""Matrix products with four- or eight-bit weights, for few rows: `y = x W^T + b`, `W = scale * u + minimum`.

With few rows the time goes into reading the weights, so they are read packed, once, and never decoded: with integers u
that are exact in the activations' dtype, a group of columns contributes

    scale[n] * sum_k u[n, k] x[m, k]  +  minimum[n] * sum_k x[m, k],

the first sum a tensor-core product over float32, both factors applied once per group and output (the group-wise form of
AWQ's, arXiv 2306.00978, section 4). The product is computed transposed, `W x^T`: the integers are the left operand,
which the tensor cores take from registers, and the rows of x, padded to 16, the right one.

A byte holds column i low and column i + 16 high, so one tile of bytes is two tiles of weights, multiplied with two
tiles of x; nothing is interleaved. Integers become floats by their bits: `u | 0x4300` is the bfloat16 128 + u, and 128
scales are taken off the minimum (float16: 0x6400 and 1024).

One matrix has too few tiles to fill a GPU, so the groups are split among programs (split-K), whose float32 sums a
second kernel adds in a fixed order: results do not depend on which program is first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch
from engine.kernels.product_table import ProductTile

_REDUCE_BLOCK = 512  # outputs per program


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight matrix on the device, laid out as `engine.quant.grouped.GroupedWeight` says.

    packed: uint8 `[groups, rows, group_size * bits / 8]`; scale, minimum: float16 or float32 `[groups, rows]`.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor
    bits: int

    @property
    def out_features(self) -> int:
        return self.packed.shape[1]

    @property
    def num_groups(self) -> int:
        return self.packed.shape[0]

    @property
    def group_size(self) -> int:
        return self.packed.shape[2] * 8 // self.bits

    @property
    def in_features(self) -> int:
        return self.num_groups * self.group_size

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes + self.minimum.nbytes


@triton.jit
def integers_as(u: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Four-bit integers as floats of DTYPE, plus `integers_offset(DTYPE)`: exact, without a conversion."""
    if tl.bfloat16 == DTYPE:
        result = (u.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif tl.float16 == DTYPE:
        result = (u.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        result = u.to(tl.float32)
    return result


@triton.jit
def integers_offset(DTYPE: tl.constexpr) -> tl.constexpr:
    """What `integers_as` adds: the power of two whose last digit is worth one."""
    if tl.bfloat16 == DTYPE:
        return 128.0
    if tl.float16 == DTYPE:
        return 1024.0
    return 0.0


# The number of rows varies with the batch; a value of 1 or a multiple of 16 must not compile another kernel.
@triton.jit(do_not_specialize=["rows", "groups_per_split"])
def packed_gemm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows: tl.tensor,
    out_features: tl.tensor,
    groups: tl.tensor,
    groups_per_split: tl.tensor,
    stride_x: tl.tensor,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """BLOCK_M rows of x times BLOCK_N rows of W over one split of the groups.

    Grid: (ceil(out_features / BLOCK_N), ceil(rows / BLOCK_M), splits). Writes `out[split, row, output]`. With BIAS it
    is added: for a single split. UPCAST multiplies in float32 (the interpreter's bfloat16 product is wrong).
    """
    WIDTH: tl.constexpr = GROUP * BITS // 8
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    OFFSET: tl.constexpr = integers_offset(DTYPE) if BITS == 4 else 0.0
    split = tl.program_id(2)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output_kept, row_kept = output < out_features, row < rows
    byte = tl.arange(0, WIDTH)
    column = byte
    if BITS == 4:
        column = byte // 16 * 32 + byte % 16
    # [WIDTH, BLOCK_M], as the right operand needs it
    x_place = x_ptr + row[None, :].to(tl.int64) * stride_x + column[:, None]
    packed_place = packed_ptr + output[:, None].to(tl.int64) * WIDTH + byte[None, :]

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * groups_per_split
    for group in range(first, tl.minimum(first + groups_per_split, groups)):
        of_group = group * tl.cast(out_features, tl.int64)
        packed = tl.load(packed_place + of_group * WIDTH, mask=output_kept[:, None], other=0)
        scale = tl.load(scale_ptr + of_group + output, mask=output_kept, other=0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + of_group + output, mask=output_kept, other=0.0).to(tl.float32)
        x_low = tl.load(x_place + group * GROUP, mask=row_kept[None, :], other=0.0)
        if BITS == 4:
            x_high = tl.load(x_place + group * GROUP + 16, mask=row_kept[None, :], other=0.0)
            low, high = integers_as(packed & 15, DTYPE), integers_as(packed >> 4, DTYPE)
            if UPCAST:
                low, high = low.to(tl.float32), high.to(tl.float32)
                x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
            product = tl.dot(low, x_low, input_precision="ieee")
            product = tl.dot(high, x_high, product, input_precision="ieee")
            x_sum = tl.sum(x_low.to(tl.float32) + x_high.to(tl.float32), 0)
        else:
            values = packed.to(tl.float32)
            if UPCAST:
                x_low = x_low.to(tl.float32)
            else:
                values = values.to(DTYPE)
            product = tl.dot(values, x_low, input_precision="ieee")
            x_sum = tl.sum(x_low.to(tl.float32), 0)
        acc += product * scale[:, None] + (minimum - OFFSET * scale)[:, None] * x_sum[None, :]

    if BIAS:
        acc += tl.load(bias_ptr + output, mask=output_kept, other=0.0).to(tl.float32)[:, None]
    out_row = split.to(tl.int64) * rows + row
    place = out_ptr + out_row[None, :] * out_features + output[:, None]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=output_kept[:, None] & row_kept[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def add_splits_kernel(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows: tl.tensor,
    splits: tl.tensor,
    out_features: tl.tensor,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """`out[row] = sum_s partial[s, row] + bias`, s ascending. Grid: (rows, ceil(out_features / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = output < out_features
    acc = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        acc += tl.load(partial_ptr + (split * rows + row) * out_features + output, mask=kept, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + output, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_features + output, acc.to(out_ptr.dtype.element_ty), mask=kept)


def packed_gemm_launches(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    partial: torch.Tensor,
    *,
    tile: ProductTile,
    splits: int,
    bias: torch.Tensor | None = None,
    upcast: bool = False,
) -> list[Launch]:
    """The launches, in order, that compute `out = x W^T + bias`; `packed_gemm_reference` is the meaning.

    x: `[rows, in_features]`, float16, bfloat16 or float32, unit stride in the last dimension; out: `[rows,
    out_features]` of any of these dtypes, contiguous; bias: `[out_features]`; partial: scratch, float32, at least
    `splits * rows * out_features` elements, not needed when splits is 1.
    """
    rows, outputs = out.shape
    if splits > 1 and partial.numel() < splits * rows * outputs:
        raise ValueError(f"scratch for {partial.numel()} partial sums, {splits * rows * outputs} needed")
    product = Launch(
        kernel=packed_gemm_kernel,
        grid=(-(-outputs // tile.block_n), -(-rows // tile.block_m), splits),
        args={
            "out_ptr": partial if splits > 1 else out,
            "x_ptr": x,
            "packed_ptr": weight.packed,
            "scale_ptr": weight.scale,
            "minimum_ptr": weight.minimum,
            "bias_ptr": out if bias is None else bias,  # not touched without BIAS
            "rows": rows,
            "out_features": outputs,
            "groups": weight.num_groups,
            "groups_per_split": -(-weight.num_groups // splits),
            "stride_x": x.stride(0),
        },
        constants={
            "GROUP": weight.group_size,
            "BITS": weight.bits,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BIAS": bias is not None and splits == 1,
            "UPCAST": upcast,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [product] if splits == 1 else [product, add_splits_launch(partial, out, splits, bias)]


def add_splits_launch(partial: torch.Tensor, out: torch.Tensor, splits: int, bias: torch.Tensor | None) -> Launch:
    """`out = sum_s partial[s] + bias`. partial: float32, at least `[splits, rows, out_features]`; out: `[rows,
    out_features]`; both contiguous."""
    rows, outputs = out.shape
    return Launch(
        kernel=add_splits_kernel,
        grid=(rows, -(-outputs // _REDUCE_BLOCK)),
        args={
            "out_ptr": out,
            "partial_ptr": partial,
            "bias_ptr": out if bias is None else bias,  # not touched without BIAS
            "rows": rows,
            "splits": splits,
            "out_features": outputs,
        },
        constants={"BLOCK": _REDUCE_BLOCK, "BIAS": bias is not None},
        num_warps=4,
        num_stages=1,
    )


def packed_gemm_reference(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float32 `[rows, out_features]` in plain torch: the weights decoded, one product."""
    y = x.float() @ unpacked_reference(weight).T
    return y if bias is None else y + bias.float()


def unpacked_reference(weight: PackedWeight) -> torch.Tensor:
    """The weights in plain torch: float32 `[out_features, in_features]`."""
    values = weight.packed
    if weight.bits == 4:
        blocks = values.view(*values.shape[:2], -1, 16)
        values = torch.cat((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    decoded = values.float() * weight.scale.float()[..., None] + weight.minimum.float()[..., None]
    return decoded.transpose(0, 1).reshape(weight.out_features, weight.in_features)
