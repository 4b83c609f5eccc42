"""Products with packed weights equal decoded ones: any width, group, number of rows and splits, any odd size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.kernels import product_table, tune
from engine.kernels.packed_decode import decode_weight_launch
from engine.kernels.packed_gemm import PackedWeight, packed_gemm_launches, packed_gemm_reference, unpacked_reference
from engine.kernels.product_table import ProductTile, choose_splits, choose_tile, packed_tiles
from engine.layers import linear_triton
from engine.layers.linear_triton import Chip, TritonPackedLinear, build_packed
from engine.quant.blocks import BlockTensor
from engine.quant.grouped import GroupedWeight, to_groups
from engine.quant.int4 import pack_int4
from tests.engine.kernel_support import kernel_device

T = GGMLQuantizationType
# Of the largest result: the rounding of the result itself, and of sums in float32.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def weights(outputs: int, columns: int, group: int, bits: int, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    groups, device = columns // group, kernel_device()
    packed = torch.randint(0, 256, (groups, outputs, group * bits // 8), generator=generator, dtype=torch.uint8)
    scale = torch.rand(groups, outputs, generator=generator) * 0.01 + 0.001
    minimum = -scale * torch.randint(0, 2**bits, (groups, outputs), generator=generator)
    return PackedWeight(packed.to(device), scale.half().to(device), minimum.half().to(device), bits)


def rows_of(count: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Rows between NaN: before them, after them, and in a wider matrix's other columns."""
    wide = torch.full((count + 2, columns + 16), float("nan"))
    wide[1 : count + 1, :columns] = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))
    return wide.to(kernel_device(), dtype)[1 : count + 1, :columns]


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(actual).all()
    error = (actual.float() - expected).abs().max() / expected.abs().max()
    assert float(error) < TOLERANCE[dtype]


def product(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    splits: int,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: ProductTile | None = None,
) -> torch.Tensor:
    rows, outputs = x.shape[0], weight.out_features
    chip = Chip.of(x.device)
    out = torch.full((rows, outputs), float("nan"), dtype=out_dtype or x.dtype, device=x.device)
    for launch in packed_gemm_launches(
        x,
        weight,
        out,
        torch.full((splits * rows * outputs,), float("nan"), device=x.device),
        tile=tile or choose_tile(packed_tiles(chip.arch, weight.bits), rows),
        splits=splits,
        bias=bias,
        upcast=chip.upcasts(x.dtype),
    ):
        launch.run()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_and_dtypes(bits: int, rows: int, dtype: torch.dtype) -> None:
    weight, x = weights(200, 384, 128, bits), rows_of(rows, 384, dtype)
    assert_near(product(x, weight, splits=2), packed_gemm_reference(x, weight), dtype)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups(bits: int, group: int) -> None:
    weight, x = weights(65, 512, group, bits), rows_of(5, 512, torch.float32)
    bias = torch.randn(65, generator=torch.Generator().manual_seed(2)).to(x.device)
    for splits in (1, 3):
        assert_near(product(x, weight, splits=splits, bias=bias), packed_gemm_reference(x, weight, bias), torch.float32)


def test_a_split_without_groups_adds_nothing() -> None:
    weight, x = weights(40, 64, 32, 4), rows_of(2, 64, torch.float32)
    assert_near(product(x, weight, splits=5), packed_gemm_reference(x, weight), torch.float32)


def test_results_in_another_dtype_are_rounded_once() -> None:
    weight, x = weights(48, 256, 64, 4), rows_of(3, 256, torch.float16)
    out = product(x, weight, splits=1, out_dtype=torch.float32)
    want = packed_gemm_reference(x, weight)
    assert float((out - want).abs().max() / want.abs().max()) < 5e-5, "well below float16's last digit"


def test_far_from_zero_weights_keep_their_digits() -> None:
    """All weights of a group nearly equal and far from zero: the sum of x must not drown the integers' part."""
    weight = weights(32, 128, 128, 4)
    shifted = PackedWeight(weight.packed, weight.scale, weight.minimum + 8.0, 4)
    x = rows_of(4, 128, torch.float16)
    x -= x.float().mean(dim=1, keepdim=True).half()  # so that the common part nearly cancels
    error = (product(x, shifted, splits=1, out_dtype=torch.float32) - packed_gemm_reference(x, shifted)).abs().max()
    assert float(error) < 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_decoding_is_exact_row_by_row(bits: int) -> None:
    weight = weights(70, 192, 64, bits)
    out = torch.full((37, 192), float("nan"), device=weight.packed.device)
    decode_weight_launch(weight, 33, out).run()
    torch.testing.assert_close(out, unpacked_reference(weight)[33:], atol=1e-7, rtol=1e-6)


def test_too_little_scratch_is_refused() -> None:
    weight, x = weights(32, 64, 32, 4), rows_of(2, 64, torch.float32)
    with pytest.raises(ValueError, match="scratch for 64 partial sums, 128 needed"):
        packed_gemm_launches(
            x, weight, torch.empty(2, 32), torch.empty(64), tile=ProductTile(16, 64, 4, 3), splits=2, bias=None
        )


def ggml(kind: GGMLQuantizationType, rows: int, columns: int) -> BlockTensor:
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    return BlockTensor(quantize(values, kind), kind, (rows, columns))


