"""The tensors a decoder is built from, named by their role and still in the file's encoding.

A loader fills these in; the decoder turns them into layers. Matrices are `[out_features, in_features]`. Lists are
matrices that share their input and are fused into one product: `[q, k, v]` and `[gate, up]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from engine.models.spec import ModelSpec
from engine.quant.matrix import WeightMatrix

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NetworkTensors:
    """A gated feed-forward network: the one of a block, or one expert. Gate comes before up."""

    gate_up: Sequence[WeightMatrix]  # [gate, up], or one that holds both
    down: WeightMatrix
    gate_up_bias: FloatArray | None = None  # [2 * intermediate]
    down_bias: FloatArray | None = None  # [hidden]


class EachExpert(Sequence[NetworkTensors]):
    """Experts that are made as they are asked for, each time anew, so that not all lie in memory."""

    def __init__(self, numbers: range, make: Callable[[int], NetworkTensors]) -> None:
        self._numbers, self._make = numbers, make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> NetworkTensors: ...
    @overload
    def __getitem__(self, index: slice) -> EachExpert: ...
    def __getitem__(self, index: int | slice) -> NetworkTensors | EachExpert:
        if isinstance(index, slice):
            return EachExpert(self._numbers[index], self._make)
        return self._make(self._numbers[index])


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """A mixture of experts. The router is float32, decoded, and knows all experts, those that are elsewhere too."""

    router: FloatArray  # [experts, hidden]
    router_bias: FloatArray | None  # [experts]
    experts: Sequence[NetworkTensors]  # in their order; to be gone through once
    first: int = 0  # the number of the first of `experts`

    def only(self, numbers: range) -> ExpertTensors:
        """With those experts alone."""
        return replace(self, experts=self.experts[numbers.start : numbers.stop], first=numbers.start)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One decoder block. Norm weights, biases and sinks are float32, decoded, as they are multiplied and added."""

    attention_norm: FloatArray  # [hidden]
    qkv: Sequence[WeightMatrix]  # [q, k, v], or one that holds all three
    attention_output: WeightMatrix
    mlp_norm: FloatArray
    mlp: NetworkTensors | ExpertTensors
    qkv_bias: FloatArray | None = None  # [q_size + 2 * kv_size]
    q_norm: FloatArray | None = None  # [head_dim]
    k_norm: FloatArray | None = None
    sinks: FloatArray | None = None  # [heads]
    attention_output_bias: FloatArray | None = None  # [hidden]
    post_attention_norm: FloatArray | None = None
    post_mlp_norm: FloatArray | None = None


class TensorSource(Protocol):
    """Where a decoder's tensors come from: one block at a time, so that no more than one lies decoded in memory."""

    spec: ModelSpec

    def embedding(self) -> WeightMatrix:
        """`[vocab, hidden]`."""
        ...

    def layers(self) -> Iterator[LayerTensors]:
        """The blocks, first to last."""
        ...

    def final_norm(self) -> FloatArray:
        """`[hidden]`."""
        ...

    def output(self) -> WeightMatrix:
        """`[vocab, hidden]`: the embedding again when the model ties the two."""
        ...
