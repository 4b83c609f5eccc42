"""Matrix products with fixed weights behind one interface, `y = x W^T + b`, and the choice of implementation.

On a CPU with byte products the compiled kernel with packed weights (`linear_native.py`) is the fastest at every row
count. Elsewhere the best depends on the row count: with few rows the time goes into reading the weights, so packed ones
win; with more, oneDNN's prepacked dense ones. `build_linear` makes what the `LinearPolicy` asks for; `SplitLinear`
picks per call. Every private or compiled kernel is probed against plain torch first (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.layers import linear_native, probe
from engine.quant.matrix import GROUP_SIZE, ORDERED, AffineBlocks, WeightMatrix, affine_bits, pieces, same_order

FloatArray = npt.NDArray[np.float32]

# torch's four-bit product takes matrices of a multiple of so many rows.
_INT4PACK_ROWS = 16


class Linear(Protocol):
    """x: `[tokens, in_features]` -> `[tokens, out_features]`, in x's dtype unless the implementation says otherwise."""

    in_features: int
    out_features: int
    num_bytes: int  # what the weights occupy, all copies

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LinearPolicy:
    """Which implementations to build.

    `dtype`: of the activations. `packed_rows`: at most this many rows go through four- or eight-bit weights, where the
    file has them (0: never). `dense`: keep a copy for more rows, in `dense_dtype` (None: `dtype`); without it the
    packed weights serve every row count. `triton`: by the kernels for GPUs; on a CPU they are interpreted, in tests.
    `deterministic`: then a row's packed product does not depend on the rows beside it.
    """

    device: torch.device
    dtype: torch.dtype
    packed_rows: int
    dense: bool = True
    dense_dtype: torch.dtype | None = None
    triton: bool = False
    deterministic: bool = False


class DenseLinear:
    """Plain torch: any device, any dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class PrepackedLinear:
    """oneDNN with weights reordered once into its blocked layout. CPU, float32 or bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, rows_hint: int = 8) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows_hint)
        self._bias = bias
        self._linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self._packed, self._bias, "none", [], "")


class CastLinear:
    """`inner` computes in another dtype than the activations have: x is converted before, the result after."""

    def __init__(self, inner: Linear, dtype: torch.dtype) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.num_bytes = inner.num_bytes
        self._inner, self._dtype = inner, dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x.to(self._dtype)).to(x.dtype)


class Int4PackLinear:
    """torch's four-bit CPU kernel. Exact repack of the affine form: its `(q - 8) * s + z` has s = scale, z = minimum
    + 8 * scale. The scales are rounded to x's dtype."""

    def __init__(self, weight: AffineBlocks, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
        values = weight.values()
        self.out_features, self.in_features = len(values), values.shape[1] * GROUP_SIZE
        integers = torch.from_numpy(values.reshape(self.out_features, -1).astype(np.int32))
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
        pairs = np.stack([weight.scale, weight.minimum + 8.0 * weight.scale], axis=-1)  # [rows, groups, 2]
        self._scales = torch.from_numpy(np.ascontiguousarray(pairs.swapaxes(0, 1))).to(dtype)
        self._bias = bias
        self.num_bytes = self._packed.nbytes + self._scales.nbytes
        self._linear: Callable[..., torch.Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._linear(x, self._packed, GROUP_SIZE, self._scales)
        return y if self._bias is None else y.add_(self._bias)


class ReorderedLinear:
    """`inner` has the columns of the matrix in another order: x is brought into it first."""

    def __init__(self, inner: Linear, order: npt.NDArray[np.int32], device: torch.device) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner, self._order = inner, torch.from_numpy(order).to(device)
        self.num_bytes = inner.num_bytes + self._order.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x.index_select(-1, self._order))


class SplitLinear:
    """`few` for up to `limit` rows, `many` above."""

    def __init__(self, few: Linear, many: Linear, limit: int) -> None:
        self.in_features, self.out_features = many.in_features, many.out_features
        self.num_bytes = few.num_bytes + many.num_bytes
        self.few, self.many, self.limit = few, many, limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x) if x.shape[0] <= self.limit else self.many(x)


