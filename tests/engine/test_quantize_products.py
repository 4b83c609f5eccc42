"""GPTQ and AWQ on single products: against the plain definitions, and better than rounding to nearest."""

from __future__ import annotations

import pytest
import torch

from engine.quantize.awq import awq, choose_scales, product_error
from engine.quantize.gptq import DAMPING, gptq
from engine.quantize.grid import Grid, range_grid, search_grid

ROWS, COLUMNS, GROUP = 16, 96, 32


def inputs(count: int = 2000, seed: int = 0) -> torch.Tensor:
    """Correlated, and some columns much larger than others, as activations are."""
    fixed, generator = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    mixing, sizes = torch.randn(24, COLUMNS, generator=fixed), torch.randn(COLUMNS, generator=fixed).exp()
    causes, noise = (torch.randn(count, width, generator=generator) for width in (24, COLUMNS))
    return (causes @ mixing / 24**0.5 + 0.3 * noise) * sizes


def weights(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.05


def values(q: torch.Tensor, grid: Grid) -> torch.Tensor:
    grouped = q.reshape(len(q), grid.scale.shape[1], -1)
    return ((grouped - grid.zero[..., None]) * grid.scale[..., None]).reshape(q.shape)


def nearest(weight: torch.Tensor, *, symmetric: bool) -> torch.Tensor:
    grouped = weight.reshape(len(weight), -1, GROUP)
    return range_grid(grouped, symmetric=symmetric).round(grouped).reshape(weight.shape)


@pytest.mark.parametrize("symmetric", [True, False])
def test_grids(symmetric: bool) -> None:
    weight = weights().reshape(ROWS, -1, GROUP)
    for grid in (range_grid(weight, symmetric=symmetric), search_grid(weight, symmetric=symmetric)):
        q = grid.index(weight)
        assert q.min() >= 0
        assert q.max() <= 15
        assert torch.equal(q, q.round())
        assert torch.equal(grid.scale, grid.scale.half().float())
        assert torch.equal(grid.zero, grid.zero.round())
        assert bool((grid.zero == 8).all()) == symmetric
    whole = range_grid(weight, symmetric=False)
    assert ((whole.round(weight) - weight).abs() <= 0.51 * whole.scale[..., None] + 1e-6).all()
    assert (range_grid(torch.zeros(2, 4), symmetric=symmetric).round(torch.zeros(2, 4)) == 0).all()


def plain_gptq(weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Optimal brain quantisation in a fixed order, from the definition: after each column the inverse Gram matrix of
    those left is made anew."""
    weight, matrix = weight.double(), gram.double()
    matrix = matrix + DAMPING * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.double)
    out = torch.empty_like(weight)
    for at in range(weight.shape[1]):
        if at % GROUP == 0:
            grid = search_grid(weight[:, at : at + GROUP].float(), symmetric=True)
        inverse = torch.linalg.inv(matrix[at:, at:])
        out[:, at] = grid.round(weight[:, at : at + 1].float())[:, 0]
        error = (weight[:, at] - out[:, at]) / inverse[0, 0]
        weight[:, at:] -= error[:, None] * inverse[0]
    return out


def test_gptq_is_the_plain_algorithm() -> None:
    x = inputs()
    gram, weight = x.T @ x, weights()
    got = values(*gptq(weight, gram, GROUP))
    want = plain_gptq(weight, gram).float()
    # Numbers half way between two levels may fall to either side, and what follows with them.
    assert float((got != want).float().mean()) < 0.02
    assert abs(product_error(got - weight, gram) / product_error(want - weight, gram) - 1) < 0.02


def test_gptq_rounds_to_nearest_where_inputs_are_unrelated() -> None:
    weight = weights()
    q, grid = gptq(weight, torch.eye(COLUMNS), GROUP)
    grouped = weight.reshape(ROWS, -1, GROUP)
    assert torch.equal(values(q, grid), search_grid(grouped, symmetric=True).round(grouped).reshape(weight.shape))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 96])
def test_gptq_beats_rounding_to_nearest(symmetric: bool, group: int) -> None:
    x, weight = inputs(), weights()
    gram, fresh = x.T @ x, inputs(seed=7)
    q, grid = gptq(weight, gram, group, symmetric=symmetric)
    assert grid.scale.shape == (ROWS, COLUMNS // group)
    before = product_error(nearest(weight, symmetric=symmetric) - weight, fresh.T @ fresh)
    assert product_error(values(q, grid) - weight, fresh.T @ fresh) < 0.6 * before


def test_gptq_of_inputs_that_say_little() -> None:
    """Fewer inputs than columns, and columns that are always zero."""
    x = inputs(count=20)
    x[:, 5] = 0
    q, grid = gptq(weights(), x.T @ x, GROUP)
    assert torch.isfinite(values(q, grid)).all()
    assert (values(q, grid)[:, 5] == 0).all()
    with pytest.raises(ValueError, match="not finite"):
        gptq(weights(), torch.full((COLUMNS, COLUMNS), float("nan")), GROUP)


def test_awq_beats_rounding_to_nearest() -> None:
    x, weight = inputs(), weights()
    gram, mean_abs = x.T @ x, x.abs().mean(0)
    scales = choose_scales(weight, gram, mean_abs, GROUP)
    assert scales.shape == (COLUMNS,)
    assert float(scales.max() * scales.min()) == pytest.approx(1.0, rel=1e-4)
    plain = product_error(nearest(weight, symmetric=False) - weight, gram)
    scaled = product_error(nearest(weight * scales, symmetric=False) / scales - weight, gram)
    assert scaled < 0.8 * plain
    # The cut is chosen on the scaled product: inputs divided by the scales.
    q, grid = awq(weight * scales, gram / scales / scales[:, None], GROUP)
    assert product_error(values(q, grid) / scales - weight, gram) < scaled


def test_awq_of_even_inputs_scales_nothing() -> None:
    assert torch.equal(choose_scales(weights(), torch.eye(COLUMNS), torch.ones(COLUMNS), GROUP), torch.ones(COLUMNS))


def test_product_error_is_that_of_the_product() -> None:
    x, error = inputs(), weights()
    assert product_error(error, x.T @ x) == pytest.approx(float((x @ error.T).square().sum()), rel=1e-4)


def test_groups_see_their_own_inputs() -> None:
    """Cutting ranges never makes a group's own part of the error larger."""
    x, weight = inputs(), weights()
    gram = x.T @ x
    q, grid = awq(weight, gram, GROUP)
    rounded = nearest(weight, symmetric=False)
    for start in range(0, COLUMNS, GROUP):
        part = slice(start, start + GROUP)
        own = x[:, part].T @ x[:, part]
        for row in range(ROWS):
            cut = (values(q, grid) - weight)[row : row + 1, part]
            plain = (rounded - weight)[row : row + 1, part]
            assert product_error(cut, own) <= product_error(plain, own) * (1 + 1e-4)
