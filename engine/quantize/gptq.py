"""GPTQ (arXiv 2210.17323): columns are rounded one after the other, and those to come make up for each one's error.

With H the inputs' Gram matrix and U the upper Cholesky factor of its inverse, rounding column i with error e leaves the
product nearest if every later column j loses `e * U[i, j] / U[i, i]` (Algorithm 1). Columns to come are updated in
blocks, not one by one: fewer passes over memory.
"""

from __future__ import annotations

import torch

from engine.quantize.grid import Grid, search_grid

# Added to the diagonal, as a part of its mean: keeps the inverse well-behaved (section 4).
DAMPING = 0.01
_BLOCK = 128


def gptq(
    weight: torch.Tensor, gram: torch.Tensor, group_size: int, *, symmetric: bool = True
) -> tuple[torch.Tensor, Grid]:
    """weight: float32 `[rows, columns]`; gram: `[columns, columns]`, the sum of `x x^T` over the inputs x.

    Returns q, float32 `[rows, columns]`, and the grid, `[rows, groups]`.
    """
    weight, factor = weight.clone(), _inverse_factor(gram)
    rows, columns = weight.shape
    dead = gram.diagonal() == 0
    weight[:, dead] = 0  # never multiplied by anything: nothing to keep
    q = torch.empty_like(weight)
    scales, zeros = [], []
    step = min(_BLOCK, group_size)
    grid = Grid(torch.empty(rows), torch.empty(rows))
    for start in range(0, columns, step):
        if start % group_size == 0:
            # Of the weights as they are by now: what earlier columns left to them is in them.
            grid = search_grid(weight[:, start : start + group_size], symmetric=symmetric)
            scales.append(grid.scale)
            zeros.append(grid.zero)
        stop = min(start + step, columns)
        errors = torch.empty(rows, stop - start)
        for at in range(start, stop):
            column = weight[:, at]
            q[:, at] = grid.index(column[:, None])[:, 0]
            error = (column - (q[:, at] - grid.zero) * grid.scale) / factor[at, at]
            weight[:, at:stop] -= error[:, None] * factor[at, at:stop]
            errors[:, at - start] = error
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return q, Grid(torch.stack(scales, dim=1), torch.stack(zeros, dim=1))


def _inverse_factor(gram: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Gram matrix's inverse, float32. More damping where it is singular."""
    matrix = gram.double()
    diagonal = matrix.diagonal()
    matrix = matrix + torch.diag((diagonal == 0).double())
    damping = DAMPING * diagonal.mean().clamp(min=1e-12)
    for _ in range(8):
        lower, failed = torch.linalg.cholesky_ex(matrix + damping * torch.eye(len(matrix), dtype=torch.double))
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
            return factor.float()
        damping = damping * 10
    raise ValueError("the calibration inputs are not finite, or too few to say anything")
