"""The one generic decoder: a pre-norm transformer whose families differ only by the flags of its `ModelSpec`.

    x = embedding[token]
    per layer:  x += O(attention(rotary(QKV(norm(x)))));  x += down(silu(gate) * up) of norm(x)
    hidden = norm(x) of the tokens asked for;  logits = hidden . output^T

It knows nothing of pages, requests or devices: those are the attention backend's, the runner's and the layers'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.layers.attention import AttentionBackend
from engine.layers.blocks_native import build_blocks
from engine.layers.linear import Linear, LinearPolicy, build_linear, decode
from engine.layers.ops import BlockOps
from engine.models.spec import ModelSpec
from engine.models.tensors import FloatArray, LayerTensors, TensorSource


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: its matrices as `Linear`, its norm weights in float32."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and forward pass. Activations have `policy.dtype`; logits are float32."""

    def __init__(
        self,
        source: TensorSource,
        policy: LinearPolicy,
        attention: AttentionBackend,
        ops: BlockOps,
        *,
        max_position: int,
    ) -> None:
        """Takes the weights from `source` layer by layer. Rotary tables cover positions below `max_position`."""
        self.spec = spec = source.spec
        self.attention = attention
        self.ops = ops
        self._device = policy.device
        self._embedding = decode([source.embedding()], policy.dtype).to(policy.device)
        self.layers = [self._build_layer(tensors, policy) for tensors in source.layers()]
        self._final_norm = self._vector(source.final_norm())
        self.output = build_linear([source.output()], policy, out_dtype=torch.float32)
        self._cos_sin = rotary_table(spec, source.rope_factors(), max_position).to(policy.device)
        # All blocks in one call, where the machine and the weights allow it; None: one operation after the other.
        self.blocks = build_blocks(spec, self.layers, attention, self._cos_sin, policy.dtype)

    def _vector(self, values: FloatArray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(self._device)

    def _build_layer(self, tensors: LayerTensors, policy: LinearPolicy) -> Layer:
        return Layer(
            attention_norm=self._vector(tensors.attention_norm),
            qkv=build_linear(tensors.qkv, policy, tensors.qkv_bias),
            q_norm=None if tensors.q_norm is None else self._vector(tensors.q_norm),
            k_norm=None if tensors.k_norm is None else self._vector(tensors.k_norm),
            attention_output=build_linear([tensors.attention_output], policy),
            mlp_norm=self._vector(tensors.mlp_norm),
            gate_up=build_linear(tensors.gate_up, policy),
            down=build_linear([tensors.down], policy),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights and tables as held here, every packed and dense copy counted."""
        tables = [self._embedding, self._final_norm, self._cos_sin]
        linears = [self.output]
        for layer in self.layers:
            linears += [layer.qkv, layer.attention_output, layer.gate_up, layer.down]
            norms = (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            tables += [norm for norm in norms if norm is not None]
        return sum(table.nbytes for table in tables) + sum(linear.num_bytes for linear in linears)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Run the blocks over one step's tokens and return the normed state of the tokens `wanted`.

        token_ids, positions: int64 `[tokens]`; wanted: int64 `[rows]`, indices into the tokens. The attention backend
        must have begun this step. Returns `[rows, hidden]`.
        """
        ops, tokens, eps = self.ops, token_ids.shape[0], self.spec.norm_eps
        embedded = self._embedding.index_select(0, token_ids)  # [tokens, hidden]
        residual = embedded.float()  # the sum of all blocks' outputs, kept in float32
        if self.blocks is not None and self.blocks.serves(tokens):
            delta = self.blocks(residual, positions)
        else:
            delta = self._run_blocks(embedded, residual, positions)
        return ops.add_rms_norm(delta.index_select(0, wanted), residual.index_select(0, wanted), self._final_norm, eps)

    def _run_blocks(self, embedded: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """All blocks, operation by operation. Adds to `residual`; returns what is still to be added."""
        spec, ops, attention = self.spec, self.ops, self.attention
        tokens, eps = residual.shape[0], spec.norm_eps
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            if delta is None:
                x = ops.rms_norm(embedded, layer.attention_norm, eps)
            else:
                x = ops.add_rms_norm(delta, residual, layer.attention_norm, eps)
            q, k, v = layer.qkv(x).split_with_sizes((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
            q = q.view(tokens, spec.num_heads, spec.head_dim)
            k = k.view(tokens, spec.num_kv_heads, spec.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)
            q, k = ops.rotary(q, k, self._cos_sin, positions)
            attended = attention.forward(index, q, k, v.view(tokens, spec.num_kv_heads, spec.head_dim))
            x = ops.add_rms_norm(
                layer.attention_output(attended.view(tokens, spec.q_size)), residual, layer.mlp_norm, eps
            )
            delta = layer.down(ops.silu_mul(layer.gate_up(x)))
        if delta is None:
            raise ValueError("a model needs at least one layer")
        return delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, vocab]` of states `[rows, hidden]`."""
        return self.output(hidden).float()


def rotary_table(spec: ModelSpec, factors: FloatArray | None, max_position: int) -> torch.Tensor:
    """float32 `[max_position, rotary_dim]`: cosines, then sines, of every position and frequency (see `RopeSpec`)."""
    rope = spec.rope
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if factors is not None:
        frequencies = frequencies / torch.from_numpy(np.array(factors))
    positions = torch.arange(max_position, dtype=torch.float32) / rope.linear_factor
    angles = torch.outer(positions, frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
