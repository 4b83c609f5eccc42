"""Matrix products of eight-bit floats on a GPU: weights as an FP8 checkpoint holds them, rows quantised as they come.

Three ways, in order of preference: `torch._scaled_mm` for one scale per output (or for the whole matrix, which is the
same scale for each); the Triton kernel of `kernels/fp8_gemm.py` for scales per 128 columns, and where `_scaled_mm` is
missing or wrong or a row must not depend on its mates; None of both before compute capability 8.9, where
`linear_triton.py` serves the weights in eight-bit integers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels import product_table
from engine.kernels.fp8_gemm import BLOCK_COLUMNS, fp8_gemm_launches
from engine.kernels.fp8_rows import Fp8Rows, fp8_rows_launch
from engine.kernels.heuristics import INTERPRETER
from engine.layers.linear_triton import Chip
from engine.layers.normed import NormedLinear
from engine.quant.fp8 import Fp8Matrix
from engine.quant.matrix import WeightMatrix

logger = logging.getLogger(__name__)

_PROBE_TOLERANCE = 1e-2  # of the largest result: the rounding of a bfloat16 one
_SCALED_MM_MULTIPLE = 16  # `_scaled_mm` takes matrices of multiples of so many rows and columns


class Fp8Linear(NormedLinear):
    """`Linear` on float8 weights. x: float16, bfloat16 or float32; returns x's dtype.

    codes: float8_e4m3fn `[out_features, in_features]`; scale: float32 `[blocks, out_features]`, one block or one for
    each 128 columns. `scaled_mm`: multiply by `torch._scaled_mm`, for one block.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scaled_mm: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.out_features, self.in_features = codes.shape
        self.num_bytes = codes.nbytes + scale.nbytes
        self._codes, self._scale, self._bias = codes, scale, bias
        self._scaled_mm, self._deterministic = scaled_mm, deterministic
        self._chip = Chip.of(codes.device)
        tiles = product_table.fp8_tiles(self._chip.arch)
        self._tiles = tiles[:1] if deterministic else tiles

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self._empty_rows(x)
        self._quantise(x, rows)
        return self._multiply(rows, x.dtype)

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        rows = self._empty_rows(x)
        interpreted = self._chip.arch == INTERPRETER
        fp8_rows_launch(x, rows, weight=weight, eps=eps, residual=residual, interpreted=interpreted).run()
        return self._multiply(rows, x.dtype)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile whatever steps of any size will launch, for activations of `dtype`."""
        device = self._codes.device
        x = torch.zeros(1, self.in_features, dtype=dtype, device=device)
        self.after_norm(x, x.float(), torch.ones(self.in_features, device=device), 1e-5)
        self.after_norm(x, None, torch.ones(self.in_features, device=device), 1e-5)
        rows = self._empty_rows(x)
        self._quantise(x, rows)
        if self._scaled_mm:
            self._multiply(rows, dtype)
            return
        for tile in self._tiles:
            for splits in (1,) if self._deterministic else (1, 2):
                self._by_kernel(rows, dtype, tile, splits)

    def _empty_rows(self, x: torch.Tensor) -> Fp8Rows:
        return Fp8Rows.empty(x.shape[0], self.in_features, self._scale.shape[0], x.device)

    def _quantise(self, x: torch.Tensor, rows: Fp8Rows) -> None:
        fp8_rows_launch(x, rows, interpreted=self._chip.arch == INTERPRETER).run()

    def _multiply(self, rows: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        count = rows.codes.shape[0]
        if self._scaled_mm and count:
            y = scaled_product(rows, self._codes, self._scale, dtype)
            return y if self._bias is None else y.add_(self._bias)
        tile = product_table.choose_tile(self._tiles, count)
        splits = 1
        if not self._deterministic:
            blocks = -(-self.in_features // BLOCK_COLUMNS)
            splits = product_table.choose_splits(
                tile, count, self.out_features, blocks, BLOCK_COLUMNS, self._chip.num_sms
            )
        return self._by_kernel(rows, dtype, tile, splits)

    def _by_kernel(
        self, rows: Fp8Rows, dtype: torch.dtype, tile: product_table.ProductTile, splits: int
    ) -> torch.Tensor:
        out = torch.empty((rows.codes.shape[0], self.out_features), dtype=dtype, device=rows.codes.device)
        partial_sums = splits * out.numel() if splits > 1 else 0
        partial = torch.empty(partial_sums, dtype=torch.float32, device=out.device)
        for launch in fp8_gemm_launches(
            rows, self._codes, self._scale, out, partial, tile=tile, splits=splits, bias=self._bias
        ):
            launch.run()
        return out


def scaled_product(rows: Fp8Rows, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`(rows.codes rows.scale) (codes scale)^T` by `torch._scaled_mm`, one scale per row and per output.

    Raises RuntimeError (torch's own) where this build or GPU has no such product.
    """
    product: torch.Tensor = torch._scaled_mm(
        rows.codes, codes.T, scale_a=rows.scale, scale_b=scale.view(1, -1), out_dtype=dtype
    )
    return product


