"""One block of a model at a time: its outputs for calibration texts, and what its products are given.

A decoder of a single block does the work, so that every family computes here as it does when it is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.geometry import step_geometry
from engine.layers.attention import AttentionConfig
from engine.layers.device import build_attention, build_ops
from engine.layers.linear import Linear, LinearPolicy
from engine.layers.mlp import GatedMlp
from engine.models.decoder import Decoder
from engine.models.spec import LayerSpec, ModelSpec
from engine.models.tensors import FloatArray, LayerTensors
from engine.quant.blocks import dense
from engine.quant.matrix import WeightMatrix
from engine.types import SamplingParams, StepPlan, StepRow

PRODUCTS = ("qkv", "attention_output", "gate_up", "down")
_CPU = torch.device("cpu")
_POLICY = LinearPolicy(_CPU, torch.float32, packed_rows=0)
_PAGE = 16


@dataclass(slots=True)
class InputStatistics:
    """Of the inputs x of a product: `gram`, the sum of x x^T; `absolute`, the sum of |x|; `count`."""

    gram: torch.Tensor  # [columns, columns]
    absolute: torch.Tensor  # [columns]
    count: int = 0

    def add(self, x: torch.Tensor) -> None:
        self.gram.addmm_(x.T, x)
        self.absolute += x.abs().sum(0)
        self.count += len(x)

    @property
    def mean_abs(self) -> torch.Tensor:
        return self.absolute / max(1, self.count)


class Recorder:
    """A product that keeps statistics of what it is given."""

    def __init__(self, inner: Linear) -> None:
        self.in_features, self.out_features, self.num_bytes = inner.in_features, inner.out_features, inner.num_bytes
        self._inner = inner
        self.inputs = InputStatistics(torch.zeros(inner.in_features, inner.in_features), torch.zeros(inner.in_features))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.add(x)
        return self._inner(x)


class _BlockSource:
    """`TensorSource` of one block; the tables around it are not used."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, tensors: LayerTensors) -> None:
        self.spec = replace(spec, layers=(layer,), embedding_scale=1.0)
        self._tensors = tensors
        self._table: FloatArray = np.zeros((1, spec.hidden_size), dtype=np.float32)

    def embedding(self) -> WeightMatrix:
        return dense(self._table)

    def layers(self) -> Iterator[LayerTensors]:
        yield self._tensors

    def final_norm(self) -> FloatArray:
        row: FloatArray = self._table[0]
        return row

    def output(self) -> WeightMatrix:
        return dense(self._table)


class Block:
    """The block of `layer` with the weights `tensors`, for texts of up to `length` tokens."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, tensors: LayerTensors, length: int) -> None:
        pages = -(-length // _PAGE)
        config = AttentionConfig(
            num_layers=1,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.score_scale,
            num_blocks=pages + 1,
            block_size=_PAGE,
            dtype=torch.float32,
            device=_CPU,
            max_num_seqs=1,
            max_num_batched_tokens=length,
            max_blocks_per_seq=pages,
            windows=(layer.window,),
            softcap=spec.attention_softcap,
            sinks=spec.sinks,
        )
        self._length, self._pages = length, list(range(1, pages + 1))
        self._decoder = Decoder(
            _BlockSource(spec, layer, tensors), _POLICY, build_attention(config), build_ops(_CPU), max_position=length
        )

    def record(self) -> dict[str, InputStatistics]:
        """From now on keep statistics of the inputs of the four products, which are returned and filled by `run`."""
        (layer,) = self._decoder.layers
        if not isinstance(layer.mlp, GatedMlp):
            raise ValueError("a mixture of experts")
        mlp = layer.mlp
        recorders = [Recorder(linear) for linear in (layer.qkv, layer.attention_output, mlp.gate_up, mlp.down)]
        qkv, attention_output, gate_up, down = recorders
        mlp = replace(mlp, gate_up=gate_up, down=down)
        self._decoder.layers[0] = replace(layer, qkv=qkv, attention_output=attention_output, mlp=mlp)
        return {name: recorder.inputs for name, recorder in zip(PRODUCTS, recorders, strict=True)}

    @torch.inference_mode()
    def run(self, states: torch.Tensor) -> torch.Tensor:
        """The block's output for each text. `[texts, tokens, hidden]` both."""
        out = torch.empty_like(states)
        for number, state in enumerate(states):
            tokens = [0] * len(state)
            row = StepRow(0, tokens, 0, self._pages, False, SamplingParams(), tokens, len(tokens))
            step = step_geometry(StepPlan([row]).rows, _PAGE, self._length)
            self._decoder.attention.begin(step)
            residual = state.clone()
            delta = self._decoder.run_blocks(state, residual, torch.from_numpy(step.positions))
            out[number] = residual + delta
        return out
