"""The layout that the GPU's packed products read: groups of columns first, so that a tile of weights is one stretch.

`w = scale * u + minimum` with u unsigned of four or eight bits, per group of 32, 64 or 128 columns, from the affine
form of any encoding. Groups are as large as the scales allow: AWQ's usual 128 are found again, GGUF's are 32. Scales
and minima are float16 where that costs at most 2^-11 of each (what they were made of is float16 in most files), else
float32. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.quant.matrix import GROUP_SIZE, WeightMatrix, affine_bits, pieces, same_order, unpack_nibbles

_GROUP_SIZES = (128, 64)  # tried in this order; 32 always fits
_HALF_ERROR = 2.0**-11


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """`packed`: uint8 `[groups, rows, group_size * bits / 8]`. Four bits: in each 16 bytes, byte i holds column i of
    32 low and column i + 16 high. Eight bits: byte i is column i. `scale`, `minimum`: float16 or float32
    `[groups, rows]`."""

    packed: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float16 | np.float32]
    minimum: npt.NDArray[np.float16 | np.float32]
    bits: int

    @property
    def group_size(self) -> int:
        return int(self.packed.shape[2]) * 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (outputs) and columns (inputs)."""
        return self.packed.shape[1], self.packed.shape[0] * self.group_size

    @property
    def num_bytes(self) -> int:
        return int(self.packed.nbytes + self.scale.nbytes + self.minimum.nbytes)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32 `[rows, columns]`: what the products multiply by."""
        groups, rows, width = self.packed.shape
        values = self.packed
        if self.bits == 4:
            values = unpack_nibbles(self.packed.reshape(groups, rows, width // 16, 16)).reshape(groups, rows, -1)
        decoded = values.astype(np.float32) * self.scale[..., None].astype(np.float32)
        decoded += self.minimum[..., None].astype(np.float32)
        return np.ascontiguousarray(decoded.swapaxes(0, 1)).reshape(self.shape)


def grouped_bytes(encodings: Sequence[str], rows: int, columns: int) -> int | None:
    """The most that `to_groups` makes of matrices in these encodings, stacked; None: nothing.

    Assumes the smallest groups with float16 scales: files with larger ones take less.
    """
    bits = affine_bits(encodings, columns)
    return None if bits is None else rows * columns // GROUP_SIZE * (GROUP_SIZE * bits // 8 + 4)


def to_groups(*parts: WeightMatrix) -> GroupedWeight | None:
    """The rows of all `parts` in their common column order; four-bit parts become eight-bit ones beside others.

    None: an encoding without affine form, or different orders.
    """
    bits = affine_bits([part.encoding for part in parts], parts[0].num_columns)
    if bits is None or not same_order(parts):
        return None
    rows, blocks = sum(part.num_rows for part in parts), parts[0].num_columns // GROUP_SIZE
    packed = np.empty((rows, blocks, GROUP_SIZE * bits // 8), dtype=np.uint8)
    factors = np.empty((2, rows, blocks), dtype=np.float32)  # scales, then minima
    done = 0
    for part in parts:
        for start, piece in pieces(part):
            found = piece.affine()
            if found is None:
                return None
            at = slice(done + start, done + start + len(found.packed))
            packed[at] = found.packed if found.bits == bits else unpack_nibbles(found.packed)
            factors[0, at], factors[1, at] = found.scale, found.minimum
        done += part.num_rows
    together = _blocks_together(factors)
    groups = blocks // together
    by_group = packed.reshape(rows, groups, -1).swapaxes(0, 1)
    scale, minimum = _narrow(factors[:, :, ::together].swapaxes(1, 2))
    return GroupedWeight(np.ascontiguousarray(by_group), scale, minimum, bits)


def _blocks_together(factors: npt.NDArray[np.float32]) -> int:
    """How many blocks of 32 columns share their scale and minimum everywhere. factors: `[2, rows, blocks]`."""
    blocks = factors.shape[2]
    for size in _GROUP_SIZES:
        count = size // GROUP_SIZE
        if blocks % count == 0:
            groups = factors.reshape(*factors.shape[:2], -1, count)
            if (groups == groups[..., :1]).all():
                return count
    return 1


def _narrow(factors: npt.NDArray[np.float32]) -> npt.NDArray[np.float16 | np.float32]:
    """`factors` in float16 if that loses little of each, else as they are; contiguous."""
    with np.errstate(over="ignore"):
        half = factors.astype(np.float16)
    if np.isfinite(half).all() and (np.abs(half - factors) <= _HALF_ERROR * np.abs(factors)).all():
        return np.ascontiguousarray(half)
    return np.ascontiguousarray(factors)
