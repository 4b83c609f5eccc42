"""A mixture of experts (arXiv 2101.03961, 2401.04088): a router sends every token to `top_k` of the gated networks.

The router works in float32 whatever the activations' dtype: the choice of experts hangs on its last digits. Tokens are
sorted by expert, so that each expert's weights are read once a step and only if somebody asks for them. A token's
outputs are added in the order of the experts' numbers, in float32: its result does not depend on the other tokens.

This is every device's way and the reference. On CUDA the whole mixture runs in grouped products: `moe_triton.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.layers.linear import LinearPolicy
from engine.layers.mlp import GatedMlp, build_mlp
from engine.layers.ops import BlockOps
from engine.models.spec import Activation, MoeSpec
from engine.models.tensors import ExpertTensors


class Experts(Protocol):
    """x: `[tokens, hidden]` -> `[tokens, hidden]`, in x's dtype."""

    @property
    def num_bytes(self) -> int:
        """What the weights of router and experts occupy."""
        ...

    def __call__(self, x: torch.Tensor, ops: BlockOps) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """x: `[tokens, hidden]` -> `[tokens, hidden]`, in x's dtype.

    Where other experts are elsewhere, this is the sum of what those here yield.
    """

    router: torch.Tensor  # float32 [experts, hidden]
    router_bias: torch.Tensor | None  # float32 [experts]
    experts: list[GatedMlp]
    top_k: int
    renormalise: bool
    first: int = 0  # the number of `experts[0]`

    def __call__(self, x: torch.Tensor, ops: BlockOps) -> torch.Tensor:
        weights, chosen = self.route(x)
        slots = chosen.flatten().argsort(stable=True)  # [tokens * top_k], by expert
        tokens = slots // self.top_k
        inputs, shares = x.index_select(0, tokens), weights.flatten().index_select(0, slots).unsqueeze(1)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.router)).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start, end = sum(counts[: self.first]), self.first + len(self.experts)
        for expert, count in zip(self.experts, counts[self.first : end], strict=True):
            if count:
                part = slice(start, start + count)
                out.index_add_(0, tokens[part], expert(inputs[part], ops).float() * shares[part])
                start += count
        return out.to(x.dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int64 `[tokens, top_k]`, and before them their weights, float32."""
        scores = torch.nn.functional.linear(x.float(), self.router, self.router_bias)
        if self.renormalise:
            picked, chosen = scores.topk(self.top_k, dim=-1)
            return picked.softmax(dim=-1), chosen
        shares, chosen = scores.softmax(dim=-1).topk(self.top_k, dim=-1)
        return shares, chosen

    @property
    def num_bytes(self) -> int:
        """What the weights of router and experts occupy."""
        bias = 0 if self.router_bias is None else self.router_bias.nbytes
        return self.router.nbytes + bias + sum(expert.num_bytes for expert in self.experts)


def build_experts(tensors: ExpertTensors, policy: LinearPolicy, spec: MoeSpec, activation: Activation) -> Experts:
    """The experts with these weights, held as `policy` asks."""

    def on_device(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(policy.device)

    router = on_device(tensors.router)
    router_bias = None if tensors.router_bias is None else on_device(tensors.router_bias)
    if policy.triton:
        from engine.layers.moe_triton import build_fused
        from engine.layers.moe_weights import stackable

        if stackable(tensors.experts, policy):
            return build_fused(tensors, router, router_bias, policy, spec, activation)
    return MixtureOfExperts(
        router=router,
        router_bias=router_bias,
        experts=[build_mlp(expert, policy, activation) for expert in tensors.experts],
        top_k=spec.top_k,
        renormalise=spec.renormalise,
        first=tensors.first,
    )
