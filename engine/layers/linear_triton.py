"""Matrix products with weights of four or eight bits on a GPU: packed for few rows, decoded for cuBLAS for many.

The weights exist once, packed. Up to `product_table.CUBLAS_ABOVE_ROWS` rows go through `kernels/packed_gemm.py`; for
more, slices of the matrix are decoded one after the other and multiplied by cuBLAS.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels import product_table
from engine.kernels.heuristics import INTERPRETER
from engine.kernels.packed_decode import decode_weight_launch
from engine.kernels.packed_gemm import PackedWeight, packed_gemm_launches
from engine.memory import DECODED_BYTES
from engine.quant.grouped import GroupedWeight, to_groups
from engine.quant.matrix import WeightMatrix

logger = logging.getLogger(__name__)

# Of the largest result, when the kernels are tried out: the rounding of bfloat16 weights and results.
_PROBE_TOLERANCE = 2e-2
# The interpreter has no multiprocessors: as many as let small tests split their sums.
_INTERPRETER_SMS = 4


@dataclass(frozen=True, slots=True)
class Chip:
    """What the tables ask about a device."""

    arch: int
    num_sms: int

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        """The GPU, or the interpreter on a CPU. Raises ValueError where neither is there."""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            return cls(10 * properties.major + properties.minor, properties.multi_processor_count)
        from triton import knobs

        if not knobs.runtime.interpret:
            raise ValueError("Triton products on a CPU are for tests only: set TRITON_INTERPRET=1")
        return cls(INTERPRETER, _INTERPRETER_SMS)

    def upcasts(self, dtype: torch.dtype) -> bool:
        """Whether products of this dtype are to be computed in float32: the interpreter's of bfloat16 are wrong."""
        return self.arch == INTERPRETER and dtype == torch.bfloat16


class TritonPackedLinear:
    """`Linear` on packed weights, for x in float16, bfloat16 or float32. Returns x's dtype, or `out_dtype`.

    With `deterministic`, a row's result does not depend on the rows beside it: one tile for every row count, and no
    split of the sums.
    """

    def __init__(
        self,
        weight: GroupedWeight,
        device: torch.device,
        bias: torch.Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.num_bytes
        self._weight = PackedWeight(
            torch.from_numpy(weight.packed).to(device),
            torch.from_numpy(weight.scale).to(device),
            torch.from_numpy(weight.minimum).to(device),
            weight.bits,
        )
        self._bias = bias
        self._out_dtype = out_dtype
        self._deterministic = deterministic
        self._chip = Chip.of(device)
        tiles = product_table.packed_tiles(self._chip.arch, weight.bits)
        self._tiles = tiles[-1:] if deterministic else tiles

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows > product_table.CUBLAS_ABOVE_ROWS and not self._deterministic:
            return self.decoded(x)
        tile = product_table.choose_tile(self._tiles, rows)
        return self._packed(x, tile, self._splits(tile, rows))

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile whatever steps of any size will launch, for activations of `dtype`."""
        x = torch.zeros(1, self.in_features, dtype=dtype, device=self._weight.packed.device)
        for tile in self._tiles:
            for splits in (1,) if self._deterministic else (1, 2):
                self._packed(x, tile, splits)
        if not self._deterministic:
            self.decoded(x)

    def _splits(self, tile: product_table.ProductTile, rows: int) -> int:
        if self._deterministic:
            return 1
        weight = self._weight
        return product_table.choose_splits(
            tile, rows, self.out_features, weight.num_groups, weight.group_size, self._chip.num_sms
        )

    def _packed(self, x: torch.Tensor, tile: product_table.ProductTile, splits: int) -> torch.Tensor:
        rows = x.shape[0]
        out = torch.empty((rows, self.out_features), dtype=self._out_dtype or x.dtype, device=x.device)
        partial_sums = splits * out.numel() if splits > 1 else 0
        for launch in packed_gemm_launches(
            x,
            self._weight,
            out,
            torch.empty(partial_sums, dtype=torch.float32, device=x.device),
            tile=tile,
            splits=splits,
            bias=self._bias,
            upcast=self._chip.upcasts(x.dtype),
        ):
            launch.run()
        return out

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """The product by decoding, whatever the number of rows."""
        out = torch.empty((x.shape[0], self.out_features), dtype=self._out_dtype or x.dtype, device=x.device)
        slice_rows = max(1, DECODED_BYTES // (self.in_features * x.element_size()))
        for start in range(0, self.out_features, slice_rows):
            stop = min(start + slice_rows, self.out_features)
            decoded = torch.empty((stop - start, self.in_features), dtype=x.dtype, device=x.device)
            decode_weight_launch(self._weight, start, decoded).run()
            bias = None if self._bias is None else self._bias[start:stop].to(x.dtype)
            out[:, start:stop] = torch.nn.functional.linear(x, decoded, bias)
        return out


def build_packed(
    parts: Sequence[WeightMatrix],
    device: torch.device,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> TritonPackedLinear | None:
    """The packed product with the rows of `parts`, compiled for activations of `dtype`.

    None: no affine form, or kernels that are wrong here.
    """
    weight = to_groups(*parts) if _agrees(device, dtype) else None
    if weight is None:
        return None
    linear = TritonPackedLinear(weight, device, bias, out_dtype=out_dtype, deterministic=deterministic)
    kind: tuple[object, ...] = (weight.shape, weight.bits, weight.group_size, weight.scale.dtype, weight.minimum.dtype)
    kind += (dtype, out_dtype, bias is None, deterministic)
    if device.type == "cuda" and kind not in _warm:
        linear.warm_up(dtype)
        _warm.add(kind)
    return linear


# What has been compiled in this process: a model has few kinds of matrices, many times each.
_warm: set[tuple[object, ...]] = set()


@functools.cache
def _agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels give plain torch's results here, on weights of both widths."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 256, generator=generator).to(device, dtype)
    for bits in (4, 8):
        packed = torch.randint(0, 256, (2, 80, 16 * bits), generator=generator, dtype=torch.uint8)
        scale, minimum = torch.rand(2, 2, 80, generator=generator).half().sub_(0.5).unbind(0)
        weight = GroupedWeight(packed.numpy(), scale.numpy(), minimum.numpy(), bits)
        linear = TritonPackedLinear(weight, device)
        want = x.float() @ torch.from_numpy(weight.dequantize()).to(device).T
        for got in (linear(x), linear.decoded(x)):
            error = float((got - want).abs().max() / want.abs().max())
            if not error < _PROBE_TOLERANCE:
                logger.warning(
                    "the %d-bit product is wrong here (relative error %.1e): weights are decoded", bits, error
                )
                return False
    return True
