"""A block's matrices rounded by one of the methods: what is written, and the same block in floats on the grid.

AWQ scales the inputs of q, k and v and of gate and up, whose inverse goes into the norm before them, and those of down,
whose inverse goes into the rows of up. The attention's output has no place for it and is only cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.models.tensors import FloatArray, LayerTensors, NetworkTensors
from engine.quant.blocks import dense
from engine.quant.int4 import Int4Matrix, pack_int4
from engine.quant.matrix import WeightMatrix
from engine.quantize.awq import awq, choose_scales
from engine.quantize.block import InputStatistics
from engine.quantize.gptq import gptq
from engine.quantize.grid import Grid

METHODS = ("awq", "gptq")


@dataclass(frozen=True, slots=True)
class QuantizedBlock:
    """`tensors`: the block as it computes now, in floats. `matrices` and `norms`: what changed, by role ("q", "k", "v",
    "attention_output", "gate", "up", "down"; "attention_norm", "mlp_norm")."""

    tensors: LayerTensors
    matrices: Mapping[str, Int4Matrix]
    norms: Mapping[str, FloatArray] = field(default_factory=dict)


def quantize_block(
    tensors: LayerTensors, inputs: Mapping[str, InputStatistics], method: str, group_size: int
) -> QuantizedBlock:
    """Raises ValueError for a block that has not the seven matrices of a plain one."""
    mlp = tensors.mlp
    if not isinstance(mlp, NetworkTensors) or len(tensors.qkv) != 3 or len(mlp.gate_up) != 2:
        raise ValueError("only blocks with q, k, v, o, gate, up and down as seven matrices can be quantised")
    groups = {
        "qkv": (("q", "k", "v"), tensors.qkv),
        "attention_output": (("attention_output",), [tensors.attention_output]),
        "gate_up": (("gate", "up"), mlp.gate_up),
        "down": (("down",), [mlp.down]),
    }
    weights = {name: _stacked(matrices) for name, (_, matrices) in groups.items()}
    norms: dict[str, FloatArray] = {}
    grams = {name: statistics.gram for name, statistics in inputs.items()}
    if method == "awq":
        norms = _scale(weights, grams, inputs, tensors, group_size)
    matrices: dict[str, Int4Matrix] = {}
    for name, (roles, parts) in groups.items():
        if method == "awq":
            q, grid = awq(weights[name], grams[name], group_size)
        else:
            q, grid = gptq(weights[name], grams[name], group_size)
        whole = _matrix(q, grid, method.upper())
        start = 0
        for role, part in zip(roles, parts, strict=True):
            matrices[role] = whole.rows(start, start + part.num_rows)
            start += part.num_rows
    floats = {role: dense(matrix.dequantize()) for role, matrix in matrices.items()}
    changed = replace(
        tensors,
        **norms,
        qkv=[floats["q"], floats["k"], floats["v"]],
        attention_output=floats["attention_output"],
        mlp=replace(mlp, gate_up=[floats["gate"], floats["up"]], down=floats["down"]),
    )
    return QuantizedBlock(changed, matrices, norms)


def _scale(
    weights: dict[str, torch.Tensor],
    grams: dict[str, torch.Tensor],
    inputs: Mapping[str, InputStatistics],
    tensors: LayerTensors,
    group_size: int,
) -> dict[str, FloatArray]:
    """Scale columns in place, with their Gram matrices; returns the norms that take the inverse."""
    down = choose_scales(weights["down"], grams["down"], inputs["down"].mean_abs, group_size)
    _apply(weights, grams, "down", down)
    gate_up = weights["gate_up"]
    gate_up[len(gate_up) // 2 :] /= down[:, None]  # rows of up
    norms = {}
    for name, norm_name in (("qkv", "attention_norm"), ("gate_up", "mlp_norm")):
        norm = torch.from_numpy(np.array(getattr(tensors, norm_name)))
        scales = choose_scales(weights[name], grams[name], inputs[name].mean_abs, group_size)
        # Files may keep norms as bfloat16: take the scales of norms that are such numbers, and nothing is lost.
        scaled = (norm / scales).bfloat16().float()
        scales = torch.where(scaled != 0, norm / scaled, scales)
        _apply(weights, grams, name, scales)
        norms[norm_name] = scaled.numpy()
    return norms


def _apply(weights: dict[str, torch.Tensor], grams: dict[str, torch.Tensor], name: str, scales: torch.Tensor) -> None:
    weights[name] = weights[name] * scales
    grams[name] = grams[name] / scales / scales[:, None]


def _stacked(matrices: Sequence[WeightMatrix]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([matrix.dequantize() for matrix in matrices]))


def _matrix(q: torch.Tensor, grid: Grid, encoding: str) -> Int4Matrix:
    q8, zero = q.to(torch.uint8).numpy(), grid.zero.to(torch.uint8).numpy()
    return pack_int4(q8, grid.scale.numpy(), zero, encoding)
