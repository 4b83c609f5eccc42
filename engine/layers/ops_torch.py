"""The decoder's small operations in plain torch: every device, and the reference for the other implementations."""

from __future__ import annotations

import torch

from engine.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


class TorchOps:
    """`BlockOps` in plain torch."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _normed(x, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _normed(residual.add_(x), weight, eps).to(x.dtype)

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
        for part in (q, k):
            half = cos.shape[-1]
            first, second = part[..., :half].float(), part[..., half : 2 * half].float()
            # Both before either is written: in float32 `first` and `second` are views of `part`.
            turned = first * cos - second * sin, second * cos + first * sin
            part[..., :half] = turned[0]
            part[..., half : 2 * half] = turned[1]
        return q, k

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        match activation:
            case Activation.SILU:
                product = torch.nn.functional.silu(gate) * up
            case Activation.GELU_TANH:
                product = torch.nn.functional.gelu(gate, approximate="tanh") * up
            case Activation.CLAMPED_SWIGLU:
                gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
                product = gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
        return product.to(gate_up.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x, in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return wide * scale * weight.float()
