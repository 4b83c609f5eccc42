"""The decoder's small operations (norm, rotary embedding, gated activation) behind one interface.

The decoder calls a `BlockOps`; `build_ops` chooses the implementation by device: `ops_triton.TritonOps` on CUDA (where
Triton is installed), `ops_cpu.NativeOps` on a CPU with a C compiler, `TorchOps`, plain torch and the reference for
the other two, everywhere else. All take norms and activations in float32 inside and return the input's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.models.spec import Activation


class BlockOps(Protocol):
    """What a decoder block needs besides matrix products and attention."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467). x: `[tokens, hidden]`."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`residual += x` in place, then the norm of `residual`, in x's dtype. x, residual: `[tokens, hidden]`.

        The residual may be wider than x: the decoder keeps it in float32, where 2 * layers additions lose nothing.
        """
        ...

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k by position, in place where the implementation can; use the returned tensors.

        q: `[tokens, heads, head_dim]`, k: `[tokens, kv_heads, head_dim]`, unit stride in the last dimension; cos_sin:
        float32 `[max_positions, rotary_dim]`, cosines then sines of `rotary_dim / 2` frequencies; positions: int64
        `[tokens]`. Halves convention ("NeoX"): element `i` pairs with element `i + rotary_dim / 2`.
        """
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """`silu(gate) * up`, or what `activation` says. gate_up: `[tokens, 2 * intermediate]`, gate first. Returns
        `[tokens, intermediate]`."""
        ...
