"""Matrix products with four- or eight-bit weights by the compiled kernel, weights as the file has them.

Exact weights (no rounding of scales to bfloat16, which torch's four-bit kernel does), activations quantised to 16 bits
per block of 32, float32 sums. See `engine/kernels/cpu_linear.c` for layout and arithmetic.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.layers import native, probe
from engine.quant.blocks import BlockTensor
from engine.quant.matrix import GROUP_SIZE, WeightMatrix
from engine.quant.tiles import TiledWeight, tiled_bytes, to_tiles

logger = logging.getLogger(__name__)


class NativePackedLinear:
    """`Linear` on tiled weights. x: bfloat16 or float32 `[tokens, in_features]`; returns x's dtype, or `out_dtype`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: TiledWeight,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.num_bytes
        self._call = library.tl_packed_linear
        self._row_blocks_bytes = library.tl_x_block_bytes() * (self.in_features // GROUP_SIZE)
        self._weight = weight  # whose memory the pointers below point to
        self._bias = None if bias is None else bias.float()
        self.bits = weight.bits
        self._out_dtype = out_dtype
        # Of weights, scales and bias.
        self.pointers = (
            weight.data.ctypes.data,
            weight.scales.ctypes.data,
            None if self._bias is None else self._bias.data_ptr(),
        )
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=self._out_dtype or x.dtype)
        needed = rows * self._row_blocks_bytes
        if self._scratch.nbytes < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        weights, scales, bias = self.pointers
        self._call(
            weights,
            scales,
            x.data_ptr(),
            bias,
            self._scratch.data_ptr(),
            out.data_ptr(),
            rows,
            self.out_features,
            self.in_features,
            self.bits,
            native.ELEMENT_TYPES[x.dtype],
            native.ELEMENT_TYPES[out.dtype],
        )
        return out


def build_packed(
    parts: Sequence[WeightMatrix], bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> NativePackedLinear | None:
    """The compiled product with the rows of `parts`, or None: no compiled kernels here, or encodings without tiles."""
    library = native.library()
    if library is None or not _agrees(library):
        return None
    weight = to_tiles(*parts)
    return None if weight is None else NativePackedLinear(library, weight, bias, out_dtype=out_dtype)


def packed_bytes(bits: int, rows: int, columns: int) -> int | None:
    """What `build_packed` would hold for a matrix of so many bits per value, or None: no compiled kernels here."""
    library = native.library()
    return None if library is None or not _agrees(library) else tiled_bytes(bits, rows, columns)


def prompt_gain() -> float:
    """How many times faster than torch's dense float32 product the compiled one is at a prompt's worth of rows, here
    and now. Takes a few hundredths of a second, once; 0 where there is no compiled product."""
    library = native.library()
    return 0.0 if library is None or not _agrees(library) else _prompt_gain(library)


@functools.cache
def _prompt_gain(library: ctypes.CDLL) -> float:
    kind = GGMLQuantizationType.Q4_1
    values = np.random.default_rng(0).standard_normal((1024, 512), dtype=np.float32)
    weight = to_tiles(BlockTensor(quantize(values, kind), kind, (1024, 512)))
    if weight is None:
        return 0.0
    packed = NativePackedLinear(library, weight)
    x, dense = torch.ones(128, 512), torch.from_numpy(values)
    dense_seconds, packed_seconds = probe.best_seconds(
        [lambda: torch.nn.functional.linear(x, dense), lambda: packed(x)]
    )
    return dense_seconds / packed_seconds


@functools.cache
def _agrees(library: ctypes.CDLL) -> bool:
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.standard_normal((11, 96), dtype=np.float32))
    for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
        data = quantize(generator.standard_normal((24, 96), dtype=np.float32), kind)
        tensor = BlockTensor(data, kind, (24, 96))
        weight = to_tiles(tensor)
        if weight is None:
            return False
        want = x @ torch.from_numpy(tensor.dequantize()).T
        got = NativePackedLinear(library, weight)(x)
        error = float((got - want).abs().max() / want.abs().max())
        if not error < 1e-4:
            logger.warning("the compiled %s product is wrong here (relative error %.1e): not used", kind.name, error)
            return False
    return True
