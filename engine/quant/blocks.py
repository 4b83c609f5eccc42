"""A tensor in GGUF's block encodings, plain floats among them: rows can be taken and decoded, and only those are.

Blocks run along the last dimension, so any permutation of rows leaves the encoding valid: that is how the Q/K
permutation is undone without requantising. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.quant import ggml
from engine.quant.matrix import AffineBlocks, check_columns, pieces


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """`data`: uint8 `[rows, row_bytes]` in the encoding `type`; `shape`: the decoded shape."""

    data: npt.NDArray[np.uint8]
    type: GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def encoding(self) -> str:
        return str(self.type.name)

    @property
    def num_rows(self) -> int:
        return len(self.data)

    @property
    def num_columns(self) -> int:
        return self.shape[-1]

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes)

    @property
    def column_order(self) -> None:
        return None

    def take_rows(self, index: npt.NDArray[np.int64]) -> BlockTensor:
        """The rows `index`, in that order (a copy)."""
        return BlockTensor(self.data[index], self.type, (len(index), self.num_columns))

    def rows(self, start: int, stop: int) -> BlockTensor:
        """The rows from `start` to before `stop` (no copy)."""
        data = self.data[start:stop]
        return BlockTensor(data, self.type, (len(data), self.num_columns))

    def columns(self, start: int, stop: int) -> BlockTensor:
        """See `WeightMatrix`."""
        block, size = GGML_QUANT_SIZES[self.type]
        check_columns(self.encoding, block, start, stop, self.num_columns)
        data = np.ascontiguousarray(self.data[:, start // block * size : -(-stop // block) * size])
        return BlockTensor(data, self.type, (self.num_rows, stop - start))

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Decode to float32 of `shape`, as `gguf.quants.dequantize` does."""
        out = np.empty((self.num_rows, self.num_columns), dtype=np.float32)
        for start, part in pieces(self):
            out[start : start + part.num_rows] = _decode(part.data, self.type)
        return out.reshape(self.shape)

    def affine(self) -> AffineBlocks | None:
        """See `WeightMatrix`. Exact but for Q6_K, whose blocks of 16 are rounded to eight bits per 32 columns."""
        return ggml.affine(self.data, self.type)


def dense(values: npt.NDArray[np.float32]) -> BlockTensor:
    """float32 values `[..., columns]` as a tensor."""
    data = np.ascontiguousarray(values, dtype=np.float32)
    rows = prod(data.shape[:-1])
    return BlockTensor(data.reshape(rows, -1).view(np.uint8), GGMLQuantizationType.F32, data.shape)


def _decode(data: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    if kind == GGMLQuantizationType.F32:
        return data.view(np.float32)
    if kind == GGMLQuantizationType.F16:
        return data.view(np.float16).astype(np.float32)
    if kind == GGMLQuantizationType.BF16:
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    known = ggml.decode(data, kind)
    if known is not None:
        return known
    decoded: npt.NDArray[np.float32] = dequantize(data, kind)
    return decoded
