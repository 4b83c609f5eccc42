"""The canonical four-bit form: `w = scale * q + minimum` with q in 0..15, one scale and minimum per 32 columns.

GGUF's Q4_0 (`(q - 8) * d`) and Q4_1 (`q * d + m`) are repacked to it exactly: their scales are float16, so float32
holds `d`, `m` and `-8 * d` without rounding. Kernels pack this form further to suit themselves. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.quant.blocks import BlockTensor

GROUP_SIZE = 32
_HEADER_BYTES = {GGMLQuantizationType.Q4_0: 2, GGMLQuantizationType.Q4_1: 4}
INT4_ENCODINGS = frozenset(_HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """`nibbles`: uint8 `[rows, columns / 32, 16]`, byte i holding column i low and column i + 16 high (GGUF's order);
    `scale`, `minimum`: float32 `[rows, columns / 32]`."""

    nibbles: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    minimum: npt.NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.shape[0], self.scale.shape[1] * GROUP_SIZE

    def values(self) -> npt.NDArray[np.uint8]:
        """q, unpacked: uint8 `[rows, columns]`."""
        both = np.stack([self.nibbles & 15, self.nibbles >> 4], axis=2)
        return both.reshape(self.shape)


def to_int4(tensor: BlockTensor) -> Int4Weight | None:
    """The canonical form of a Q4_0 or Q4_1 tensor, None for any other encoding."""
    header = _HEADER_BYTES.get(tensor.type)
    if header is None:
        return None
    blocks = tensor.data.reshape(tensor.num_rows, -1, header + GROUP_SIZE // 2)
    scales = np.ascontiguousarray(blocks[:, :, :header]).view(np.float16).astype(np.float32)
    scale = np.ascontiguousarray(scales[:, :, 0])
    minimum = np.ascontiguousarray(scales[:, :, 1]) if header == 4 else -8.0 * scale
    return Int4Weight(np.ascontiguousarray(blocks[:, :, header:]), scale, minimum)
