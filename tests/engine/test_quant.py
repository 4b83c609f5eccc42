"""Weight encodings: decoded as the gguf package does, repacked without a rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine.loader.gguf import GgufFile
from engine.quant.blocks import BlockTensor, dense
from engine.quant.ggml import requantize
from engine.quant.matrix import AFFINE_BITS, AffineBlocks, pack_nibbles, pieces, unpack_nibbles
from engine.quant.tiles import TiledWeight, to_tiles

T = GGMLQuantizationType
PLAIN = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.MXFP4]
# No encoder in the gguf package: random bytes decode to something all the same.
BLOCKS_ONLY = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS]
AFFINE = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K, T.MXFP4]


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


def test_every_byte_is_dequantised_as_the_reference() -> None:
    """Every value of every byte, scales with a sign and those that reach float16's subnormal numbers."""
    generator = np.random.default_rng(1)
    for kind in (*BLOCKS_ONLY[2:5], T.Q5_0, T.Q5_1, T.MXFP4):
        elements, size = GGML_QUANT_SIZES[kind]
        data = generator.integers(0, 256, (200, 4 * size), dtype=np.uint8)
        blocks = data.reshape(-1, size)
        halves = {T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,), T.Q5_0: (0,), T.Q5_1: (0, 2), T.MXFP4: ()}[kind]
        for at in halves:
            blocks[:, at + 1] &= 0xBF  # finite: the highest bit of the exponent is not set
        if kind == T.MXFP4:
            blocks[:, 0] %= 252
        tensor = BlockTensor(data, kind, (200, 4 * elements))
        assert np.array_equal(tensor.dequantize(), dequantize(data, kind)), kind.name


def test_rows_are_taken_without_decoding() -> None:
    tensor = encoded(T.Q4_1)
    order = np.random.default_rng(3).permutation(12).astype(np.int64)
    assert np.array_equal(tensor.take_rows(order).dequantize(), tensor.dequantize()[order])
    assert np.array_equal(tensor.rows(3, 7).dequantize(), tensor.dequantize()[3:7])
    assert tensor.rows(3, 7).data.base is not None
    experts = BlockTensor(tensor.data, T.Q4_1, (3, 4, 512))
    assert experts.dequantize().shape == (3, 4, 512)
    assert np.array_equal(experts.rows(4, 8).dequantize(), experts.dequantize()[1])


def test_pieces_cover_every_row_once() -> None:
    tensor = dense(np.zeros((40_000, 64), dtype=np.float32))
    found = list(pieces(tensor))
    assert [start for start, _ in found] == [0, 16_384, 32_768]
    assert sum(part.num_rows for _, part in found) == 40_000
    assert [part.num_rows for _, part in pieces(dense(np.zeros((20, 1 << 21), dtype=np.float32)))] == [16, 4]


def test_nibbles_are_packed_as_they_are_unpacked() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    values = unpack_nibbles(packed)
    assert values[0, :3].tolist() == [0, 1, 2]
    assert values[1, 64:67].tolist() == [4, 4, 4]
    assert np.array_equal(pack_nibbles(values), packed)


def recompose(blocks: AffineBlocks) -> np.ndarray:
    values = blocks.values().astype(np.float64) * blocks.scale[..., None] + blocks.minimum[..., None]
    return values.reshape(len(values), -1)


def assert_half_a_step(blocks: AffineBlocks, want: np.ndarray) -> None:
    """Half of a 255th of each block's range, and what rounding its ends to float16 adds: 2^-10 of them, or 2^-24."""
    grouped = want.reshape(*blocks.scale.shape, 32)
    ends = 2**-10 * np.abs(grouped).max(-1) + 2**-24
    step = (np.ptp(grouped, axis=-1) + ends) / 255 * (1 + 2**-10) + 2**-24
    error = np.abs(recompose(blocks) - want).reshape(grouped.shape).max(-1)
    assert (error <= 0.5001 * step).all()


@pytest.mark.parametrize("kind", AFFINE, ids=lambda kind: kind.name)
def test_affine_form_holds_the_same_numbers(kind: GGMLQuantizationType) -> None:
    tensor = encoded(kind)
    blocks = tensor.affine()
    assert blocks is not None
    assert blocks.bits == AFFINE_BITS[kind.name]
    assert blocks.packed.shape == (12, 16, 4 * blocks.bits)
    want = tensor.dequantize()
    if kind == T.Q6_K:
        assert_half_a_step(blocks, want)
    else:  # in float64, where it is exact, and rounded once as the reference rounds its result
        assert np.array_equal(recompose(blocks).astype(np.float32), want)


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16, T.Q3_K, T.IQ4_NL], ids=lambda kind: kind.name)
def test_what_has_no_affine_form(kind: GGMLQuantizationType) -> None:
    assert encoded(kind).affine() is None
    assert to_tiles(encoded(kind)) is None
    assert to_tiles(encoded(T.Q4_1), encoded(kind)) is None


