"""Eight-bit floats (e4m3: four bits of exponent, three of fraction, no infinity) with scales, and four-bit ones.

numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.quant.blocks import BlockTensor
from engine.quant.ggml import requantize
from engine.quant.matrix import GROUP_SIZE, AffineBlocks, check_columns, pack_nibbles, pieces


def _e4m3_values() -> npt.NDArray[np.float32]:
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    normal = np.ldexp(1.0 + fraction / 8, exponent - 7)
    positive = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


E4M3 = _e4m3_values()


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """`codes`: uint8 `[rows, columns]`, e4m3; `scale`: float32 `[rows, column blocks]` of `block_columns` each."""

    codes: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    block_columns: int
    encoding: str = "F8_E4M3"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def num_rows(self) -> int:
        return len(self.codes)

    @property
    def num_columns(self) -> int:
        return int(self.codes.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.codes.nbytes + self.scale.nbytes)

    @property
    def column_order(self) -> None:
        return None

    def take_rows(self, index: npt.NDArray[np.int64]) -> Fp8Matrix:
        """The rows `index`, in that order (a copy)."""
        return replace(self, codes=self.codes[index], scale=self.scale[index])

    def rows(self, start: int, stop: int) -> Fp8Matrix:
        """The rows from `start` to before `stop` (no copy)."""
        return replace(self, codes=self.codes[start:stop], scale=self.scale[start:stop])

    def columns(self, start: int, stop: int) -> Fp8Matrix:
        """See `WeightMatrix`."""
        codes = np.ascontiguousarray(self.codes[:, start:stop])
        if self.scale.shape[1] == 1:
            return replace(self, codes=codes, block_columns=stop - start)
        check_columns(self.encoding, self.block_columns, start, stop, self.num_columns)
        blocks = slice(start // self.block_columns, -(-stop // self.block_columns))
        return replace(self, codes=codes, scale=np.ascontiguousarray(self.scale[:, blocks]))

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32 `[rows, columns]`: code times scale, rounded once."""
        out = np.empty(self.codes.shape, dtype=np.float32)
        for start, part in pieces(self):
            spread = part.scale.repeat(self.block_columns, axis=1)[:, : self.num_columns]
            np.multiply(E4M3[part.codes], spread, out=out[start : start + part.num_rows])
        return out

    def affine(self) -> AffineBlocks:
        """See `WeightMatrix`: rounded to eight bits per 32 columns, a fifth of the error that e4m3 itself has."""
        return requantize(self.dequantize().reshape(self.num_rows, -1, GROUP_SIZE))


def scaled_fp8(codes: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32], block: tuple[int, int]) -> Fp8Matrix:
    """`scale`: float32, one for each `block` of rows and columns, `[row blocks, column blocks]`.

    Raises ValueError where there are not as many scales as blocks.
    """
    rows, columns = codes.shape
    expected = -(-rows // block[0]), -(-columns // block[1])
    if scale.shape != expected:
        raise ValueError(f"scales of shape {list(scale.shape)} where blocks of {block} ask for {list(expected)}")
    return Fp8Matrix(codes, np.ascontiguousarray(scale.repeat(block[0], axis=0)[:rows], np.float32), block[1])


def from_mxfp4(blocks: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> BlockTensor:
    """MXFP4 as gpt-oss stores it: `blocks` `[..., columns / 32, 16]`, neighbouring columns in a byte, the first one
    low; `exponents` `[..., columns / 32]`, of two, plus 127. Repacked into GGUF's order of the same numbers."""
    rows = blocks.reshape(-1, *blocks.shape[-2:])
    values = np.stack([rows & 15, rows >> 4], axis=-1).reshape(*rows.shape[:-1], GROUP_SIZE)
    data = np.concatenate([exponents.reshape(*rows.shape[:-1], 1), pack_nibbles(values)], axis=-1)
    shape = (*blocks.shape[:-2], blocks.shape[-2] * GROUP_SIZE)
    return BlockTensor(data.reshape(len(rows), -1), GGMLQuantizationType.MXFP4, shape)
