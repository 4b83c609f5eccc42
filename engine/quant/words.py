"""Four-bit weights as AWQ, GPTQ and compressed-tensors store them: eight to a 32-bit word, repacked without loss.

    format                words               along     order in a word         zeros
    AWQ (gemm)            [columns, rows / 8]  rows      0 2 4 6 1 3 5 7         as they are
    GPTQ                  [columns / 8, rows]  columns   as they come            one less (v1), as they are (v2)
    compressed-tensors    [rows, columns / 8]  columns   as they come            signed, plus eight

Rows are outputs, columns inputs, as everywhere here. Scales are per group of columns; GPTQ may say in `g_idx` which
group each column belongs to (act-order). The methods are arXiv 2306.00978 and 2210.17323; the layouts are their tools'.
numpy only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.quant.int4 import Int4Matrix
from engine.quant.matrix import GROUP_SIZE, ORDERED, PIECE_VALUES, pack_nibbles

Words = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# The nibble at position p of a word is column `AWQ_ORDER[p]` of its eight.
AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


def unpack_words(words: Words) -> Bytes:
    """int32 `[..., n]` to uint8 `[..., 8 n]`, the lowest four bits of a word first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*words.shape[:-1], 8 * words.shape[-1])


def pack_words(values: Bytes) -> Words:
    """The inverse of `unpack_words`."""
    pairs = values.reshape(*values.shape[:-1], -1, 2)
    return np.ascontiguousarray(pairs[..., 0] | pairs[..., 1] << np.uint8(4)).view(np.int32)


def from_awq(qweight: Words, qzeros: Words, scales: Floats) -> Int4Matrix:
    """qweight: `[columns, rows / 8]`; qzeros: `[groups, rows / 8]`; scales: `[groups, rows]`."""
    columns, words = qweight.shape

    def read(start: int, stop: int) -> Bytes:
        return _in_awq_order(qweight[:, start // 8 : stop // 8]).T

    zero = _in_awq_order(qzeros).T
    return Int4Matrix(_pack(8 * words, columns, read), _per_row(scales), np.ascontiguousarray(zero), "AWQ")


def to_awq(matrix: Int4Matrix) -> tuple[Words, Words, Floats]:
    """The inverse of `from_awq`, for rows in multiples of eight."""
    return (
        _to_awq_words(_values(matrix).T),
        _to_awq_words(matrix.zero.T),
        np.ascontiguousarray(matrix.scale.T),
    )


def from_gptq(
    qweight: Words, qzeros: Words, scales: Floats, g_idx: Words | None, *, zeros_less_one: bool
) -> Int4Matrix:
    """qweight: `[columns / 8, rows]`; qzeros: `[groups, rows / 8]`; scales: `[groups, rows]`; g_idx: `[columns]`.

    Raises ValueError for a `g_idx` whose groups are not all of one size.
    """
    words, rows = qweight.shape
    order = None if g_idx is None else group_order(g_idx, len(scales))

    def read(start: int, stop: int) -> Bytes:
        values = unpack_words(qweight[:, start:stop].T)
        return values if order is None else values[:, order]

    zero = unpack_words(qzeros).T
    if zeros_less_one:  # of four bits: what was zero was stored as fifteen
        zero = zero + np.uint8(1) & np.uint8(15)
    encoding = "GPTQ" if order is None else ORDERED
    packed = _pack(rows, 8 * words, read)
    return Int4Matrix(packed, _per_row(scales), np.ascontiguousarray(zero), encoding, order)


def to_gptq(matrix: Int4Matrix, *, zeros_less_one: bool) -> tuple[Words, Words, Floats, Words]:
    """The inverse of `from_gptq`: qweight, qzeros, scales and g_idx."""
    values, groups = _values(matrix), matrix.scale.shape[1]
    g_idx = np.repeat(np.arange(groups, dtype=np.int32), matrix.num_columns // groups)
    if matrix.order is not None:
        back = np.argsort(matrix.order)
        values, g_idx = values[:, back], g_idx[back]
    zero = matrix.zero.T - np.uint8(zeros_less_one) & np.uint8(15)
    qweight = np.ascontiguousarray(pack_words(values).T)
    return qweight, pack_words(np.ascontiguousarray(zero)), np.ascontiguousarray(matrix.scale.T), g_idx


def from_compressed(words: Words, scales: Floats, zeros: Words | None, g_idx: Words | None = None) -> Int4Matrix:
    """words: `[rows, columns / 8]`; scales: `[rows, groups]`; zeros: `[rows / 8, groups]`, None: eight everywhere.

    Raises ValueError as `from_gptq`.
    """
    rows, columns = len(words), 8 * words.shape[1]
    order = None if g_idx is None else group_order(g_idx, scales.shape[1])

    def read(start: int, stop: int) -> Bytes:
        values = unpack_words(words[start:stop])
        return values if order is None else values[:, order]

    zero = np.full(scales.shape, 8, np.uint8) if zeros is None else np.ascontiguousarray(unpack_words(zeros.T).T)
    encoding = "GPTQ" if order is None else ORDERED
    return Int4Matrix(_pack(rows, columns, read), np.ascontiguousarray(scales, np.float32), zero, encoding, order)


def group_order(g_idx: Words, groups: int) -> Words | None:
    """The order of columns that makes groups contiguous, None where they are. Raises ValueError for uneven groups."""
    size = len(g_idx) // groups
    expected = np.repeat(np.arange(groups), size)
    if len(expected) != len(g_idx) or not np.array_equal(np.sort(g_idx), expected):
        raise ValueError(f"g_idx does not divide {len(g_idx)} columns into {groups} groups of one size")
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    return None if np.array_equal(order, np.arange(len(order))) else order


def _pack(rows: int, columns: int, read: Callable[[int, int], Bytes]) -> Bytes:
    """`read(start, stop)` gives uint8 `[stop - start, columns]`; packed piece by piece."""
    packed = np.empty((rows, columns // GROUP_SIZE, GROUP_SIZE // 2), dtype=np.uint8)
    step = max(1, PIECE_VALUES // columns // 8) * 8
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        packed[start:stop] = pack_nibbles(read(start, stop).reshape(stop - start, -1, GROUP_SIZE))
    return packed


def _values(matrix: Int4Matrix) -> Bytes:
    values = matrix.affine().values()
    return values.reshape(matrix.num_rows, -1)


def _per_row(scales: Floats) -> Floats:
    return np.ascontiguousarray(scales.T, dtype=np.float32)


def _in_awq_order(words: Words) -> Bytes:
    found = unpack_words(words)
    values = found.reshape(*words.shape, 8)
    out = np.empty_like(values)
    out[..., AWQ_ORDER] = values
    return out.reshape(found.shape)


def _to_awq_words(values: Bytes) -> Words:
    eights = values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_ORDER]
    return pack_words(np.ascontiguousarray(eights).reshape(values.shape))
