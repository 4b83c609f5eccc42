"""Matrix products with fixed weights behind one interface, `y = x W^T + b`, and the choice of implementation.

On a CPU with byte products the compiled kernel with packed weights (`linear_native.py`) is the fastest at every row
count. Elsewhere the best depends on the row count: with few rows the time goes into reading the weights, so packed ones
win; with more, oneDNN's prepacked dense ones. `build_linear` makes what the `LinearPolicy` asks for; `SplitLinear`
picks per call. Every private or compiled kernel is probed against plain torch first (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from engine.layers import linear_native, probe
from engine.models.tensors import FloatArray
from engine.quant.blocks import BlockTensor, stack_rows
from engine.quant.int4 import GROUP_SIZE, INT4_ENCODINGS, Int4Weight, to_int4

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
    packed weights serve every row count.
    """

    device: torch.device
    dtype: torch.dtype
    packed_rows: int
    dense: bool = True
    dense_dtype: torch.dtype | None = None


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
    """torch's four-bit CPU kernel. Exact repack of the canonical form: its `(q - 8) * s + z` has s = scale, z = minimum
    + 8 * scale. The scales are rounded to x's dtype."""

    def __init__(self, weight: Int4Weight, dtype: torch.dtype, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        values = torch.from_numpy(weight.values().astype(np.int32))
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        pairs = np.stack([weight.scale, weight.minimum + 8.0 * weight.scale], axis=-1)  # [rows, groups, 2]
        self._scales = torch.from_numpy(np.ascontiguousarray(pairs.swapaxes(0, 1))).to(dtype)
        self._bias = bias
        self.num_bytes = self._packed.nbytes + self._scales.nbytes
        self._linear: Callable[..., torch.Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._linear(x, self._packed, GROUP_SIZE, self._scales)
        return y if self._bias is None else y.add_(self._bias)


class SplitLinear:
    """`few` for up to `limit` rows, `many` above."""

    def __init__(self, few: Linear, many: Linear, limit: int) -> None:
        self.in_features, self.out_features = many.in_features, many.out_features
        self.num_bytes = few.num_bytes + many.num_bytes
        self.few, self.many, self.limit = few, many, limit

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x) if x.shape[0] <= self.limit else self.many(x)


def build_linear(
    parts: list[BlockTensor],
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


def decode(parts: list[BlockTensor], dtype: torch.dtype) -> torch.Tensor:
    """The stacked rows of `parts`, decoded to `dtype` piece by piece. `[rows, columns]`."""
    out = torch.empty(sum(part.num_rows for part in parts), parts[0].num_columns, dtype=dtype)
    done = 0
    for part in parts:
        for start, rows in part.pieces():
            # Rows that are float32 in the file are the file's own memory, which torch must not be given to write to.
            out[done + start : done + start + len(rows)] = torch.from_numpy(
                rows if rows.flags.writeable else rows.copy()
            )
        done += part.num_rows
    return out


def _dense_linear(parts: list[BlockTensor], policy: LinearPolicy, bias: torch.Tensor | None) -> Linear:
    dtype = policy.dense_dtype or policy.dtype
    weight = decode(parts, dtype)
    bias = None if bias is None else bias.to(dtype)
    dense: Linear
    if policy.device.type == "cpu" and probe.prepacked_works(dtype):
        dense = PrepackedLinear(weight, bias)
    else:
        dense = DenseLinear(weight.to(policy.device), bias)
    return dense if dtype == policy.dtype else CastLinear(dense, dtype)


def packed_bytes(kind: GGMLQuantizationType, rows: int, columns: int) -> int | None:
    """What packed weights of a matrix in this encoding occupy on this machine's CPU, or None: it has to be decoded."""
    size = linear_native.packed_bytes(kind, rows, columns)
    if size is not None:
        return size
    fits = kind in INT4_ENCODINGS and rows % _INT4PACK_ROWS == 0 and probe.int4pack_works(torch.bfloat16)
    return rows * columns // 2 + rows * (columns // GROUP_SIZE) * 2 * torch.bfloat16.itemsize if fits else None


def _packed_linear(
    parts: list[BlockTensor], policy: LinearPolicy, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Linear | None:
    """The best packed implementation for this encoding on this machine, or None."""
    stacked = stack_rows(parts) if policy.device.type == "cpu" else None
    if stacked is None:
        return None
    linear = linear_native.build_packed(stacked, bias, out_dtype)
    if linear is not None:
        return linear
    weight = to_int4(stacked)
    # torch's four-bit product is fast on bfloat16 activations only; on float32 it takes a hundred times as long.
    if weight is None or weight.shape[0] % _INT4PACK_ROWS or not probe.int4pack_works(torch.bfloat16):
        return None
    int4 = Int4PackLinear(weight, torch.bfloat16, None if bias is None else bias.to(torch.bfloat16))
    return int4 if policy.dtype == torch.bfloat16 else CastLinear(int4, torch.bfloat16)
