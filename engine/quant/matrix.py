"""What every encoding of a weight matrix can do, and the affine form that packed products are made of.

A matrix stays in its file's encoding until it is known what is wanted: floats (`pieces`), or small integers with a
scale and a minimum per 32 columns (`affine`). Rows can be taken without decoding. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32
# Values decoded at a time: bounds the float32 scratch of a large embedding table.
PIECE_VALUES = 1 << 20

# The encoding of GPTQ weights whose columns have an order.
ORDERED = "GPTQ_ORDERED"
# encoding -> bits per value of its affine form. Names are the files' own. What is not here has no affine form.
AFFINE_BITS = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q4_K": 4,
    "AWQ": 4,
    "GPTQ": 4,
    ORDERED: 4,
    "Q5_0": 8,
    "Q5_1": 8,
    "Q5_K": 8,
    "Q6_K": 8,
    "Q8_0": 8,
    "MXFP4": 8,
    "F8_E4M3": 8,
}


@dataclass(frozen=True, slots=True)
class AffineBlocks:
    """Some rows as `w = scale * u + minimum`, u unsigned, one scale and minimum per 32 columns.

    `packed`: uint8 `[rows, columns / 32, 16 or 32]`. Four bits: byte i holds column i low and column i + 16 high.
    Eight bits: byte i is column i. `scale`, `minimum`: float32 `[rows, columns / 32]`.
    """

    bits: int
    packed: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    minimum: npt.NDArray[np.float32]

    def values(self) -> npt.NDArray[np.uint8]:
        """u, unpacked: uint8 `[rows, columns / 32, 32]`."""
        return self.packed if self.bits == 8 else unpack_nibbles(self.packed)


class WeightMatrix(Protocol):
    """A matrix `[..., columns]` in some encoding; leading dimensions are rows, one after the other."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def encoding(self) -> str:
        """The file's name of the encoding; decides with `AFFINE_BITS` whether there is an affine form."""
        ...

    @property
    def num_rows(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """As encoded."""
        ...

    @property
    def column_order(self) -> npt.NDArray[np.int32] | None:
        """Column i of the affine form is column `column_order[i]` of the matrix; None: the same."""
        ...

    def take_rows(self, index: npt.NDArray[np.int64]) -> Self:
        """The rows `index`, in that order (a copy, `[len(index), columns]`)."""
        ...

    def rows(self, start: int, stop: int) -> Self:
        """The rows from `start` to before `stop` (no copy)."""
        ...

    def columns(self, start: int, stop: int) -> Self:
        """The columns from `start` to before `stop` of all rows (a copy of them).

        Raises ValueError where that would cut a block of columns with a common scale, or columns have an order.
        """
        ...

    def dequantize(self) -> npt.NDArray[np.float32]:
        """All values, of `shape`."""
        ...

    def affine(self) -> AffineBlocks | None:
        """All rows in affine form, columns in `column_order`, or None where the encoding has none."""
        ...


Matrix = TypeVar("Matrix", bound=WeightMatrix)


def check_columns(encoding: str, block: int, start: int, stop: int, num_columns: int) -> None:
    """Raises ValueError where the columns from `start` to before `stop` cut a block of so many."""
    if start % block or (stop % block and stop != num_columns):
        raise ValueError(
            f"columns {start} to {stop - 1} of {num_columns} cut a block of {block}, which has one scale in {encoding}"
        )


def pieces(matrix: Matrix) -> Iterator[tuple[int, Matrix]]:
    """The rows of `matrix` in order, some `PIECE_VALUES` values at a time, each with the number of its first row."""
    step = max(1, PIECE_VALUES // matrix.num_columns // 16) * 16
    for start in range(0, matrix.num_rows, step):
        yield start, matrix.rows(start, min(start + step, matrix.num_rows))


def affine_bits(encodings: Sequence[str], columns: int) -> int | None:
    """Bits per value in which matrices of these encodings, stacked, can be packed; None: not at all."""
    if columns % GROUP_SIZE:
        return None
    bits = [AFFINE_BITS.get(encoding) for encoding in encodings]
    known = [count for count in bits if count is not None]
    return max(known) if len(known) == len(bits) else None


def same_order(matrices: Sequence[WeightMatrix]) -> bool:
    """Whether the columns of all have one order, so that one product can serve them."""
    orders = [matrix.column_order for matrix in matrices]
    known = [order for order in orders if order is not None]
    return not known or (len(known) == len(orders) and all(np.array_equal(known[0], order) for order in known))


def unpack_nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """`[..., n]` bytes to `[..., 2 n]` values: the low halves, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def pack_nibbles(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The inverse of `unpack_nibbles`: `[..., 2 n]` values below 16 to `[..., n]` bytes."""
    half = values.shape[-1] // 2
    return values[..., :half] | values[..., half:] << np.uint8(4)
