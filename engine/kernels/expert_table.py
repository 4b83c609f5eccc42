"""The tiles of the experts' products, by how many rows an expert gets on average: every tuned number of `moe_gemm.py`.

Few rows: an expert's weights are read once whatever the tile, so it is as low as the tensor cores allow, with as many
reads in flight as fit. Many rows: tall tiles, which read the weights less often. The values come from compiled
resources (no spills, at most the 99 KiB of shared memory of the small chips), not yet from timings on a GPU. A
committed table and no autotuner, for the reasons in `heuristics.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Rows, columns and summed elements per tile, warps per program, pipeline stages. Packed weights take a group of
    32 elements whatever `block_k` says."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# (up to so many rows per expert, tile), the last one for all beyond.
_DENSE = (
    (16, ExpertTile(16, 64, 128, 4, 4)),
    (64, ExpertTile(64, 128, 64, 4, 3)),
    (0, ExpertTile(128, 128, 64, 8, 3)),
)
_PACKED = (
    (16, ExpertTile(16, 128, 32, 4, 8)),
    (64, ExpertTile(64, 64, 32, 4, 5)),
    (0, ExpertTile(128, 64, 32, 8, 5)),
)
# float32 is for exactness, not speed: products without tensor cores, small tiles.
_EXACT = ((0, ExpertTile(16, 32, 32, 4, 2)),)


def tiles_for(dtype: torch.dtype, encoding: str) -> Sequence[ExpertTile]:
    """All tiles that activations of `dtype` and weights in `encoding` can meet, those of few rows first."""
    return [tile for _, tile in _table(dtype, encoding)]


def tile_for(rows: int, experts: int, dtype: torch.dtype, encoding: str) -> ExpertTile:
    """The tile for `rows` slots over `experts`, by what the host knows: their mean, not how they are spread."""
    *steps, (_, tallest) = _table(dtype, encoding)
    return next((tile for most, tile in steps if rows <= most * experts), tallest)


def _table(dtype: torch.dtype, encoding: str) -> Sequence[tuple[int, ExpertTile]]:
    if dtype == torch.float32:
        return _EXACT
    return _DENSE if encoding == "dense" else _PACKED
