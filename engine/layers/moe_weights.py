"""The experts' weights as the grouped products on a GPU take them: stacked, gate and up rows alternating.

Where the policy wants packed weights, four-bit floats stay as they are and other four-bit groups get their scales and
minima in float16; they serve every number of rows. What cannot be packed so is decoded to the activations' dtype.
Weights go to the device expert by expert: no second copy of a layer is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.moe_gemm import ExpertWeights
from engine.layers.linear import LinearPolicy, decode
from engine.models.tensors import FloatArray, NetworkTensors
from engine.quant.blocks import BlockTensor
from engine.quant.matrix import WeightMatrix, affine_bits


def stackable(experts: Sequence[NetworkTensors], policy: LinearPolicy) -> bool:
    """Whether `stack_experts` keeps to what the policy promises of memory: packed weights that it would have to decode
    are better left packed, one product per expert."""
    if not policy.packed_rows or _common_encoding(experts) != "dense":
        return True
    matrices = [matrix for expert in experts for matrix in (*expert.gate_up, expert.down)]
    return all(affine_bits([matrix.encoding], matrix.num_columns) is None for matrix in matrices)


def stack_experts(experts: Sequence[NetworkTensors], policy: LinearPolicy) -> tuple[ExpertWeights, ExpertWeights]:
    """(gate_up, down) of all experts, on the policy's device."""
    encoding = _common_encoding(experts) if policy.packed_rows else "dense"
    gate_up, down = _Stack(encoding, len(experts), policy), _Stack(encoding, len(experts), policy)
    for number, expert in enumerate(experts):
        gate_up.put(number, expert.gate_up, expert.gate_up_bias, paired=True)
        down.put(number, [expert.down], expert.down_bias, paired=False)
    return gate_up.weights(), down.weights()


class _Stack:
    """One matrix per expert, filled in one after the other. The first one says how large they are."""

    def __init__(self, encoding: str, count: int, policy: LinearPolicy) -> None:
        self._encoding, self._count, self._policy = encoding, count, policy
        self._parts: list[torch.Tensor] = []
        self._bias: torch.Tensor | None = None

    def put(self, number: int, matrices: Sequence[WeightMatrix], bias: FloatArray | None, *, paired: bool) -> None:
        """`paired`: the first half of the rows, gate, and the second, up, are to take turns."""
        if self._encoding == "dense":
            arrays = [decode(matrices, self._policy.dtype)]
        else:
            arrays = [torch.from_numpy(array) for array in _packed(matrices, self._encoding)]
        if paired:
            arrays = [_alternating(array) for array in arrays]
        if self._encoding != "dense":  # groups first: the same group of all rows lies side by side
            arrays = [array.transpose(0, 1) for array in arrays]
        if not self._parts:
            self._parts = [self._empty(array) for array in arrays]
        for part, array in zip(self._parts, arrays, strict=True):
            part[number].copy_(array)
        if bias is not None:
            values = torch.from_numpy(np.array(bias, dtype=np.float32))
            values = _alternating(values) if paired else values
            self._bias = self._empty(values) if self._bias is None else self._bias
            self._bias[number].copy_(values)

    def weights(self) -> ExpertWeights:
        data, scale, minimum = (*self._parts, None, None)[:3]
        assert data is not None  # a mixture has experts
        return ExpertWeights(self._encoding, data, scale, minimum, self._bias)

    def _empty(self, one: torch.Tensor) -> torch.Tensor:
        return torch.empty((self._count, *one.shape), dtype=one.dtype, device=self._policy.device)


def _alternating(rows: torch.Tensor) -> torch.Tensor:
    """Row 0 of the first half, row 0 of the second, row 1 of the first, ..."""
    return rows.view(2, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)


def _common_encoding(experts: Sequence[NetworkTensors]) -> str:
    """ "mxfp4" or "int4" if all matrices of all experts can be packed so, else "dense"."""
    matrices = [matrix for expert in experts for matrix in (*expert.gate_up, expert.down)]
    if all(isinstance(matrix, BlockTensor) and matrix.encoding == "MXFP4" for matrix in matrices):
        return "mxfp4"
    return "int4" if all(_fits_int4(matrix) for matrix in matrices) else "dense"


def _fits_int4(matrix: WeightMatrix) -> bool:
    return affine_bits([matrix.encoding], matrix.num_columns) == 4 and matrix.column_order is None


def _packed(matrices: Sequence[WeightMatrix], encoding: str) -> Iterator[npt.NDArray[np.generic]]:
    """Codes uint8 `[rows, groups, 16]`, scales and, of int4, minima `[rows, groups]`, of all rows."""
    if encoding == "mxfp4":
        blocks = [
            matrix.data.reshape(len(matrix.data), -1, 17) for matrix in matrices if isinstance(matrix, BlockTensor)
        ]
        rows = np.concatenate(blocks)
        yield rows[..., 1:]
        yield rows[..., 0]
        return
    parts = [part for matrix in matrices if (part := matrix.affine()) is not None]
    yield np.concatenate([part.packed for part in parts])
    yield _float16([part.scale for part in parts])
    yield _float16([part.minimum for part in parts])


def _float16(parts: Sequence[FloatArray]) -> npt.NDArray[np.float16]:
    """Files have them in float16, or products of such numbers with integers. What is too small for it, a weight of
    less than a ten-millionth, may be lost; what is too large is refused."""
    values = np.concatenate(parts)
    if not (np.abs(values) <= np.finfo(np.float16).max).all():
        raise ValueError("a scale of an expert's four-bit weights is beyond float16: serve the model in bfloat16")
    return values.astype(np.float16)