@functools.cache
def scaled_mm_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `torch._scaled_mm` with a scale per row gives the decoded product here, for few rows and for many.

    257 rows: a release of torch read beyond rows that are no multiple of 256.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(48, 64, generator=generator).to(torch.float8_e4m3fn).to(device)
    scale = (torch.rand(1, 48, generator=generator) + 0.5).to(device)
    for count in (1, 257):
        x = torch.randn(count, 64, generator=generator).to(torch.float8_e4m3fn).to(device)
        rows = Fp8Rows(x, (torch.rand(count, 1, generator=generator) + 0.5).to(device))
        want = (rows.codes.float() * rows.scale) @ (codes.float() * scale.T).T
        try:
            got = scaled_product(rows, codes, scale, dtype)
        except RuntimeError as error:
            logger.warning("torch._scaled_mm cannot multiply eight-bit floats here, a kernel will: %s", error)
            return False
        if not float((got.float() - want).abs().max() / want.abs().max()) < _PROBE_TOLERANCE:
            logger.warning("torch._scaled_mm is wrong here for %d rows: a kernel multiplies eight-bit floats", count)
            return False
    return True


def build_fp8(
    parts: Sequence[WeightMatrix],
    device: torch.device,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> Fp8Linear | None:
    """The product with the rows of `parts`, compiled for activations of `dtype`.

    None: weights that are not all eight-bit floats, scales in blocks of other widths, or a GPU without such products.
    """
    chip = Chip.of(device)
    matrices = [part for part in parts if isinstance(part, Fp8Matrix)]
    if len(matrices) < len(parts) or (chip.arch != INTERPRETER and chip.arch < product_table.FP8_ARCH):
        return None
    columns = matrices[0].num_columns
    by_row = all((matrix.scale == matrix.scale[:, :1]).all() for matrix in matrices)
    if not by_row and any(matrix.block_columns != BLOCK_COLUMNS or columns % BLOCK_COLUMNS for matrix in matrices):
        return None
    codes = torch.from_numpy(np.concatenate([matrix.codes for matrix in matrices])).view(torch.float8_e4m3fn)
    scale = np.concatenate([matrix.scale[:, :1] if by_row else matrix.scale for matrix in matrices])
    aligned = len(codes) % _SCALED_MM_MULTIPLE == 0 and columns % _SCALED_MM_MULTIPLE == 0
    scaled_mm = by_row and aligned and not deterministic and scaled_mm_works(device, dtype)
    by_block = torch.from_numpy(np.ascontiguousarray(scale.T)).to(device)
    linear = Fp8Linear(codes.to(device), by_block, bias, scaled_mm=scaled_mm, deterministic=deterministic)
    if device.type == "cuda":
        linear.warm_up(dtype)
    return linear
