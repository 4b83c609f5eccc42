"""The grid that four-bit weights lie on: `w = scale * (q - zero)`, one scale and zero per row and group of columns.

Scales are float16 numbers, as files store them, before anything is rounded to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELS = 15  # q is 0 to 15
_MIDDLE = 8
_SMALLEST = 2.0**-24  # of float16's numbers
# Parts of a group's range that `search_grid` tries to do with, and how much a far miss counts.
_SHRINKS = tuple(1.0 - step / 40 for step in range(13))
_NORM = 2.4


@dataclass(frozen=True, slots=True)
class Grid:
    """`scale`, `zero`: float32 `[rows, ...]`, one for each group."""

    scale: torch.Tensor
    zero: torch.Tensor

    def index(self, weight: torch.Tensor) -> torch.Tensor:
        """q, as floats. `weight`'s last dimension is a group's columns."""
        return (weight / self.scale[..., None] + self.zero[..., None]).round().clamp(0, LEVELS)

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` on the grid."""
        return (self.index(weight) - self.zero[..., None]) * self.scale[..., None]


def range_grid(weight: torch.Tensor, *, symmetric: bool, shrink: float = 1.0) -> Grid:
    """The grid that spans `shrink` of the range of each group. `weight`: `[..., columns of a group]`.

    Symmetric grids have their zero at 8 and reach from -8 to 7 steps; others start at the lowest weight, zero included.
    """
    if symmetric:
        scale = weight.abs().amax(-1) * shrink * 2 / LEVELS
    else:
        lowest, highest = weight.amin(-1).clamp(max=0) * shrink, weight.amax(-1).clamp(min=0) * shrink
        scale = (highest - lowest) / LEVELS
    scale = scale.half().float().clamp(min=_SMALLEST)
    if symmetric:
        return Grid(scale, torch.full_like(scale, _MIDDLE))
    return Grid(scale, (-lowest / scale).round().clamp(0, LEVELS))


def search_grid(weight: torch.Tensor, *, symmetric: bool) -> Grid:
    """Of grids that span less and less of the range, the one nearest to each group's weights (exponent 2.4)."""
    best = range_grid(weight, symmetric=symmetric)
    least = (best.round(weight) - weight).abs().pow(_NORM).sum(-1)
    for shrink in _SHRINKS[1:]:
        grid = range_grid(weight, symmetric=symmetric, shrink=shrink)
        error = (grid.round(weight) - weight).abs().pow(_NORM).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero))
    return best