def build_linear(
    parts: Sequence[WeightMatrix],
    policy: LinearPolicy,
    bias: FloatArray | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Linear:
    """One product with the rows of `parts` stacked, as `policy` asks and this machine allows.

    `out_dtype`: what the caller converts the result to; an implementation that can return it at once does.
    """
    bias_tensor = None if bias is None else torch.from_numpy(bias).to(policy.device, policy.dtype)
    packed = _packed_linear(parts, policy, bias_tensor, out_dtype) if policy.packed_rows else None
    if packed is not None and not policy.dense:
        return packed
    dense = _dense_linear(parts, policy, bias_tensor)
    return dense if packed is None else SplitLinear(packed, dense, policy.packed_rows)


def decode(parts: Sequence[WeightMatrix], dtype: torch.dtype) -> torch.Tensor:
    """The stacked rows of `parts`, decoded to `dtype` piece by piece. `[rows, columns]`."""
    out = torch.empty(sum(part.num_rows for part in parts), parts[0].num_columns, dtype=dtype)
    done = 0
    for part in parts:
        for start, piece in pieces(part):
            rows = piece.dequantize()
            out[done + start : done + start + len(rows)] = torch.from_numpy(rows)
        done += part.num_rows
    return out


def _dense_linear(parts: Sequence[WeightMatrix], policy: LinearPolicy, bias: torch.Tensor | None) -> Linear:
    dtype = policy.dense_dtype or policy.dtype
    weight = decode(parts, dtype)
    bias = None if bias is None else bias.to(dtype)
    dense: Linear
    if policy.device.type == "cpu" and probe.prepacked_works(dtype):
        dense = PrepackedLinear(weight, bias)
    else:
        dense = DenseLinear(weight.to(policy.device), bias)
    return dense if dtype == policy.dtype else CastLinear(dense, dtype)


def packed_bytes(encodings: Sequence[str], rows: int, columns: int) -> int | None:
    """What packed weights of matrices in these encodings, stacked, occupy on this machine's CPU; None: not packed."""
    bits = affine_bits(encodings, columns)
    if bits is None:
        return None
    size = linear_native.packed_bytes(bits, rows, columns)
    if size is None and bits == 4 and rows % _INT4PACK_ROWS == 0 and probe.int4pack_works(torch.bfloat16):
        size = rows * columns // 2 + rows * (columns // GROUP_SIZE) * 2 * torch.bfloat16.itemsize
    order = columns * np.dtype(np.int32).itemsize if ORDERED in encodings else 0
    return None if size is None else size + order


def packing_copies() -> int:
    """While a matrix is packed, this many times what it will occupy is held besides."""
    # Its rows, put in order and unpacked; for torch's kernel also every value as an integer of 32 bits.
    return 3 if linear_native.packed_bytes(4, 1, GROUP_SIZE) is not None else 11


def _packed_linear(
    parts: Sequence[WeightMatrix], policy: LinearPolicy, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Linear | None:
    """The best packed implementation for these encodings on this machine, or None."""
    if not same_order(parts):
        return None
    packed: Linear | None
    if policy.triton:
        packed = _packed_on_gpu(parts, policy, bias, out_dtype)
    else:
        packed = linear_native.build_packed(parts, bias, out_dtype) or _int4pack(parts, policy, bias)
    order = parts[0].column_order
    return packed if packed is None or order is None else ReorderedLinear(packed, order, policy.device)


def _packed_on_gpu(
    parts: Sequence[WeightMatrix], policy: LinearPolicy, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Linear | None:
    # A machine without a GPU needs no Triton.
    from engine.layers.linear_fp8 import build_fp8
    from engine.layers.linear_triton import build_packed

    device, dtype, deterministic = policy.device, policy.dtype, policy.deterministic
    return build_fp8(parts, device, dtype, bias, deterministic=deterministic) or build_packed(
        parts, device, dtype, bias, out_dtype=out_dtype, deterministic=deterministic
    )


def _int4pack(parts: Sequence[WeightMatrix], policy: LinearPolicy, bias: torch.Tensor | None) -> Linear | None:
    # torch's four-bit product is fast on bfloat16 activations only; on float32 it takes a hundred times as long.
    rows = sum(part.num_rows for part in parts)
    four_bits = affine_bits([part.encoding for part in parts], parts[0].num_columns) == 4
    if not four_bits or rows % _INT4PACK_ROWS or not probe.int4pack_works(torch.bfloat16):
        return None
    weights = [weight for part in parts if (weight := part.affine()) is not None]
    if len(weights) < len(parts):
        return None
    stacked = AffineBlocks(
        4,
        np.concatenate([weight.packed for weight in weights]),
        np.concatenate([weight.scale for weight in weights]),
        np.concatenate([weight.minimum for weight in weights]),
    )
    int4 = Int4PackLinear(stacked, torch.bfloat16, None if bias is None else bias.to(torch.bfloat16))
    return int4 if policy.dtype == torch.bfloat16 else CastLinear(int4, torch.bfloat16)