def awq(rows: int, columns: int, group: int) -> GroupedWeight:
    random = np.random.default_rng(1)
    shape = (rows, columns // group)
    scale = (random.random(shape) * 0.01 + 0.001).astype(np.float16).astype(np.float32)
    values = random.integers(0, 16, (rows, columns), dtype=np.uint8)
    matrix = pack_int4(values, scale, random.integers(0, 16, shape, dtype=np.uint8), "AWQ")
    grouped = to_groups(matrix)
    assert grouped is not None
    np.testing.assert_allclose(grouped.dequantize(), matrix.dequantize(), rtol=0, atol=scale.max() * 15 * 2**-11)
    return grouped


@pytest.mark.parametrize(("group", "found"), [(32, 32), (64, 64), (128, 128), (256, 128)])
def test_groups_are_as_large_as_the_file_s(group: int, found: int) -> None:
    grouped = awq(24, 512, group)
    assert grouped.group_size == found
    assert grouped.scale.dtype == np.float16
    assert grouped.shape == (24, 512)


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_1, T.Q8_0, T.Q5_0])
def test_files_weights_are_grouped_without_loss(kind: GGMLQuantizationType) -> None:
    tensor = ggml(kind, 20, 96)
    grouped = to_groups(tensor)
    assert grouped is not None
    assert grouped.bits == (4 if kind in (T.Q4_0, T.Q4_1) else 8)
    np.testing.assert_allclose(grouped.dequantize(), tensor.dequantize(), rtol=0, atol=1e-6)


def test_parts_in_two_encodings_take_the_wider() -> None:
    parts = ggml(T.Q4_1, 20, 64), ggml(T.Q8_0, 12, 64)
    grouped = to_groups(*parts)
    assert grouped is not None
    assert (grouped.bits, grouped.shape) == (8, (32, 64))
    want = np.concatenate([part.dequantize() for part in parts])
    np.testing.assert_allclose(grouped.dequantize(), want, rtol=0, atol=1e-6)
    assert to_groups(ggml(T.F16, 4, 64)) is None


def test_scales_that_float16_cannot_hold_stay_wide() -> None:
    matrix = pack_int4(np.ones((8, 64), np.uint8), np.full((8, 2), 1e-7, np.float32), np.zeros((8, 2), np.uint8), "AWQ")
    grouped = to_groups(matrix)
    assert grouped is not None
    assert grouped.scale.dtype == np.float32
    np.testing.assert_allclose(grouped.dequantize(), 1e-7, rtol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_layer_serves_every_number_of_rows(deterministic: bool) -> None:
    tensor, device = ggml(T.Q4_1, 96, 128), kernel_device()
    bias = torch.randn(96, generator=torch.Generator().manual_seed(3)).to(device)
    linear = build_packed([tensor], device, torch.float32, bias, deterministic=deterministic)
    assert linear is not None
    linear.warm_up(torch.float32)
    decoded = torch.from_numpy(tensor.dequantize()).to(device)
    for rows in (0, 1, product_table.CUBLAS_ABOVE_ROWS, product_table.CUBLAS_ABOVE_ROWS + 1):
        x = rows_of(rows, 128, torch.float32)
        out = linear(x)
        assert out.shape == (rows, 96)
        if rows:
            assert_near(out, x @ decoded.T + bias, torch.float32)


def test_deterministic_rows_do_not_depend_on_their_mates() -> None:
    linear = TritonPackedLinear(awq(130, 1024, 128), kernel_device(), deterministic=True)
    x = rows_of(70, 1024, torch.float16)
    together = linear(x)
    for row in (0, 64):  # first in their tiles: numpy, which multiplies for the interpreter, minds a row's place
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


def test_large_matrices_are_decoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = TritonPackedLinear(awq(100, 128, 128), kernel_device())
    x = rows_of(3, 128, torch.float32)
    whole = linear.decoded(x)
    monkeypatch.setattr(linear_triton, "DECODED_BYTES", 33 * 128 * 4)
    torch.testing.assert_close(linear.decoded(x), whole)


def test_splits_fill_the_chip_and_no_more() -> None:
    tile = ProductTile(16, 64, 4, 4)
    assert choose_splits(tile, 1, 4096, 32, 128, 132) == 5  # 64 tiles of outputs, two programs per multiprocessor
    assert choose_splits(tile, 1, 128_256, 32, 128, 132) == 1
    assert choose_splits(tile, 1, 1024, 2, 128, 132) == 1  # too few columns
    assert choose_splits(tile, 1, 64, 10, 512, 132) == 10
    for rows, groups in ((1, 7), (33, 28), (64, 112)):
        splits = choose_splits(tile, rows, 4096, groups, 128, 132)
        assert (splits - 1) * -(-groups // splits) < groups, "no split is empty"


def test_old_chips_are_refused() -> None:
    with pytest.raises(ValueError, match="compute capability"):
        packed_tiles(75, 4)


def test_tuning_takes_the_fastest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    tiles = tune.candidates(16)
    assert len(set(tiles)) == len(tiles) > 10
    slow = {tile: float(10 + index) for index, tile in enumerate(tiles)}
    slow[tiles[7]] = 1.0
    assert tune.fastest(tiles, slow.get) == tiles[7]
    assert tune.fastest(tiles, lambda tile: None if tile == tiles[7] else slow[tile]) == tiles[0]
    with pytest.raises(ValueError, match="no tile fits"):
        tune.fastest(tiles, lambda tile: None)
    if not torch.cuda.is_available():
        assert tune.main() == 2
        assert "torch finds none here" in capsys.readouterr().err
