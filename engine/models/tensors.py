"""The tensors a decoder is built from, named by their role and still in the file's encoding.

A loader fills these in; the decoder turns them into layers. Matrices are `[out_features, in_features]`. Lists are
matrices that share their input and are fused into one product: `[q, k, v]` and `[gate, up]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.models.spec import ModelSpec
from engine.quant.blocks import BlockTensor

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One decoder block. Norm weights and biases are float32, decoded."""

    attention_norm: FloatArray  # [hidden]
    qkv: list[BlockTensor]
    qkv_bias: FloatArray | None  # [q_size + 2 * kv_size]
    q_norm: FloatArray | None  # [head_dim]
    k_norm: FloatArray | None
    attention_output: BlockTensor
    mlp_norm: FloatArray
    gate_up: list[BlockTensor]
    down: BlockTensor


class TensorSource(Protocol):
    """Where a decoder's tensors come from: one block at a time, so that no more than one lies decoded in memory."""

    spec: ModelSpec

    def embedding(self) -> BlockTensor:
        """`[vocab, hidden]`."""
        ...

    def layers(self) -> Iterator[LayerTensors]:
        """The blocks, first to last."""
        ...

    def final_norm(self) -> FloatArray:
        """`[hidden]`."""
        ...

    def output(self) -> BlockTensor:
        """`[vocab, hidden]`: the embedding again when the model ties the two."""
        ...

    def rope_factors(self) -> FloatArray | None:
        """Divisors of the rotary frequencies, `[rotary_dim / 2]`, or None."""
        ...
