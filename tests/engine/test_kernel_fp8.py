"""Eight-bit floats: rows are quantised and multiplied as plain torch does it, and the layer takes what works here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.fp8_gemm import fp8_gemm_launches, fp8_gemm_reference
from engine.kernels.fp8_rows import Fp8Rows, fp8_rows_launch, fp8_rows_reference
from engine.kernels.product_table import ProductTile, fp8_tiles
from engine.kernels.rms_norm import rms_norm_reference
from engine.layers import linear_fp8
from engine.layers.linear_fp8 import Fp8Linear, build_fp8, scaled_mm_works
from engine.layers.normed import norm_and_multiply
from engine.layers.ops_triton import TritonOps
from engine.quant.fp8 import Fp8Matrix, scaled_fp8
from tests.engine.kernel_support import kernel_device
from tests.engine.test_kernel_packed import rows_of

# Codes may differ by one step where a quotient lies just between two.
CODE_STEP = 1 / 8
INTERPRETED = kernel_device().type == "cpu"


def assert_same_rows(actual: Fp8Rows, expected: Fp8Rows) -> None:
    torch.testing.assert_close(actual.scale, expected.scale, rtol=1e-6, atol=0)
    codes, wanted = actual.codes.float(), expected.codes.float()
    assert torch.isfinite(codes).all()
    assert bool(((codes - wanted).abs() <= CODE_STEP * wanted.abs() + 2**-9).all())
    assert float((codes != wanted).float().mean()) < 0.01


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_take_the_scale_of_their_largest_value(groups: int, dtype: torch.dtype) -> None:
    x = rows_of(5, 384, dtype)
    x[3] = 0.0
    rows = Fp8Rows.empty(5, 384, groups, x.device)
    fp8_rows_launch(x, rows, interpreted=INTERPRETED).run()
    assert_same_rows(rows, fp8_rows_reference(x, groups))
    assert float(rows.codes.float().abs().max()) == 448.0
    assert not rows.codes[3].float().any()


@pytest.mark.parametrize("groups", [1, 2])
def test_the_norm_comes_first_and_the_residual_before_it(groups: int) -> None:
    x, weight = rows_of(4, 256, torch.float32), torch.rand(256, device=kernel_device()) + 0.5
    residual = rows_of(4, 256, torch.float32, seed=5).contiguous()
    summed = residual + x
    rows = Fp8Rows.empty(4, 256, groups, x.device)
    fp8_rows_launch(x, rows, weight=weight, eps=1e-5, residual=residual, interpreted=INTERPRETED).run()
    torch.testing.assert_close(residual, summed)
    assert_same_rows(rows, fp8_rows_reference(rms_norm_reference(summed, weight, 1e-5), groups))


def test_other_groups_and_a_residual_alone_are_refused() -> None:
    x = rows_of(2, 96, torch.float32)
    with pytest.raises(ValueError, match="groups of a power of two"):
        fp8_rows_launch(x, Fp8Rows.empty(2, 96, 2, x.device))
    with pytest.raises(ValueError, match="there is none"):
        fp8_rows_launch(x, Fp8Rows.empty(2, 96, 1, x.device), residual=x)


def codes_of(outputs: int, columns: int, seed: int = 2) -> torch.Tensor:
    values = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.float8_e4m3fn).to(kernel_device())


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 65, 384), (17, 200, 128), (70, 48, 256)])
def test_products_with_scales(rows: int, outputs: int, columns: int, by_block: bool) -> None:
    blocks = columns // 128 if by_block else 1
    x = fp8_rows_reference(rows_of(rows, columns, torch.float32), blocks)
    scale = torch.rand(blocks, outputs, device=x.codes.device)
    bias = torch.randn(outputs, device=x.codes.device)
    codes = codes_of(outputs, columns)
    for splits in (1, 2):
        out = torch.full((rows, outputs), float("nan"), device=x.codes.device)
        partial = torch.full((splits * rows * outputs,), float("nan"), device=x.codes.device)
        tile = ProductTile(64, 128, 4, 3)
        for launch in fp8_gemm_launches(x, codes, scale, out, partial, tile=tile, splits=splits, bias=bias):
            launch.run()
        torch.testing.assert_close(out, fp8_gemm_reference(x, codes, scale, bias), rtol=1e-4, atol=1e-4)


def test_columns_need_not_fill_the_last_block() -> None:
    x = fp8_rows_reference(rows_of(3, 208, torch.float32), 1)
    codes, scale = codes_of(40, 208), torch.ones(1, 40, device=kernel_device())
    out = torch.empty(3, 40, device=x.codes.device)
    for launch in fp8_gemm_launches(x, codes, scale, out, torch.empty(0), tile=fp8_tiles(0)[0], splits=1):
        launch.run()
    torch.testing.assert_close(out, fp8_gemm_reference(x, codes, scale), rtol=1e-4, atol=1e-4)


def test_scales_for_other_blocks_are_refused() -> None:
    x = fp8_rows_reference(rows_of(3, 256, torch.float32), 2)
    with pytest.raises(ValueError, match="1 and 2 scales"):
        fp8_gemm_launches(
            x, codes_of(8, 256), torch.ones(1, 8), torch.empty(3, 8), torch.empty(0), tile=fp8_tiles(0)[0], splits=1
        )
    with pytest.raises(ValueError, match="compute capability"):
        fp8_tiles(86)


def matrix(rows: int, columns: int, block: tuple[int, int], seed: int) -> Fp8Matrix:
    random = np.random.default_rng(seed)
    codes = codes_of(rows, columns, seed).view(torch.uint8).cpu().numpy()
    shape = -(-rows // block[0]), -(-columns // block[1])
    return scaled_fp8(codes, random.random(shape, dtype=np.float32) + 0.5, block)


# Of the largest result: the rounding of x to three bits of fraction, averaged over the columns.
QUANTISED = 4e-2


@pytest.mark.parametrize("block", [(48, 256), (1, 256), (128, 128)], ids=["tensor", "channel", "block"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_layer_serves_every_kind_of_scale(block: tuple[int, int], deterministic: bool) -> None:
    parts, device = [matrix(48, 256, block, 1), matrix(32, 256, block, 2)], kernel_device()
    bias = torch.randn(80, generator=torch.Generator().manual_seed(3)).to(device)
    linear = build_fp8(parts, device, torch.float32, bias, deterministic=deterministic)
    assert linear is not None
    linear.warm_up(torch.float32)
    decoded = torch.from_numpy(np.concatenate([part.dequantize() for part in parts])).to(device)
    for rows in (0, 1, 33):
        x = rows_of(rows, 256, torch.float32)
        out = linear(x)
        assert out.shape == (rows, 80)
        if rows:
            want = x @ decoded.T + bias
            assert float((out - want).abs().max() / want.abs().max()) < QUANTISED


def test_a_norm_in_one_kernel_is_the_norm_and_the_product() -> None:
    linear = build_fp8([matrix(48, 256, (128, 128), 1)], kernel_device(), torch.float32)
    assert linear is not None
    ops = TritonOps()
    x, residual = rows_of(4, 256, torch.float32).contiguous(), rows_of(4, 256, torch.float32, seed=7).contiguous()
    weight, apart = torch.rand(256, device=x.device) + 0.5, residual.clone()
    fused = norm_and_multiply(linear, x, residual, weight, 1e-5, ops)
    torch.testing.assert_close(fused, linear(ops.add_rms_norm(x, apart, weight, 1e-5)), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(residual, apart)
    alone = norm_and_multiply(linear, x, None, weight, 1e-5, ops)
    torch.testing.assert_close(alone, linear(ops.rms_norm(x, weight, 1e-5)), rtol=1e-3, atol=1e-3)
    with_weights = norm_and_multiply(lambda rows: rows * 2, x, None, weight, 1e-5, ops)  # type: ignore[arg-type]
    torch.testing.assert_close(with_weights, 2 * ops.rms_norm(x, weight, 1e-5))


def test_scaled_mm_is_tried_out_and_left_where_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = kernel_device()
    scaled_mm_works.cache_clear()
    works = scaled_mm_works(device, torch.bfloat16)
    scaled_mm_works.cache_clear()
    monkeypatch.setattr(linear_fp8, "scaled_product", lambda rows, codes, scale, dtype: rows.codes.float()[:, :48] * 0)
    assert not scaled_mm_works(device, torch.bfloat16)
    assert "is wrong here for 1 rows" in caplog.text
    scaled_mm_works.cache_clear()

    def missing(*_: object) -> torch.Tensor:
        raise RuntimeError("no such product")

    monkeypatch.setattr(linear_fp8, "scaled_product", missing)
    assert not scaled_mm_works(device, torch.bfloat16)
    linear = build_fp8([matrix(48, 256, (1, 256), 1)], device, torch.bfloat16)
    assert isinstance(linear, Fp8Linear)
    assert not linear._scaled_mm
    scaled_mm_works.cache_clear()
    monkeypatch.undo()
    assert scaled_mm_works(device, torch.bfloat16) == works


def test_other_weights_are_not_served() -> None:
    device = kernel_device()
    assert build_fp8([matrix(48, 256, (64, 64), 1)], device, torch.bfloat16) is None
