"""The decoder's small operations by the compiled kernels; plain torch for shapes they do not serve."""

from __future__ import annotations

import ctypes

import torch

from engine.layers import native
from engine.layers.ops_torch import TorchOps
from engine.models.spec import Activation

_LANES = 16


class NativeOps(TorchOps):
    """`BlockOps` on a CPU, for bfloat16 and float32. Norm weights are float32, as `Decoder` keeps them.

    What the kernels do not serve takes torch's way: row lengths that are no multiple of 16, and tensors to be changed
    in place whose rows or heads do not lie side by side.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm, self._rotate, self._gate = library.tl_rms_norm, library.tl_rotary, library.tl_gated

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = x.shape[-1]
        if width % _LANES:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // width
        kind = native.ELEMENT_TYPES[x.dtype]
        self._norm(x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), rows, width, eps, kind)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = x.shape[-1]
        if width % _LANES or residual.dtype != torch.float32 or not residual.is_contiguous():
            return super().add_rms_norm(x, residual, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        kind = native.ELEMENT_TYPES[x.dtype]
        self._norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], width, eps, kind)
        return out

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary_dim = cos_sin.shape[1]
        if rotary_dim % (2 * _LANES) or any(part.stride(1) != part.shape[2] for part in (q, k)):
            return super().rotary(q, k, cos_sin, positions)
        for part in (q, k):
            tokens, heads, head_dim = part.shape
            self._rotate(
                part.data_ptr(),
                part.stride(0),
                cos_sin.data_ptr(),
                positions.data_ptr(),
                tokens,
                heads,
                head_dim,
                rotary_dim,
                native.ELEMENT_TYPES[part.dtype],
            )
        return q, k

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % _LANES:
            return super().gated(gate_up, activation)
        gate_up = gate_up.contiguous()
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        kind = native.ELEMENT_TYPES[gate_up.dtype]
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width, native.ACTIVATIONS[activation], kind)
        return out
