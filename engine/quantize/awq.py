"""AWQ (arXiv 2306.00978): columns that meet large inputs are scaled up before rounding, and the inputs down.

A column's scale is `mean |x| ** alpha`; alpha is searched for the least error of the product (section 3.2). The inverse
of the scale goes into what makes the inputs: a norm's weight, or the rows of the matrix before. Then each group's range
is cut where that lessens the error further. Errors are those of the product on the calibration inputs, `sum_x |E x|^2 =
tr(E G E^T)` with their Gram matrix G.
"""

from __future__ import annotations

import torch

from engine.quantize.grid import Grid, range_grid

_ALPHAS = tuple(step / 20 for step in range(20))
_CUTS = tuple(1.0 - step / 20 for step in range(1, 11))
_LEAST_INPUT = 1e-4


def choose_scales(weight: torch.Tensor, gram: torch.Tensor, mean_abs: torch.Tensor, group_size: int) -> torch.Tensor:
    """The scales of the columns, float32 `[columns]`: all one where none are better.

    weight: `[rows, columns]`, of all matrices that share the inputs; mean_abs: `[columns]`, of the inputs.
    """
    best, least = torch.ones_like(mean_abs), float("inf")
    for alpha in _ALPHAS:
        scales = mean_abs.clamp(min=_LEAST_INPUT) ** alpha
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = product_error(_rounded(weight * scales, group_size) / scales - weight, gram)
        if error < least:
            best, least = scales, error
    return best


def awq(weight: torch.Tensor, gram: torch.Tensor, group_size: int) -> tuple[torch.Tensor, Grid]:
    """Rounded to nearest within ranges that are cut where it helps. As `engine.quantize.gptq.gptq`."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, -1, group_size)
    # The Gram matrices of the groups' own inputs, [groups, size, size]: what one group's error does by itself.
    own = gram.reshape(columns // group_size, group_size, -1, group_size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    best = range_grid(grouped, symmetric=False)
    least = _own_error(best.round(grouped) - grouped, own)
    for cut in _CUTS:
        grid = range_grid(grouped, symmetric=False, shrink=cut)
        error = _own_error(grid.round(grouped) - grouped, own)
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero))
    return best.index(grouped).reshape(rows, columns), best


def product_error(error: torch.Tensor, gram: torch.Tensor) -> float:
    """`tr(E G E^T)` of an error `[rows, columns]` in the weights."""
    return float(((error @ gram) * error).sum())


def _own_error(error: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`[rows, groups]` of `[rows, groups, size]`."""
    return (torch.einsum("rgi,gij->rgj", error, own) * error).sum(-1)


def _rounded(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    grouped = weight.reshape(len(weight), -1, group_size)
    return range_grid(grouped, symmetric=False).round(grouped).reshape(weight.shape)
