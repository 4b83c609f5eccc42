"""The layout that the compiled CPU products read: four rows side by side, one 64-byte vector serving four outputs.

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
# encoding -> (bits, bytes of scales before each block's values, offset that makes values unsigned or None: a minimum)
_ENCODINGS = {
    GGMLQuantizationType.Q4_0: (4, 2, 8),
    GGMLQuantizationType.Q4_1: (4, 4, None),
    GGMLQuantizationType.Q8_0: (8, 2, 128),
}


@dataclass(frozen=True, slots=True)
class QuadWeight:
    """`data`: uint8 `[rows / 4, blocks, 64 * bits / 4]`, see `engine/kernels/cpu_linear.c` for the order;
    `scales`: float16 `[rows / 4, blocks, 8]`, four scales, then four minima."""

    data: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0] * 4, self.data.shape[1] * GROUP_SIZE

    @property
    def num_bytes(self) -> int:
        return int(self.data.nbytes + self.scales.nbytes)


def to_quads(tensor: BlockTensor) -> QuadWeight | None:
    """The quad layout of a matrix, or None: another encoding, rows no multiple of four, minima beyond float16."""
    encoding = _ENCODINGS.get(tensor.type)
    if encoding is None or tensor.num_rows % 4:
        return None
    bits, header, offset = encoding
    value_bytes = GROUP_SIZE * bits // 8
    blocks = tensor.data.reshape(tensor.num_rows // 4, 4, -1, header + value_bytes)  # [quads, 4, blocks, bytes]
    factors = np.ascontiguousarray(blocks[..., :header]).view(np.float16)  # [quads, 4, blocks, 1 or 2]
    scale = factors[..., 0]
    with np.errstate(over="ignore"):
        minimum = factors[..., 1] if offset is None else np.float16(-offset) * scale
    if not np.isfinite(minimum).all() and np.isfinite(scale).all():
        return None
    scales = np.concatenate([scale, minimum], axis=1).swapaxes(1, 2)
    values = blocks[..., header:]
    if bits == 8:
        values = values ^ np.uint8(128)  # int8 q to q + 128
    # [quads, rows, blocks, halves, 16] -> [quads, blocks, halves, rows, 16]; four bits have one "half"
    values = values.reshape(*values.shape[:3], -1, 16).transpose(0, 2, 3, 1, 4)
    data = np.ascontiguousarray(values).reshape(values.shape[0], values.shape[1], -1)
    return QuadWeight(data, np.ascontiguousarray(scales), bits)
