"""The layout that the compiled CPU products read: tiles of 16 rows, so that the lanes of a vector are outputs.

`w = scale * u + minimum` with u unsigned, per 32 columns, from the affine form of any encoding. Scales and minima are
rounded to float16. That loses nothing of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4 and symmetric four-bit weights, whose
numbers are float16 anyway; products of two scales (Q4_K, Q5_K) and of a scale and a zero (AWQ) lose up to 2^-11 of
themselves. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from engine.quant.matrix import GROUP_SIZE, AffineBlocks, WeightMatrix, affine_bits, pieces, same_order, unpack_nibbles

TILE_ROWS = 16
_CACHE_LINE = 64


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """`data`: uint8 `[tiles, blocks, vectors, 16 rows, 4]`, four vectors of four-bit values or eight of eight-bit ones,
    see `engine/kernels/cpu_linear.c` for the order; `scales`: float16 `[tiles, blocks, 2, 16]`, scales, then minima;
    `rows`: of the matrix. The last tile is filled up with zeros. Both begin on a cache line, so that none of the
    kernel's vectors lies across two."""

    data: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    bits: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.data.shape[1] * GROUP_SIZE

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes + self.scales.nbytes)


def tiled_bytes(bits: int, rows: int, columns: int) -> int:
    """What `to_tiles` makes of such a matrix occupies."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * columns // GROUP_SIZE * (GROUP_SIZE * bits // 8 + 4)


def to_tiles(*parts: WeightMatrix) -> TiledWeight | None:
    """The rows of all `parts` in the tiled layout, in their common column order; four-bit parts become eight-bit ones
    beside others. None: an encoding without affine form, different orders, or scales beyond float16."""
    bits = affine_bits([part.encoding for part in parts], parts[0].num_columns)
    if bits is None or not same_order(parts):
        return None
    rows, blocks = sum(part.num_rows for part in parts), parts[0].num_columns // GROUP_SIZE
    tiles = -(-rows // TILE_ROWS)
    data = _aligned((tiles, blocks, bits, TILE_ROWS, 4))
    scales = _aligned((tiles, blocks, 2, TILE_ROWS, 2)).view(np.float16)[..., 0]
    data[-1], scales[-1] = 0, 0
    done = 0
    for part in parts:
        for start, piece in pieces(part):
            found = piece.affine()
            if found is None or not _write(found, bits, done + start, data, scales):
                return None
        done += part.num_rows
    return TiledWeight(data, scales, bits, rows)


def _write(
    piece: AffineBlocks, bits: int, start: int, data: npt.NDArray[np.uint8], scales: npt.NDArray[np.float16]
) -> bool:
    """Put rows where they belong, from row `start` on. False: a number is beyond float16."""
    packed = piece.packed if piece.bits == bits else unpack_nibbles(piece.packed)
    rows, blocks = packed.shape[:2]
    with np.errstate(over="ignore"):
        factors = np.stack([piece.scale, piece.minimum], axis=-1).astype(np.float16)  # [rows, blocks, 2]
    if not np.isfinite(factors).all():
        return False
    # A block's bytes are in the order of its columns (four bits: 0 to 15 low, 16 to 31 high): four to each vector.
    vectors = np.ascontiguousarray(packed).view(np.uint32)  # [rows, blocks, vectors]
    target = data.view(np.uint32)[..., 0]  # [tiles, blocks, vectors, 16]
    whole = rows - rows % TILE_ROWS if start % TILE_ROWS == 0 else 0
    if whole:
        tiles = slice(start // TILE_ROWS, (start + whole) // TILE_ROWS)
        target[tiles] = vectors[:whole].reshape(-1, TILE_ROWS, blocks, bits).transpose(0, 2, 3, 1)
        scales[tiles] = factors[:whole].reshape(-1, TILE_ROWS, blocks, 2).transpose(0, 2, 3, 1)
    if whole < rows:
        at = np.arange(start + whole, start + rows)
        target[at // TILE_ROWS, :, :, at % TILE_ROWS] = vectors[whole:]
        scales[at // TILE_ROWS, :, :, at % TILE_ROWS] = factors[whole:]
    return True


def _aligned(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """An array that begins on a cache line; its contents are whatever they are."""
    size = prod(shape)
    raw = np.empty(size + _CACHE_LINE, dtype=np.uint8)
    skip = -raw.ctypes.data % _CACHE_LINE
    return raw[skip : skip + size].reshape(shape)
