"""A mixture of experts on CUDA: all experts in two grouped products, without asking the device how tokens were routed.

    scores = x router^T (float32)  ->  route, permute  ->  gate_up with the activation  ->  down  ->  combine

The kernels are in `engine/kernels/moe_routing.py` and `moe_gemm.py`; what they take is made in `moe_weights.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.expert_table import ExpertTile, tile_for, tiles_for
from engine.kernels.launch import Launch
from engine.kernels.moe_gemm import ExpertWeights, expert_launch
from engine.kernels.moe_routing import Routing, combine_launch, routing_launches
from engine.layers.linear import LinearPolicy
from engine.layers.linear_triton import Chip
from engine.layers.moe_weights import stack_experts
from engine.layers.ops import BlockOps
from engine.models.spec import Activation, MoeSpec
from engine.models.tensors import ExpertTensors


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """x: `[tokens, hidden]` -> `[tokens, hidden]`, in x's dtype. As `engine.layers.moe.MixtureOfExperts`, but that
    a token's outputs are added in the order of its choices, and the activation sees unrounded sums.

    Where other ranks hold other experts, this is the sum of what those here yield."""

    router: torch.Tensor  # float32 [experts, hidden]
    router_bias: torch.Tensor | None  # float32 [experts]
    gate_up: ExpertWeights
    down: ExpertWeights
    activation: Activation
    top_k: int
    renormalise: bool
    first: int = 0  # the number of the first expert that is here
    upcast: bool = False  # multiply in float32: Triton's interpreter gets bfloat16 products wrong

    def __call__(self, x: torch.Tensor, ops: BlockOps) -> torch.Tensor:
        return self.run(x, tile_for(x.shape[0] * self.top_k, len(self.router), x.dtype, self.gate_up.encoding))

    def run(self, x: torch.Tensor, tile: ExpertTile) -> torch.Tensor:
        """The call, by `tile`."""
        x = x.contiguous()
        tokens, hidden = x.shape
        scores = torch.nn.functional.linear(x.float(), self.router, self.router_bias)
        here = range(self.first, self.first + len(self.gate_up.data))
        routing = Routing.empty(tokens, self.top_k, len(self.router), tile.block_m, x.device, here)
        inner = torch.empty(tokens * self.top_k, self.down.columns, dtype=x.dtype, device=x.device)
        y = torch.empty(tokens * self.top_k, hidden, dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        launches = [
            *routing_launches(scores, routing, renormalise=self.renormalise, block_m=tile.block_m),
            self._product(x, self.gate_up, routing, inner, tile, self.activation),
            self._product(inner, self.down, routing, y, tile),
            combine_launch(y, routing, out),
        ]
        for launch in launches:
            launch.run()
        return out

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what calls with activations of `dtype` will need: one token by every tile."""
        x = torch.zeros(1, self.router.shape[1], dtype=dtype, device=self.router.device)
        for tile in tiles_for(dtype, self.gate_up.encoding):
            self.run(x, tile)

    @property
    def num_bytes(self) -> int:
        """What the weights of router and experts occupy."""
        bias = 0 if self.router_bias is None else self.router_bias.nbytes
        return self.router.nbytes + bias + self.gate_up.num_bytes + self.down.num_bytes

    def _product(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        routing: Routing,
        out: torch.Tensor,
        tile: ExpertTile,
        activation: Activation | None = None,
    ) -> Launch:
        return expert_launch(
            x,
            weights,
            routing.blocks,
            routing.order,
            out,
            top_k=self.top_k,
            tile=tile,
            activation=activation,
            upcast=self.upcast,
        )


def build_fused(
    tensors: ExpertTensors,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    policy: LinearPolicy,
    spec: MoeSpec,
    activation: Activation,
) -> FusedExperts:
    """The experts with these weights, held as `policy` asks, their kernels compiled where the device is a GPU."""
    gate_up, down = stack_experts(tensors.experts, policy)
    fused = FusedExperts(
        router=router,
        router_bias=router_bias,
        gate_up=gate_up,
        down=down,
        activation=activation,
        top_k=spec.top_k,
        renormalise=spec.renormalise,
        first=tensors.first,
        upcast=Chip.of(policy.device).upcasts(policy.dtype),
    )
    if policy.device.type == "cuda":
        fused.warm_up(policy.dtype)
    return fused
