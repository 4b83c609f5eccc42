"""The decoder's small operations by Triton kernels: `BlockOps` on CUDA."""

from __future__ import annotations

import torch

from engine.kernels.gated import gated_launch
from engine.kernels.rms_norm import rms_norm_launch
from engine.kernels.rotary import rotary_launch
from engine.models.spec import Activation


class TritonOps:
    """`BlockOps`, one launch per operation. Inputs of more than two dimensions count as rows of their last one."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width = x.shape[-1]
        rms_norm_launch(x.reshape(-1, width), weight, eps, out.view(-1, width)).run()
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not residual.is_contiguous():
            raise ValueError("the residual is updated in place and must be contiguous")
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width = x.shape[-1]
        rms_norm_launch(x.reshape(-1, width), weight, eps, out.view(-1, width), residual.view(-1, width)).run()
        return out

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary_launch(q, k, cos_sin, positions).run()
        return q, k

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
        gated_launch(gate_up, out, activation).run()
        return out
