"""Four-bit weights in groups of columns: `w = scale * (q - zero)`, what AWQ, GPTQ and packed compressed-tensors hold.

One layout for all of them: rows are outputs, as everywhere here, nibbles in GGUF's order. The repacking loses nothing:
q and zero are small integers and scales stay as they are. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.quant.matrix import GROUP_SIZE, AffineBlocks, check_columns, pack_nibbles, pieces, unpack_nibbles


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """`packed`: uint8 `[rows, columns / 32, 16]`, see `AffineBlocks`; `scale`: float32 `[rows, groups]`; `zero`: uint8
    `[rows, groups]`; `order`: int32 `[columns]` or None, column i here is column `order[i]` of the matrix: groups are
    contiguous here."""

    packed: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    zero: npt.NDArray[np.uint8]
    encoding: str
    order: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_rows, self.num_columns

    @property
    def num_rows(self) -> int:
        return len(self.packed)

    @property
    def num_columns(self) -> int:
        return int(self.packed.shape[1]) * GROUP_SIZE

    @property
    def num_bytes(self) -> int:
        return int(self.packed.nbytes + self.scale.nbytes + self.zero.nbytes)

    @property
    def column_order(self) -> npt.NDArray[np.int32] | None:
        return self.order

    def take_rows(self, index: npt.NDArray[np.int64]) -> Int4Matrix:
        """The rows `index`, in that order (a copy)."""
        return replace(self, packed=self.packed[index], scale=self.scale[index], zero=self.zero[index])

    def rows(self, start: int, stop: int) -> Int4Matrix:
        """The rows from `start` to before `stop` (no copy)."""
        return replace(self, packed=self.packed[start:stop], scale=self.scale[start:stop], zero=self.zero[start:stop])

    def columns(self, start: int, stop: int) -> Int4Matrix:
        """See `WeightMatrix`."""
        if self.order is not None:
            raise ValueError(f"the columns of {self.encoding} weights have an order (act-order) and stay together")
        group = self.num_columns // self.scale.shape[1]
        check_columns(self.encoding, group, start, stop, self.num_columns)
        groups = slice(start // group, stop // group)
        return replace(
            self,
            packed=np.ascontiguousarray(self.packed[:, start // GROUP_SIZE : stop // GROUP_SIZE]),
            scale=np.ascontiguousarray(self.scale[:, groups]),
            zero=np.ascontiguousarray(self.zero[:, groups]),
        )

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32 `[rows, columns]`, exact: a float16 scale times a four-bit integer needs 15 bits."""
        out = np.empty((self.num_rows, self.num_columns), dtype=np.float32)
        for start, part in pieces(self):
            target = out[start : start + part.num_rows]
            values = part._decode()
            if self.order is None:
                target[:] = values
            else:
                target[:, self.order] = values
        return out

    def affine(self) -> AffineBlocks:
        """See `WeightMatrix`; exact."""
        repeats = self.packed.shape[1] // self.scale.shape[1]
        minimum = -self.scale * self.zero.astype(np.float32)
        return AffineBlocks(4, self.packed, self.scale.repeat(repeats, axis=1), minimum.repeat(repeats, axis=1))

    def _decode(self) -> npt.NDArray[np.float32]:
        values = unpack_nibbles(self.packed).reshape(self.num_rows, self.scale.shape[1], -1).astype(np.float32)
        values -= self.zero[..., None]
        values *= self.scale[..., None]
        return values.reshape(self.num_rows, -1)


def pack_int4(
    values: npt.NDArray[np.uint8],
    scale: npt.NDArray[np.float32],
    zero: npt.NDArray[np.uint8],
    encoding: str,
    order: npt.NDArray[np.int32] | None = None,
) -> Int4Matrix:
    """`values`: uint8 `[rows, columns]`, below 16, already in `order`. Raises ValueError for groups that are not whole
    multiples of 32 columns."""
    rows, columns = values.shape
    if columns % GROUP_SIZE or columns // GROUP_SIZE % scale.shape[1]:
        raise ValueError(f"{columns} columns in {scale.shape[1]} groups: groups must be multiples of {GROUP_SIZE}")
    packed = pack_nibbles(values.reshape(rows, -1, GROUP_SIZE))
    return Int4Matrix(
        packed, np.ascontiguousarray(scale, dtype=np.float32), np.ascontiguousarray(zero), encoding, order
    )
