"""Weight encodings: decoded as the gguf package does, repacked without a rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine.loader.gguf import GgufFile
from engine.quant.blocks import BlockTensor, stack_rows
from engine.quant.int4 import to_int4
from engine.quant.tiles import to_tiles

T = GGMLQuantizationType
PLAIN = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0]
# No encoder in the gguf package: random bytes decode to something all the same.
BLOCKS_ONLY = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS]


def encoded(kind: GGMLQuantizationType, rows: int = 12, columns: int = 512, seed: int = 0) -> BlockTensor:
    generator = np.random.default_rng(seed)
    if kind in BLOCKS_ONLY:
        elements, size = GGML_QUANT_SIZES[kind]
        data = generator.integers(0, 60, (rows, columns // elements * size), dtype=np.uint8)
    else:
        data = quantize(generator.standard_normal((rows, columns), dtype=np.float32), kind).view(np.uint8)
    return BlockTensor(np.ascontiguousarray(data).reshape(rows, -1), kind, (rows, columns))


@pytest.mark.parametrize("kind", [*PLAIN, *BLOCKS_ONLY], ids=lambda kind: kind.name)
def test_dequantised_as_the_reference(kind: GGMLQuantizationType) -> None:
    tensor = encoded(kind)
    item = {T.F32: np.float32, T.F16: np.float16}.get(kind, np.uint8)
    assert np.array_equal(tensor.dequantize(), dequantize(tensor.data.view(item), kind), equal_nan=True)


def test_tensors_of_the_small_model_are_dequantised_as_the_reference(smollm2_path: Path) -> None:
    file = GgufFile(smollm2_path)
    for name, info in list(file.tensors.items())[::9]:
        tensor = file.tensor(name)
        want = dequantize(tensor.data.view(np.float32) if info.type == T.F32 else tensor.data, info.type)
        assert np.array_equal(tensor.dequantize(), want.reshape(info.shape)), name


def test_large_tensors_are_decoded_in_pieces() -> None:
    tensor = encoded(T.Q8_0, rows=20_000, columns=32)
    assert np.array_equal(tensor.dequantize(), dequantize(tensor.data, T.Q8_0))


def test_rows_are_taken_and_stacked_without_decoding() -> None:
    a, b = encoded(T.Q4_1, seed=1), encoded(T.Q4_1, seed=2)
    order = np.random.default_rng(3).permutation(12).astype(np.int64)
    assert np.array_equal(a.take_rows(order).dequantize(), a.dequantize()[order])
    stacked = stack_rows([a, b])
    assert stacked is not None
    assert np.array_equal(stacked.dequantize(), np.concatenate([a.dequantize(), b.dequantize()]))
    assert stack_rows([a, encoded(T.Q8_0)]) is None
    assert stack_rows([a, encoded(T.Q4_1, columns=256)]) is None


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_1], ids=lambda kind: kind.name)
def test_four_bit_form_is_exact(kind: GGMLQuantizationType) -> None:
    tensor = encoded(kind)
    weight = to_int4(tensor)
    assert weight is not None
    assert weight.values().max() <= 15
    scale, minimum = (np.repeat(part, 32, axis=1) for part in (weight.scale, weight.minimum))
    # In float64, where q * scale + minimum is exact, and rounded once as the reference rounds its result.
    decoded = weight.values().astype(np.float64) * scale + minimum
    assert np.allclose(decoded, tensor.dequantize(), rtol=1e-6, atol=0)
    assert to_int4(encoded(T.Q8_0)) is None


@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_1, T.Q8_0], ids=lambda kind: kind.name)
def test_tiled_layout_holds_the_same_numbers(kind: GGMLQuantizationType) -> None:
    tensor = encoded(kind, rows=20)
    weight = to_tiles(tensor)
    assert weight is not None
    assert weight.shape == (20, 512)
    decoded = np.empty((32, 512))
    for tile in range(2):
        for block in range(16):
            for r in range(16):
                scale, minimum = (float(weight.scales[tile, block, at, r]) for at in (0, 1))
                piece = weight.data[tile, block, :, r].ravel()
                values = np.concatenate([piece & 15, piece >> 4]) if weight.bits == 4 else piece
                decoded[16 * tile + r, 32 * block : 32 * block + 32] = values * scale + minimum
    assert not decoded[20:].any()  # what fills up the last tile
    # Relative to the block's largest number: an eight-bit value near zero is a difference of two large ones.
    assert np.allclose(decoded[:20], tensor.dequantize(), rtol=1e-5, atol=1e-6)


def test_tiled_layout_refuses_what_it_cannot_hold() -> None:
    assert to_tiles(encoded(T.Q5_0)) is None
    huge = encoded(T.Q8_0)
    huge.data.reshape(12, -1, 34)[:, :, :2] = np.frombuffer(np.float16(30_000).tobytes(), dtype=np.uint8)
    assert to_tiles(huge) is None  # -128 times the scale is beyond float16
