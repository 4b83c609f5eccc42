"""Which numbers the engine computes with on this machine: the data type, and which weights are held packed.

precision   device  weights
float32     any     decoded to float32: exact, reproduces transformers' greedy tokens
bfloat16    any     decoded to bfloat16
auto        cpu     packed (four and eight bits, where the file has them) for few rows, bfloat16 for many
auto        cuda    bfloat16
"""

from __future__ import annotations

import logging

import torch

from engine.layers.linear import LinearPolicy
from engine.memory import EngineMemoryError, available_bytes
from engine.models.spec import ModelSpec

logger = logging.getLogger(__name__)

PRECISIONS = ("auto", "float32", "bfloat16")
# Up to so many rows, reading packed weights beats oneDNN's dense products on a CPU (`bench/engine_step.py`).
_PACKED_ROWS = 16
# Room that must stay beside the weights, as a share of them.
_MARGIN = 1.1


def choose_policy(precision: str, device: torch.device, spec: ModelSpec, file_bytes: int) -> LinearPolicy:
    """How to hold the weights of a model of `spec` whose file has `file_bytes`.

    Raises ValueError for an unknown precision or a device that is not there, EngineMemoryError when the weights do not
    fit. Where packed and dense copies together do not fit, `auto` keeps the packed ones alone.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device here")
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    if precision == "auto" and device.type == "cpu" and not _fast_bfloat16():
        dtype = torch.float32
    dense = int(spec.num_parameters * dtype.itemsize * _MARGIN)
    packed = int(file_bytes * _MARGIN)
    free = free_bytes(device)
    if precision != "auto" or device.type == "cuda":
        if dense > free:
            raise EngineMemoryError(
                f"the weights need {dense:,} bytes as {str(dtype).removeprefix('torch.')}, {free:,} are free: "
                "use a smaller model, or precision auto on a CPU"
            )
        return LinearPolicy(device, dtype, packed_rows=0)
    if dense + packed <= free:
        return LinearPolicy(device, dtype, packed_rows=_PACKED_ROWS)
    if packed <= free:
        logger.warning("too little memory for dense copies of the weights: prompts will be slower")
        return LinearPolicy(device, dtype, packed_rows=_PACKED_ROWS, dense=False)
    raise EngineMemoryError(f"the weights need {packed:,} bytes, {free:,} are free: use a smaller model")


def free_bytes(device: torch.device) -> int:
    """Memory still to be had on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()


def _fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware; emulated, float32 is faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
