"""What serving compiles for quantised weights, described without a GPU and without memory, as in `specialisations.py`.

These kernels take a matrix's sizes at run time, so one model's sizes stand for all: what is compiled depends on the
width of the weights, on their groups and on the tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.kernels import heuristics, product_table
from engine.kernels.attn_decode import decode_launches
from engine.kernels.attn_prefill import prefill_launch
from engine.kernels.fp8_gemm import BLOCK_COLUMNS, fp8_gemm_launches
from engine.kernels.fp8_pages import Fp8Pages, page_bytes
from engine.kernels.fp8_rows import Fp8Rows, fp8_rows_launch
from engine.kernels.kv_write import kv_write_launch
from engine.kernels.packed_decode import decode_weight_launch
from engine.kernels.packed_gemm import PackedWeight, packed_gemm_launches
from engine.kernels.specialisations import Specialisation

_ROWS, _OUTPUTS, _COLUMNS = 24, 6144, 4096  # Llama 3.1 8B's query, key and value projection
# Bits and columns per group that files have: AWQ, GPTQ and GGUF's four bits; GGUF's eight.
_PACKED = ((4, 128), (4, 64), (4, 32), (8, 32))
_META = torch.device("meta")


def product_launches(arch: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Specialisation]]:
    """Every launch on compute capability `arch`, for activations of `dtype`, with what it is for: "int4 groups of 128".

    Roles: "packed_gemm_16" (the tile's rows), "packed_gemm_split", "add_splits", "decode_weight"; from 8.9 on
    "fp8_gemm_16", "fp8_rows", "add_rms_norm_fp8", "kv_write_fp8", "decode", "decode_combine", "prefill".
    """
    for bits, group in _PACKED:
        for part in _packed_launches(arch, dtype, bits, group):
            yield f"int{bits} groups of {group}", part
    if arch >= product_table.FP8_ARCH:
        for groups, name in ((1, "rows"), (_COLUMNS // BLOCK_COLUMNS, "blocks")):
            for part in _fp8_launches(arch, dtype, groups):
                yield f"fp8 scaled by {name}", part
        for part in _fp8_cache_launches(arch, dtype):
            yield "fp8 KV cache", part


def _packed_launches(arch: int, dtype: torch.dtype, bits: int, group: int) -> Iterator[Specialisation]:
    groups = _COLUMNS // group
    factors = _meta((groups, _OUTPUTS), torch.float16)
    weight = PackedWeight(_meta((groups, _OUTPUTS, group * bits // 8), torch.uint8), factors, factors, bits)
    x, out = _meta((_ROWS, _COLUMNS), dtype), _meta((_ROWS, _OUTPUTS), dtype)
    partial = _meta((2 * _ROWS * _OUTPUTS,), torch.float32)
    tiles = product_table.packed_tiles(arch, bits)
    for tile in tiles:
        launches = packed_gemm_launches(x, weight, out, partial, tile=tile, splits=1)
        yield Specialisation(f"packed_gemm_{tile.block_m}", launches[0])
    split, total = packed_gemm_launches(x, weight, out, partial, tile=tiles[0], splits=2)
    yield Specialisation("packed_gemm_split", split)
    yield Specialisation("add_splits", total)
    yield Specialisation("decode_weight", decode_weight_launch(weight, 0, _meta((_OUTPUTS, _COLUMNS), dtype)))


def _fp8_launches(arch: int, dtype: torch.dtype, groups: int) -> Iterator[Specialisation]:
    rows = Fp8Rows.empty(_ROWS, _COLUMNS, groups, _META)
    weight = _meta((_OUTPUTS, _COLUMNS), torch.float8_e4m3fn)
    scale = _meta((groups, _OUTPUTS), torch.float32)
    out, nothing = _meta((_ROWS, _OUTPUTS), dtype), _meta((0,), torch.float32)
    for tile in product_table.fp8_tiles(arch):
        launches = fp8_gemm_launches(rows, weight, scale, out, nothing, tile=tile, splits=1)
        yield Specialisation(f"fp8_gemm_{tile.block_m}", launches[0])
    x, norm = _meta((_ROWS, _COLUMNS), dtype), _meta((_COLUMNS,), torch.float32)
    residual = _meta((_ROWS, _COLUMNS), torch.float32)
    yield Specialisation("fp8_rows", fp8_rows_launch(x, rows))
    yield Specialisation("add_rms_norm_fp8", fp8_rows_launch(x, rows, weight=norm, eps=1e-5, residual=residual))


def _fp8_cache_launches(arch: int, dtype: torch.dtype) -> Iterator[Specialisation]:
    heads, kv_heads, head_dim, block_size, seqs = 32, 8, 128, 16, 8
    tiles = heuristics.attention_tiles(arch, head_dim, dtype)
    raw = _meta((64, page_bytes(block_size, kv_heads, head_dim)), torch.uint8)
    pages = Fp8Pages.of(raw, block_size, kv_heads, head_dim)
    q, k = _meta((seqs, heads, head_dim), dtype), _meta((seqs, kv_heads, head_dim), dtype)
    yield Specialisation("kv_write_fp8", kv_write_launch(k, k, pages, pages, _meta((seqs,), torch.int64)))
    cache = (pages.codes, pages.codes, _meta((seqs, 64), torch.int32))
    scales, scale = (pages.scale, pages.scale), head_dim**-0.5
    lengths, splits = _meta((seqs,), torch.int32), 4
    partial = _meta((seqs * heads * splits * head_dim,), torch.float32)
    lse = _meta((seqs * heads * splits,), torch.float32)
    decode, combine = decode_launches(
        q,
        *cache,
        lengths,
        q,
        partial,
        lse,
        scale=scale,
        max_splits=splits,
        tile=tiles.decode,
        split_rule=heuristics.SPLIT_AT_LEAST,
        kv_scales=scales,
    )
    yield Specialisation("decode", decode)
    yield Specialisation("decode_combine", combine)
    starts = _meta((seqs + 1,), torch.int32)
    yield Specialisation(
        "prefill", prefill_launch(q, *cache, starts, lengths, q, scale=scale, tile=tiles.prefill, kv_scales=scales)
    )


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)
