"""Products that do the norm before them, too: those that quantise their input can do it in the same pass."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from engine.layers.linear import Linear
from engine.layers.ops import BlockOps


class NormedLinear(ABC):
    """`Linear` of x, or of the norm of x."""

    in_features: int
    out_features: int
    num_bytes: int

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `Linear`."""

    @abstractmethod
    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """The product with `BlockOps.add_rms_norm(x, residual, weight, eps)`, residual updated in place; without a
        residual with `BlockOps.rms_norm(x, weight, eps)`. Returns x's dtype."""


def norm_and_multiply(
    linear: Linear, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, ops: BlockOps
) -> torch.Tensor:
    """`linear` of the norm, in one kernel less where it can: see `NormedLinear.after_norm`."""
    if isinstance(linear, NormedLinear):
        return linear.after_norm(x, residual, weight, eps)
    if residual is None:
        return linear(ops.rms_norm(x, weight, eps))
    return linear(ops.add_rms_norm(x, residual, weight, eps))
