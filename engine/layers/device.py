"""Which implementation of the layers' interfaces runs on a device; chosen once, when the model is loaded.

Imports are inside: a CPU machine needs no Triton, a GPU machine no C compiler.
"""

from __future__ import annotations

import torch

from engine.layers.attention import AttentionBackend, AttentionConfig
from engine.layers.ops import BlockOps


def build_attention(config: AttentionConfig, *, deterministic: bool = False) -> AttentionBackend:
    """Attention for `config.device`: Triton on CUDA, torch with an optional C kernel on a CPU.

    `deterministic`: see `TritonAttention`. Raises ValueError for any other device, and for what a device has not.
    """
    if deterministic and config.device.type != "cuda":
        raise ValueError("deterministic attention is for GPUs: on a CPU leave it out")
    if config.device.type == "cuda":
        from engine.layers.attention_triton import TritonAttention

        return TritonAttention(config, deterministic=deterministic)
    if config.device.type == "cpu":
        if config.fp8:
            raise ValueError("a KV cache of eight-bit floats is for GPUs: leave kv_dtype at auto on a CPU")
        from engine.layers.attention_cpu import CpuAttention

        return CpuAttention(config)
    raise ValueError(f"no attention for device {config.device}: use cuda or cpu")


def build_ops(device: torch.device) -> BlockOps:
    """The small operations for `device`: Triton on CUDA, compiled C where there is a compiler, else plain torch."""
    if device.type == "cuda":
        from engine.layers.ops_triton import TritonOps

        return TritonOps()
    from engine.layers import native
    from engine.layers.ops_cpu import NativeOps
    from engine.layers.ops_torch import TorchOps

    library = native.library() if device.type == "cpu" else None
    return TorchOps() if library is None else NativeOps(library)
