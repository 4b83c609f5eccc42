"""GGML's block encodings taken apart: rows of bytes to small integers with a scale and a minimum per 32 columns.

Layouts as in ggml's `ggml-quants`: Q4_K and Q5_K have super-blocks of 256 with six-bit scales and minima, Q6_K has
eight-bit scales per 16 columns. Everything but Q6_K's affine form is exact. numpy only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.quant.matrix import GROUP_SIZE, AffineBlocks, pack_nibbles, unpack_nibbles

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
T = GGMLQuantizationType

# Twice the values of four-bit floats (e2m1), shifted by 12 to be unsigned.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
_E2M1_UNSIGNED = (_E2M1 + 12).astype(np.uint8)


def affine(data: Bytes, kind: GGMLQuantizationType) -> AffineBlocks | None:
    """`data`: uint8 `[rows, row_bytes]`. None for an encoding that is none of small integers."""
    rows = len(data)
    if kind in (T.Q4_0, T.Q4_1, T.Q8_0):
        bits = 8 if kind == T.Q8_0 else 4
        header = 4 if kind == T.Q4_1 else 2
        blocks = data.reshape(rows, -1, header + GROUP_SIZE * bits // 8)
        factors = _halves(blocks[..., :header])
        scale = factors[..., 0]
        packed = blocks[..., header:]
        if kind == T.Q4_1:
            return AffineBlocks(bits, packed, scale, factors[..., 1])
        # Signed bytes become unsigned ones by the highest bit.
        packed = packed ^ np.uint8(128) if bits == 8 else packed
        return AffineBlocks(bits, packed, scale, (-128 if bits == 8 else -8) * scale)
    if kind in (T.Q5_0, T.Q5_1):
        return AffineBlocks(8, *_five_bits(data, kind))
    if kind in (T.Q4_K, T.Q5_K):
        values, scale, minimum = _k_quant(data, kind)
        four = kind == T.Q4_K
        return AffineBlocks(4 if four else 8, pack_nibbles(values) if four else values, scale, minimum)
    if kind == T.Q6_K:
        return requantize(_decode_q6(data).reshape(rows, -1, GROUP_SIZE))
    if kind == T.MXFP4:
        blocks = data.reshape(rows, -1, 17)
        # The exponent's half: the integers are twice the values. Below 2^-126 float32 has subnormal numbers.
        scale = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)
        return AffineBlocks(8, _E2M1_UNSIGNED[unpack_nibbles(blocks[..., 1:])], scale, -12 * scale)
    return None


def decode(data: Bytes, kind: GGMLQuantizationType) -> Floats | None:
    """float32 `[rows, columns]`, to the bit as `gguf.quants.dequantize`; None for an encoding not taken apart here."""
    if kind == T.Q6_K:
        return _decode_q6(data)
    if kind == T.MXFP4:
        blocks = data.reshape(len(data), -1, 17)
        scale = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128)
        return (scale * _E2M1[unpack_nibbles(blocks[..., 1:])].astype(np.float32)).reshape(len(data), -1)
    found = affine(data, kind)
    if found is None:
        return None
    out = found.values().astype(np.float32)
    out *= found.scale[..., None]
    out += found.minimum[..., None]
    return out.reshape(len(data), -1)


def requantize(values: Floats) -> AffineBlocks:
    """float32 `[rows, blocks, 32]` rounded to eight bits: about half of a 255th of each block's range off at most.

    Scales and minima are float16 numbers, which packed products store, rounded outwards: every value is within reach.
    """
    minimum = -_float16_from(-values.min(-1))
    scale = _float16_from((values.max(-1) - minimum) / 255)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    steps = (values - minimum[..., None]) * inverse[..., None]
    return AffineBlocks(8, np.clip(np.rint(steps), 0, 255).astype(np.uint8), scale, minimum)


def _float16_from(values: Floats) -> Floats:
    """The least float16 numbers that are not below `values`, as float32."""
    near = values.astype(np.float16)
    return np.where(near < values, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)


def _halves(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _five_bits(data: Bytes, kind: GGMLQuantizationType) -> tuple[Bytes, Floats, Floats]:
    header = 4 if kind == T.Q5_1 else 2
    blocks = data.reshape(len(data), -1, header + 20)
    factors = _halves(blocks[..., :header])
    scale = factors[..., 0]
    fifth = np.unpackbits(blocks[..., header : header + 4], axis=-1, bitorder="little")
    values = unpack_nibbles(blocks[..., header + 4 :]) | fifth << np.uint8(4)
    return values, scale, factors[..., 1] if kind == T.Q5_1 else -16 * scale


def _k_quant(data: Bytes, kind: GGMLQuantizationType) -> tuple[Bytes, Floats, Floats]:
    """Values `[rows, blocks, 32]`, scales and minima `[rows, blocks]`, eight blocks to a super-block."""
    rows, size = len(data), GGML_QUANT_SIZES[kind][1]
    blocks = data.reshape(rows, -1, size)
    factors = _halves(blocks[..., :4])  # of scales and of minima
    low, middle, high = (blocks[..., start : start + 4] for start in (4, 8, 12))
    # Six-bit numbers of blocks 0 to 3, and of 4 to 7 with their upper two bits kept above those of the first four.
    six_bits = np.concatenate([low & 63, high & 15 | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], axis=-1)
    scale = factors[..., :1] * six_bits.astype(np.float32)
    minimum = -factors[..., 1:] * minima.astype(np.float32)
    chunks = blocks[..., size - 128 :].reshape(rows, -1, 4, 32)  # two blocks each
    values = unpack_nibbles(chunks).reshape(rows, -1, 8, 32)
    if kind == T.Q5_K:
        bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]  # bit j of byte i: column i of block j
        values |= (bits & 1) << 4
    return values.reshape(rows, -1, 32), scale.reshape(rows, -1), minimum.reshape(rows, -1)


def _decode_q6(data: Bytes) -> Floats:
    rows = len(data)
    blocks = data.reshape(rows, -1, 210)
    scale = _halves(blocks[..., 208:]) * blocks[..., 192:208].view(np.int8).astype(np.float32)  # [rows, blocks, 16]
    low = unpack_nibbles(blocks[..., :128].reshape(rows, -1, 2, 64))  # halves of 128 columns
    high = blocks[..., 128:192].reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    values = (low | (high.reshape(low.shape) & 3) << 4).view(np.int8) - np.int8(32)
    out = values.reshape(rows, -1, 16, 16).astype(np.float32)
    out *= scale[..., None]
    return out.reshape(rows, -1)
