"""The layout that the compiled CPU products read: tiles of 16 rows, so that the lanes of a vector are outputs.

`w = scale * u + minimum` with u unsigned, per 32 columns, from Q4_0 and Q4_1 (four bits) and Q8_0 (eight bits,
u = q + 128), without rounding: minima are the file's, or -8 or -128 times the scale, exact in float16. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.quant.blocks import BlockTensor

GROUP_SIZE = 32
TILE_ROWS = 16
# encoding -> (bits, bytes of scales before each block's values, offset that makes values unsigned or None: a minimum)
_ENCODINGS = {
    GGMLQuantizationType.Q4_0: (4, 2, 8),
    GGMLQuantizationType.Q4_1: (4, 4, None),
    GGMLQuantizationType.Q8_0: (8, 2, 128),
}


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """`data`: uint8 `[tiles, blocks, vectors, 16 rows, 4]`, four vectors of four-bit values or eight of eight-bit ones,
    see `engine/kernels/cpu_linear.c` for the order; `scales`: float16 `[tiles, blocks, 2, 16]`, scales, then minima;
    `rows`: of the matrix. The last tile is filled up with zeros."""

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


def tiled_bytes(kind: GGMLQuantizationType, rows: int, columns: int) -> int | None:
    """What `to_tiles` makes of such a matrix occupies, or None: an encoding that has no tiles."""
    encoding = _ENCODINGS.get(kind)
    if encoding is None:
        return None
    return -(-rows // TILE_ROWS) * TILE_ROWS * columns // GROUP_SIZE * (GROUP_SIZE * encoding[0] // 8 + 4)


def to_tiles(tensor: BlockTensor) -> TiledWeight | None:
    """The tiled layout of a matrix, or None: another encoding, or minima beyond float16."""
    encoding = _ENCODINGS.get(tensor.type)
    if encoding is None:
        return None
    bits, header, offset = encoding
    tiles = -(-tensor.num_rows // TILE_ROWS)
    data = tensor.data
    if missing := tiles * TILE_ROWS - tensor.num_rows:  # blocks of zero bytes decode to zeros
        data = np.concatenate([data, np.zeros((missing, data.shape[1]), dtype=np.uint8)])
    blocks = data.reshape(tiles, TILE_ROWS, -1, header + GROUP_SIZE * bits // 8)  # [tiles, 16, blocks, bytes]
    factors = np.ascontiguousarray(blocks[..., :header]).view(np.float16)  # [tiles, 16, blocks, 1 or 2]
    scale = factors[..., 0]
    with np.errstate(over="ignore"):
        minimum = factors[..., 1] if offset is None else np.float16(-offset) * scale
    if not np.isfinite(minimum).all() and np.isfinite(scale).all():
        return None
    scales = np.stack([scale, minimum], axis=1).transpose(0, 3, 1, 2)  # [tiles, blocks, 2, 16]
    # A block's bytes are in the order of its columns (four bits: 0 to 15 low, 16 to 31 high): four to each vector.
    values = blocks[..., header:].reshape(*blocks.shape[:3], -1, 4).transpose(0, 2, 3, 1, 4)
    if bits == 8:
        values = values ^ np.uint8(128)  # int8 q to q + 128
    return TiledWeight(np.ascontiguousarray(values), np.ascontiguousarray(scales), bits, tensor.num_rows)
