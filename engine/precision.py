"""Which numbers the engine computes with on this machine: the data type, and which weights are held packed.

precision   device  weights                                                             activations, KV cache
float32     any     decoded to float32: exact, reproduces transformers' greedy tokens   float32
bfloat16    any     decoded to bfloat16                                                 bfloat16
auto        cpu     packed (four and eight bits) where the file has them, else decoded  float32
auto        cuda    packed (four and eight bits) where the file has them, else bfloat16  bfloat16

On a CPU where the compiled product with packed weights is slower at prompts than dense ones, or missing, packed weights
serve few rows only, and a decoded copy the others. What is decoded there is bfloat16 where the processor is faster at
it, else float32. On a GPU packed weights serve every row count: for many rows they are decoded as they are needed.
"""

from __future__ import annotations

import logging

import torch

from engine.kernels import product_table
from engine.layers import linear_native, probe
from engine.layers.linear import LinearPolicy, packed_bytes, packing_copies
from engine.memory import Demand, EngineMemoryError, MemoryPlan, Storage, available_bytes, gpu_storage

logger = logging.getLogger(__name__)

PRECISIONS = ("auto", "float32", "bfloat16")
# Up to so many rows packed products beat dense ones on a CPU without byte products (`bench/engine_step.py`).
_PACKED_ROWS = 8
# A dense copy, several times as large as the packed weights, has to pay: up to so much of its speed they serve alone.
_FAST_ENOUGH = 0.9
# Rounding prompts to bfloat16 has to pay: from so many times float32's speed on.
_WORTHWHILE_GAIN = 1.3


def choose_policy(precision: str, device: torch.device, demand: Demand) -> tuple[LinearPolicy, MemoryPlan]:
    """How to hold the weights of a model, and what that takes.

    Raises ValueError for an unknown precision or a device that is not there, EngineMemoryError when the model does not
    fit. Where packed and dense copies together do not fit, or the packed ones are fast at prompts too, `auto` keeps
    them alone.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device here")
    policies = _candidates(precision, device)
    free = free_bytes(device) // demand.ranks
    plans = [demand.plan(_storage(policy)) for policy in policies]
    for policy, plan in zip(policies, plans, strict=True):
        if plan.total_bytes <= free:
            if policy is not policies[0]:
                logger.warning("too little memory for dense copies of the weights: prompts will be slower")
            return policy, plan
    raise EngineMemoryError(plans[-1].refusal(free))


def _candidates(precision: str, device: torch.device) -> list[LinearPolicy]:
    """Policies in order of preference, each smaller than the one before."""
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if precision == "float32" or (precision == "auto" and on_cpu) else torch.bfloat16
    if precision != "auto":
        return [LinearPolicy(device, dtype, packed_rows=0, triton=not on_cpu)]
    if not on_cpu:
        return [LinearPolicy(device, dtype, packed_rows=product_table.CUBLAS_ABOVE_ROWS, dense=False, triton=True)]
    dense_dtype, dense_gain = dtype, 1.0
    if probe.bfloat16_gain() >= _WORTHWHILE_GAIN:
        dense_dtype, dense_gain = torch.bfloat16, probe.bfloat16_gain()
    alone = LinearPolicy(device, dtype, packed_rows=_PACKED_ROWS, dense=False, dense_dtype=dense_dtype)
    if linear_native.prompt_gain() >= _FAST_ENOUGH * dense_gain:
        return [alone]
    return [LinearPolicy(device, dtype, packed_rows=_PACKED_ROWS, dense_dtype=dense_dtype), alone]


def _storage(policy: LinearPolicy) -> Storage:
    packed = bool(policy.packed_rows)
    if policy.device.type == "cuda":
        return gpu_storage(policy.dtype.itemsize, packed=packed)
    return Storage(
        element_bytes=policy.dtype.itemsize,
        dense_element_bytes=(policy.dense_dtype or policy.dtype).itemsize,
        keep_dense=policy.dense,
        packed_bytes=packed_bytes if packed else None,
        packing_copies=packing_copies() if packed else 0,
    )


def free_bytes(device: torch.device) -> int:
    """Memory still to be had on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()
