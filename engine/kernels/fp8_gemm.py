"""Matrix products of eight-bit floats whose scales are per block: `y[m, n] = sum_b xs[m, b] ws[b, n] (x8 w8)[m, n, b]`.

b runs over blocks of 128 columns, the form of DeepSeek-V3's weights (arXiv 2412.19437, section 3.3.2). The tensor cores
sum eight-bit products with few digits; their sums over one block are therefore added up in float32, here where the
scales are applied anyway. With one scale per row the same loop runs and scales once, at its end: it stands in for
`torch._scaled_mm` where that is missing or wrong, and where results must not depend on the batch.

The product is computed transposed, as in `packed_gemm.py`, and split in the same way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.fp8_rows import Fp8Rows
from engine.kernels.launch import Launch
from engine.kernels.packed_gemm import add_splits_launch
from engine.kernels.product_table import ProductTile

BLOCK_COLUMNS = 128


@triton.jit(do_not_specialize=["rows", "blocks_per_split"])
def fp8_gemm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    blocks_per_split: tl.tensor,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """BLOCK_M rows of x times BLOCK_N rows of the weights over one split of the columns.

    Grid: (ceil(out_features / BLOCK_N), ceil(rows / BLOCK_M), splits). Writes `out[split, row, output]`. BY_BLOCK:
    there is a scale for each BLOCK_K columns, else one for each row. WHOLE: in_features is a multiple of BLOCK_K.
    """
    split = tl.program_id(2)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output_kept, row_kept = output < out_features, row < rows
    column = tl.arange(0, BLOCK_K)
    x_place = x_ptr + row[None, :].to(tl.int64) * in_features + column[:, None]
    weight_place = weight_ptr + output[:, None].to(tl.int64) * in_features + column[None, :]
    blocks = tl.cdiv(in_features, BLOCK_K)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * blocks_per_split
    for block in range(first, tl.minimum(first + blocks_per_split, blocks)):
        start = block * BLOCK_K
        if WHOLE:
            x = tl.load(x_place + start, mask=row_kept[None, :], other=0.0)
            weight = tl.load(weight_place + start, mask=output_kept[:, None], other=0.0)
        else:
            inside = column < in_features - start
            x = tl.load(x_place + start, mask=row_kept[None, :] & inside[:, None], other=0.0)
            weight = tl.load(weight_place + start, mask=output_kept[:, None] & inside[None, :], other=0.0)
        product = tl.dot(weight, x)
        if BY_BLOCK:
            x_scale = tl.load(x_scale_ptr + row * blocks + block, mask=row_kept, other=0.0)
            weight_scale = tl.load(weight_scale_ptr + block * out_features + output, mask=output_kept, other=0.0)
            product *= weight_scale[:, None] * x_scale[None, :]
        acc += product

    if not BY_BLOCK:
        x_scale = tl.load(x_scale_ptr + row, mask=row_kept, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + output, mask=output_kept, other=0.0)
        acc *= weight_scale[:, None] * x_scale[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + output, mask=output_kept, other=0.0).to(tl.float32)[:, None]
    out_row = split.to(tl.int64) * rows + row
    place = out_ptr + out_row[None, :] * out_features + output[:, None]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=output_kept[:, None] & row_kept[None, :])


def fp8_gemm_launches(
    x: Fp8Rows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    partial: torch.Tensor,
    *,
    tile: ProductTile,
    splits: int,
    bias: torch.Tensor | None = None,
) -> list[Launch]:
    """The launches, in order, that compute `out = (x8 xs) (w8 ws)^T + bias`; `fp8_gemm_reference` is the meaning.

    weight: float8_e4m3fn `[out_features, in_features]`, contiguous; scale: float32 `[blocks, out_features]`, as many
    blocks as x has scales per row: one, or one for each 128 columns; out: `[rows, out_features]`, contiguous; bias:
    `[out_features]`; partial: scratch as for `packed_gemm_launches`.

    Raises ValueError for other numbers of scales and for too little scratch.
    """
    rows, outputs = out.shape
    columns = weight.shape[1]
    blocks = -(-columns // BLOCK_COLUMNS)
    by_block = scale.shape[0] > 1
    if scale.shape[0] != x.scale.shape[1] or (by_block and scale.shape[0] != blocks):
        raise ValueError(
            f"{scale.shape[0]} and {x.scale.shape[1]} scales for {blocks} blocks of {BLOCK_COLUMNS} columns"
        )
    if splits > 1 and partial.numel() < splits * rows * outputs:
        raise ValueError(f"scratch for {partial.numel()} partial sums, {splits * rows * outputs} needed")
    product = Launch(
        kernel=fp8_gemm_kernel,
        grid=(-(-outputs // tile.block_n), -(-rows // tile.block_m), splits),
        args={
            "out_ptr": partial if splits > 1 else out,
            "x_ptr": x.codes,
            "x_scale_ptr": x.scale,
            "weight_ptr": weight,
            "weight_scale_ptr": scale,
            "bias_ptr": out if bias is None else bias,  # not touched without BIAS
            "rows": rows,
            "out_features": outputs,
            "in_features": columns,
            "blocks_per_split": -(-blocks // splits),
        },
        constants={
            "BLOCK_K": BLOCK_COLUMNS,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BY_BLOCK": by_block,
            "WHOLE": columns % BLOCK_COLUMNS == 0,
            "BIAS": bias is not None and splits == 1,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [product] if splits == 1 else [product, add_splits_launch(partial, out, splits, bias)]


def fp8_gemm_reference(
    x: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 `[rows, out_features]` in plain torch: both sides decoded, one product."""
    columns = weight.shape[1]
    width = columns if scale.shape[0] == 1 else BLOCK_COLUMNS
    rows = x.codes.float() * x.scale.repeat_interleave(width, dim=1)[:, :columns]
    decoded = weight.float() * scale.T.repeat_interleave(width, dim=1)[:, :columns]
    y = rows @ decoded.T
    return y if bias is None else y + bias.float()
