"""The one generic decoder: a pre-norm transformer whose families differ only by the flags of its `ModelSpec`.

    x = embedding[token]
    per layer:  x += O(attention(rotary(QKV(norm(x)))));  x += mlp(norm(x)), where some families norm each term, too
    hidden = norm(x) of the tokens asked for;  logits = hidden . output^T

It knows nothing of pages, requests or devices: those are the attention backend's, the runner's and the layers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.adapters.low_rank import AdaptedLinear, StepAdapters
from engine.adapters.targets import Product
from engine.layers.attention import AttentionBackend
from engine.layers.blocks_native import NativeBlocks, build_blocks
from engine.layers.linear import Linear, LinearPolicy, build_linear, decode
from engine.layers.mlp import GatedMlp, build_mlp
from engine.layers.moe import Experts, build_experts
from engine.layers.normed import norm_and_multiply
from engine.layers.ops import BlockOps
from engine.models.rotary import rotary_table
from engine.models.spec import LayerSpec
from engine.models.tensors import FloatArray, LayerTensors, NetworkTensors, TensorSource


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: its matrices as `Linear`, norm weights and sinks in float32."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cos_sin: torch.Tensor | None  # the rotary table; None: no position embedding
    sinks: torch.Tensor | None
    attention_output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: GatedMlp | Experts
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """Weights and forward pass. Activations have `policy.dtype`; logits are float32."""

    begins = True  # with the embedding, so that there is no sum before the first block

    def __init__(
        self,
        source: TensorSource,
        policy: LinearPolicy,
        attention: AttentionBackend,
        ops: BlockOps,
        *,
        max_position: int,
        output: bool = True,
    ) -> None:
        """Takes the weights from `source` layer by layer. Rotary tables cover positions below `max_position`.

        `output` False: there will be no logits, and the output matrix is left out.
        """
        self.spec = spec = source.spec
        self.attention = attention
        self.ops = ops
        self._device = policy.device
        self.embedding = self._build_embedding(source, policy)
        self._tables = {rope: rotary_table(rope, max_position).to(policy.device) for rope in spec.ropes}
        self.layers = [
            self._build_layer(layer, tensors, policy)
            for layer, tensors in zip(spec.layers, source.layers(), strict=True)
        ]
        self._final_norm = self._vector(source.final_norm())
        self.output = self._build_output(source, policy) if output else None
        # All blocks in one call, where the machine and the weights allow it; None: one operation after the other.
        self.blocks = build_blocks(spec, self.layers, attention, policy.dtype)
        self._adapters: StepAdapters | None = None
        self._taps: tuple[int, ...] = ()
        self.tapped: list[torch.Tensor] = []  # per tap float32 `[tokens, hidden]`, of the last step

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep what enters these layers, ascending, in `tapped`."""
        self._taps = layers

    def adapt(self, adapters: StepAdapters) -> None:
        """Let the adapters of each step change the products of the blocks, from now on; the call for all blocks knows
        none, so a step with adapters goes the other way. Call it once."""
        self._adapters = adapters
        self.layers = [_adapted(layer, index, adapters) for index, layer in enumerate(self.layers)]

    def _vector(self, values: FloatArray) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(self._device)

    def _vector_if_any(self, values: FloatArray | None) -> torch.Tensor | None:
        return None if values is None else self._vector(values)

    def _build_embedding(self, source: TensorSource, policy: LinearPolicy) -> torch.Tensor:
        table = decode([source.embedding()], policy.dtype).to(policy.device)
        if (scale := self.spec.embedding_scale) != 1.0:  # rounded to the weights' dtype, as it was in training
            table *= torch.tensor(scale, dtype=policy.dtype, device=policy.device)
        return table

    def _build_output(self, source: TensorSource, policy: LinearPolicy) -> Linear | None:
        return build_linear([source.output()], policy, out_dtype=torch.float32)

    def _build_layer(self, layer: LayerSpec, tensors: LayerTensors, policy: LinearPolicy) -> Layer:
        return Layer(
            attention_norm=self._vector(tensors.attention_norm),
            qkv=build_linear(tensors.qkv, policy, tensors.qkv_bias),
            q_norm=self._vector_if_any(tensors.q_norm),
            k_norm=self._vector_if_any(tensors.k_norm),
            cos_sin=None if layer.rope is None else self._tables[layer.rope],
            sinks=self._vector_if_any(tensors.sinks),
            attention_output=build_linear([tensors.attention_output], policy, tensors.attention_output_bias),
            post_attention_norm=self._vector_if_any(tensors.post_attention_norm),
            mlp_norm=self._vector(tensors.mlp_norm),
            mlp=self._build_mlp(tensors, policy),
            post_mlp_norm=self._vector_if_any(tensors.post_mlp_norm),
        )

    def _build_mlp(self, tensors: LayerTensors, policy: LinearPolicy) -> GatedMlp | Experts:
        spec, mlp = self.spec, tensors.mlp
        if isinstance(mlp, NetworkTensors):
            return build_mlp(mlp, policy, spec.activation)
        if spec.moe is None:
            raise ValueError("tensors of experts for a model whose spec has none")
        return build_experts(mlp, policy, spec.moe, spec.activation)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights and tables as held here, every packed and dense copy counted."""
        tables = [self.embedding, self._final_norm, *self._tables.values()]
        weights: list[Linear | GatedMlp | Experts] = [] if self.output is None else [self.output]
        for layer in self.layers:
            weights += [layer.qkv, layer.attention_output, layer.mlp]
            norms = (layer.attention_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm)
            for vector in (*norms, layer.q_norm, layer.k_norm, layer.sinks):
                tables += [] if vector is None else [vector]
        return sum(table.nbytes for table in tables) + sum(weight.num_bytes for weight in weights)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Run the blocks over one step's tokens and return the normed state of the tokens `wanted`.

        token_ids, positions: int64 `[tokens]`; wanted: int64 `[rows]`, indices into the tokens. The attention backend
        must have begun this step. Returns `[rows, hidden]`.
        """
        tokens = token_ids.shape[0]
        embedded, residual = self.begin(token_ids)
        is_plain = self._adapters is None or not self._adapters.groups
        self.tapped = []
        if self.blocks is not None and is_plain and self.blocks.serves(tokens):
            delta = self._call_blocks(self.blocks, residual, positions)
        else:
            delta = self.run_blocks(embedded, residual, positions)
        return self.end(delta, residual, wanted)

    def begin(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[tokens, hidden]` both: what is embedded, and the sum of all blocks' outputs, which is kept in float32."""
        embedded = self.embedding.index_select(0, token_ids)
        return embedded, embedded.float()

    def end(self, delta: torch.Tensor, residual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The normed state of the tokens `wanted`, from the sum and what is still to be added to it."""
        delta, residual = delta.index_select(0, wanted), residual.index_select(0, wanted)
        return self.ops.add_rms_norm(delta, residual, self._final_norm, self.spec.norm_eps)

    def _call_blocks(self, blocks: NativeBlocks, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """All blocks in one call, or in one between any two taps. As `run_blocks`."""
        if not self._taps:
            return blocks(residual, positions)
        first, delta = 0, torch.zeros_like(residual)
        for tap in (*self._taps, len(self.layers)):
            if tap > first:
                residual += delta
                delta = blocks(residual, positions, first, tap)
            if tap < len(self.layers):
                self.tapped.append(residual + delta)
            first = tap
        return delta

    def run_blocks(self, embedded: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """All blocks, operation by operation. Adds to `residual`; returns what is still to be added."""
        delta = embedded
        for index, layer in enumerate(self.layers):
            q, k, v = self.before_attention(index, delta, residual, positions)
            delta = self.after_attention(index, self.attention.forward(index, q, k, v, layer.sinks), residual)
        return delta

    def before_attention(
        self, index: int, delta: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A block up to its attention: q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`. Adds
        `delta` `[tokens, hidden]`, what the block before it yields, to `residual`."""
        spec, ops, layer, tokens = self.spec, self.ops, self.layers[index], delta.shape[0]
        to_add = residual if index or not self.begins else None  # None: the residual is what was embedded
        qkv = norm_and_multiply(layer.qkv, delta, to_add, layer.attention_norm, spec.norm_eps, ops)
        if index in self._taps:
            self.tapped.append(residual.clone())
        q, k, v = qkv.split_with_sizes((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        q = q.view(tokens, spec.num_heads, spec.head_dim)
        k = k.view(tokens, spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, spec.norm_eps), ops.rms_norm(k, layer.k_norm, spec.norm_eps)
        if layer.cos_sin is not None:
            q, k = ops.rotary(q, k, layer.cos_sin, positions)
        return q, k, v.view(tokens, spec.num_kv_heads, spec.head_dim)

    def after_attention(self, index: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """A block from its attention's `[tokens, heads, head_dim]` on. Adds to `residual`; returns what is still to be
        added, `[tokens, hidden]`."""
        ops, eps, layer = self.ops, self.spec.norm_eps, self.layers[index]
        delta = layer.attention_output(attended.view(attended.shape[0], self.spec.q_size))
        if layer.post_attention_norm is not None:
            delta = ops.rms_norm(delta, layer.post_attention_norm, eps)
        if isinstance(layer.mlp, GatedMlp):
            delta = layer.mlp.after_norm(delta, residual, layer.mlp_norm, eps, ops)
        else:
            delta = layer.mlp(ops.add_rms_norm(delta, residual, layer.mlp_norm, eps), ops)
        return delta if layer.post_mlp_norm is None else ops.rms_norm(delta, layer.post_mlp_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, vocab]` of states `[rows, hidden]`. Raises ValueError without an output matrix."""
        if self.output is None:
            raise ValueError("this decoder was built without an output matrix")
        logits, softcap = self.output(hidden).float(), self.spec.logit_softcap
        return torch.tanh(logits / softcap) * softcap if softcap else logits


def _adapted(layer: Layer, index: int, adapters: StepAdapters) -> Layer:
    """The block with products that adapters can change; experts stay as they are."""

    def adapted(product: Product, inner: Linear) -> AdaptedLinear:
        return AdaptedLinear(inner, adapters, (index, product))

    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        gate_up, down = adapted(Product.GATE_UP, mlp.gate_up), adapted(Product.DOWN, mlp.down)
        mlp = replace(mlp, gate_up=gate_up, down=down)
    output = adapted(Product.ATTENTION_OUTPUT, layer.attention_output)
    return replace(layer, qkv=adapted(Product.QKV, layer.qkv), attention_output=output, mlp=mlp)
