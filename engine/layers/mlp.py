"""The gated feed-forward network of a block: `down(activation(gate, up))` with gate and up in one product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear, LinearPolicy, build_linear
from engine.layers.normed import norm_and_multiply
from engine.layers.ops import BlockOps
from engine.models.spec import Activation
from engine.models.tensors import NetworkTensors


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """x: `[tokens, hidden]` -> `[tokens, hidden]`, in x's dtype."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor, ops: BlockOps) -> torch.Tensor:
        return self.down(ops.gated(self.gate_up(x), self.activation))

    def after_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, ops: BlockOps
    ) -> torch.Tensor:
        """Of `ops.add_rms_norm(x, residual, weight, eps)`, with its residual updated in place."""
        gate_up = norm_and_multiply(self.gate_up, x, residual, weight, eps, ops)
        return self.down(ops.gated(gate_up, self.activation))

    @property
    def num_bytes(self) -> int:
        """What the weights occupy."""
        return self.gate_up.num_bytes + self.down.num_bytes


def build_mlp(tensors: NetworkTensors, policy: LinearPolicy, activation: Activation) -> GatedMlp:
    """The network with these weights, held as `policy` asks."""
    return GatedMlp(
        build_linear(tensors.gate_up, policy, tensors.gate_up_bias),
        build_linear([tensors.down], policy, tensors.down_bias),
        activation,
    )