def test_rounding_to_eight_bits() -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((50, 4, 32)).astype(np.float32)
    values *= np.float32(10.0) ** generator.integers(-4, 4, (50, 4, 1))
    values[0, 0], values[1, 0], values[2, 0] = 0, 1.25, -3.0  # blocks without a range
    blocks = requantize(values)
    assert_half_a_step(blocks, values.reshape(50, -1))
    assert recompose(blocks)[:3, :32].tolist() == [[0.0] * 32, [1.25] * 32, [-3.0] * 32]
    assert np.array_equal(blocks.scale, blocks.scale.astype(np.float16))
    assert np.array_equal(blocks.minimum, blocks.minimum.astype(np.float16))


def test_what_eight_bits_add_to_six() -> None:
    """Of weights rounded as Q6_K rounds them, to 63 levels per 16 columns: a few per cent of their error."""
    weights = np.random.default_rng(0).standard_normal((200, 64, 32)).astype(np.float32)
    halves = weights.reshape(-1, 16)
    step = np.abs(halves).max(-1, keepdims=True) / 31
    six_bits = (np.rint(halves / step) * step).reshape(weights.shape)
    before, after = (np.sqrt(np.mean((found - weights.reshape(200, -1)) ** 2)) for found in (
        six_bits.reshape(200, -1), recompose(requantize(six_bits))
    ))  # fmt: skip
    assert before == pytest.approx(0.0192, rel=0.02)
    assert after == pytest.approx(0.0198, rel=0.02)


def untile(weight: TiledWeight) -> np.ndarray:
    """The numbers of a tiled matrix, element by element."""
    tiles, columns = len(weight.data), weight.shape[1]
    decoded = np.empty((16 * tiles, columns))
    for tile in range(tiles):
        for block in range(columns // 32):
            for r in range(16):
                scale, minimum = (float(weight.scales[tile, block, at, r]) for at in (0, 1))
                piece = weight.data[tile, block, :, r].ravel()
                values = np.concatenate([piece & 15, piece >> 4]) if weight.bits == 4 else piece
                decoded[16 * tile + r, 32 * block : 32 * block + 32] = values * scale + minimum
    return decoded


@pytest.mark.parametrize("kind", AFFINE, ids=lambda kind: kind.name)
def test_tiled_layout_holds_the_same_numbers(kind: GGMLQuantizationType) -> None:
    tensor = encoded(kind, rows=20)
    weight = to_tiles(tensor)
    assert weight is not None
    assert weight.shape == (20, 512)
    assert weight.data.ctypes.data % 64 == weight.scales.ctypes.data % 64 == 0
    decoded = untile(weight)
    assert not decoded[20:].any()  # what fills up the last tile
    blocks = tensor.affine()
    assert blocks is not None
    # Scales and minima of float16: what is no product of two numbers is exact.
    exact = kind not in (T.Q4_K, T.Q5_K)
    numbers = np.abs(blocks.scale) * (15 if blocks.bits == 4 else 31) + np.abs(blocks.minimum)
    allowed = 0 if exact else 2.0**-11 * numbers.repeat(32, axis=-1) + 1e-6
    assert (np.abs(decoded[:20] - recompose(blocks)) <= allowed).all()


def test_parts_are_stacked_in_tiles() -> None:
    """Rows that begin within a tile, and four bits beside eight."""
    parts = [encoded(T.Q4_1, rows=20), encoded(T.Q4_1, rows=7, seed=1), encoded(T.Q4_0, rows=21, seed=2)]
    weight = to_tiles(*parts)
    assert weight is not None
    assert (weight.shape, weight.bits) == ((48, 512), 4)
    want = np.concatenate([part.dequantize() for part in parts])
    assert np.allclose(untile(weight), want, rtol=1e-5, atol=1e-6)
    mixed = [parts[0], encoded(T.Q8_0, rows=28, seed=3)]
    weight = to_tiles(*mixed)
    assert weight is not None
    assert (weight.shape, weight.bits) == ((48, 512), 8)
    want = np.concatenate([part.dequantize() for part in mixed])
    assert np.allclose(untile(weight), want, rtol=1e-5, atol=1e-6)


def test_large_matrices_are_tiled_in_pieces() -> None:
    tensor = encoded(T.Q8_0, rows=33_000, columns=32)
    weight = to_tiles(tensor)
    assert weight is not None
    values = weight.data.transpose(0, 3, 1, 2, 4).reshape(-1, 32)[:33_000].astype(np.float32)
    factors = weight.scales.transpose(0, 3, 1, 2).reshape(-1, 2)[:33_000].astype(np.float32)
    assert np.array_equal(values * factors[:, :1] + factors[:, 1:], tensor.dequantize())


def test_tiled_layout_refuses_what_it_cannot_hold() -> None:
    huge = encoded(T.Q8_0)
    huge.data.reshape(12, -1, 34)[:, :, :2] = np.frombuffer(np.float16(30_000).tobytes(), dtype=np.uint8)
    assert to_tiles(huge) is None  # -128 times the scale is beyond float16
