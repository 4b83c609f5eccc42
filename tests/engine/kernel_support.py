"""What the kernel tests share: where to run, and paged K and V laid out to catch every stray read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels import heuristics

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def kernel_device() -> torch.device:
    """The CPU if Triton is interpreted (tests/conftest.py sees to it), else the GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return torch.device("cuda")
    from triton import knobs

    from tests.engine.interpreter import patch_once_a_launch

    assert knobs.runtime.interpret, "Triton was imported before TRITON_INTERPRET=1 was set"
    patch_once_a_launch()
    return torch.device("cpu")


def serving_tiles(head_dim: int, dtype: torch.dtype) -> heuristics.AttentionTiles:
    """The tiles that serving would use on the device of these tests."""
    arch = heuristics.INTERPRETER
    if kernel_device().type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    return heuristics.attention_tiles(arch, head_dim, dtype)


@dataclass(frozen=True)
class PagedBatch:
    """Sequences over shuffled pages. Everything that no sequence owns is NaN: spare pages, the tails of last pages."""

    q: torch.Tensor  # [tokens, heads, head_dim], a view of a wider matrix as a fused projection gives
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def random(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> PagedBatch:
        device = kernel_device()
        generator = torch.Generator().manual_seed(seed)
        pages_of = [-(-seq_len // block_size) for seq_len in seq_lens]
        width = max(1, *pages_of) + 1
        num_blocks = 1 + sum(pages_of) + 2
        order = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
        cache = torch.full((2, num_blocks, block_size, kv_heads, head_dim), float("nan"))
        tables = torch.full((len(seq_lens), width), num_blocks - 1, dtype=torch.int32)
        tables[:, -1] = 2**31 - 1  # a page number that must never be followed
        for seq, (seq_len, count) in enumerate(zip(seq_lens, pages_of, strict=True)):
            pages, order = order[:count], order[count:]
            tables[seq, :count] = torch.tensor(pages, dtype=torch.int32)
            rows = torch.randn(2, seq_len, kv_heads, head_dim, generator=generator)
            for position in range(seq_len):
                cache[:, pages[position // block_size], position % block_size] = rows[:, position]
        tokens = sum(query_lens)
        wide = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
        starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
        k_cache, v_cache = cache.to(device, dtype).unbind(0)
        return cls(
            wide[:, :heads],
            k_cache,
            v_cache,
            tables.to(device),
            starts.to(device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
        )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal within `dtype`'s rounding, and finite: a NaN of an unused page did not get in."""
    assert torch.isfinite(actual).all(), "a value that is not finite reached the result"
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
