"""The `TensorSource` of a Hugging Face folder: roles by the names that its family gives them.

Whatever the weights are quantised with is `HfWeights`' affair. Every tensor's shape is checked against the spec when it
is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.loader.errors import ModelFileError
from engine.loader.hf_families import ExpertNames, HfFamily
from engine.loader.hf_weights import HfWeights, MatrixInfo
from engine.models.spec import ModelSpec, MoeSpec
from engine.models.tensors import EachExpert, ExpertTensors, FloatArray, LayerTensors, NetworkTensors
from engine.quant.blocks import BlockTensor
from engine.quant.matrix import WeightMatrix


class HfTensors:
    """The weights `weights` of a model of `family`. Raises ModelFileError for tensors missing or of another shape."""

    def __init__(self, spec: ModelSpec, family: HfFamily, weights: HfWeights) -> None:
        self.spec = spec
        self._family = family
        self._weights = weights
        prefixes = (*family.prefixes, "")  # nothing before the names where the blocks were saved alone
        found = (prefix for prefix in prefixes if f"{prefix}embed_tokens.weight" in weights)
        self._prefix = next(found, family.prefixes[0])

    def embedding(self) -> WeightMatrix:
        return self._weights.tensor(self._prefix + "embed_tokens.weight", (self.spec.vocab_size, self.spec.hidden_size))

    def output(self) -> WeightMatrix:
        if self.spec.tied_embeddings:
            return self.embedding()
        return self._weights.tensor("lm_head.weight", (self.spec.vocab_size, self.spec.hidden_size))

    def final_norm(self) -> FloatArray:
        return self._norm(self._prefix + "norm.weight", self.spec.hidden_size)

    def score(self, labels: int) -> FloatArray:
        return self._weights.tensor("score.weight", (labels, self.spec.hidden_size)).dequantize()

    def layers(self) -> Iterator[LayerTensors]:
        for index in range(self.spec.num_layers):
            yield self.layer(index)

    def matrices(self, *, output: bool = True) -> Iterator[list[MatrixInfo]]:
        """The headers of the matrices that products are made of, `output` last; those of a list share one product."""
        info = self._weights.info
        for index, layer in enumerate(self.spec.layers):
            prefix = self._layer_prefix(index)
            yield [info(f"{prefix}self_attn.{name}.weight") for name in self._qkv_names()]
            yield [info(prefix + "self_attn.o_proj.weight")]
            if layer.experts and self._family.experts is not None and self.spec.moe is not None:
                yield from self._expert_matrices(prefix, self._family.experts, self.spec.moe)
            else:
                yield [info(f"{prefix}mlp.{name}.weight") for name in self._gate_up_names()]
                yield [info(prefix + "mlp.down_proj.weight")]
        if output:
            yield [info(self._prefix + "embed_tokens.weight" if self.spec.tied_embeddings else "lm_head.weight")]

    def _expert_matrices(self, prefix: str, names: ExpertNames, moe: MoeSpec) -> Iterator[list[MatrixInfo]]:
        info, hidden, inner = self._weights.info, self.spec.hidden_size, moe.intermediate_size
        for number in range(moe.num_experts):
            if names.stacked:
                for name, shape in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
                    yield [replace(info(f"{prefix}{names.experts}.{name}"), shape=shape)]
            else:
                expert = f"{prefix}{names.experts}.{number}."
                yield [info(f"{expert}{part}.weight") for part in (names.gate, names.up)]
                yield [info(f"{expert}{names.down}.weight")]

    def _layer_prefix(self, index: int) -> str:
        return f"{self._prefix}layers.{index}."

    def _qkv_names(self) -> tuple[str, ...]:
        return ("qkv_proj",) if self._family.fused else ("q_proj", "k_proj", "v_proj")

    def _gate_up_names(self) -> tuple[str, ...]:
        return ("gate_up_proj",) if self._family.fused else ("gate_proj", "up_proj")

    def layer(self, index: int) -> LayerTensors:
        spec, weights, prefix = self.spec, self._weights, self._layer_prefix(index)
        hidden = spec.hidden_size
        attention = prefix + "self_attn."
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        if self._family.fused:
            sizes = (sum(sizes),)  # type: ignore[assignment]
        parts = list(zip(self._qkv_names(), sizes, strict=True))
        bias = None
        if spec.qkv_bias:
            bias = np.concatenate([weights.vector(f"{attention}{name}.bias", size) for name, size in parts])
        return LayerTensors(
            attention_norm=self._norm(prefix + "input_layernorm.weight", hidden),
            qkv=[weights.tensor(f"{attention}{name}.weight", (size, hidden)) for name, size in parts],
            qkv_bias=bias,
            q_norm=self._norm(attention + "q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self._norm(attention + "k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            sinks=weights.vector(attention + "sinks", spec.num_heads) if spec.sinks else None,
            attention_output=weights.tensor(attention + "o_proj.weight", (hidden, spec.q_size)),
            attention_output_bias=weights.vector(attention + "o_proj.bias", hidden) if spec.o_bias else None,
            post_attention_norm=self._post_norm(prefix + "post_attention_layernorm.weight"),
            mlp_norm=self._norm(
                prefix + ("pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm") + ".weight",
                hidden,
            ),
            mlp=self._experts(prefix) if spec.layers[index].experts else self._network(prefix),
            post_mlp_norm=self._post_norm(prefix + "post_feedforward_layernorm.weight"),
        )

    def _network(self, prefix: str) -> NetworkTensors:
        weights, hidden, inner = self._weights, self.spec.hidden_size, self.spec.intermediate_size
        names = self._gate_up_names()
        size = 2 * inner // len(names)
        gate_up_bias = down_bias = None
        if self.spec.mlp_bias:
            gate_up_bias = np.concatenate([weights.vector(f"{prefix}mlp.{name}.bias", size) for name in names])
            down_bias = weights.vector(prefix + "mlp.down_proj.bias", hidden)
        return NetworkTensors(
            [weights.tensor(f"{prefix}mlp.{name}.weight", (size, hidden)) for name in names],
            weights.tensor(prefix + "mlp.down_proj.weight", (hidden, inner)),
            gate_up_bias,
            down_bias,
        )

    def _experts(self, prefix: str) -> ExpertTensors:
        weights, names, moe, hidden = self._weights, self._family.experts, self.spec.moe, self.spec.hidden_size
        assert names is not None  # a layer has experts only where family and spec have them
        assert moe is not None
        router, experts, count = prefix + names.router, prefix + names.experts, moe.num_experts
        return ExpertTensors(
            router=weights.tensor(router + ".weight", (count, hidden)).dequantize(),
            router_bias=weights.vector(router + ".bias", count) if moe.bias else None,
            experts=self._stacked(experts, moe)
            if names.stacked
            else EachExpert(range(count), lambda number: self._expert(f"{experts}.{number}.", names, moe)),
        )

    def _expert(self, prefix: str, names: ExpertNames, moe: MoeSpec) -> NetworkTensors:
        hidden, inner = self.spec.hidden_size, moe.intermediate_size
        gate_up = [self._weights.tensor(f"{prefix}{name}.weight", (inner, hidden)) for name in (names.gate, names.up)]
        return NetworkTensors(gate_up, self._weights.tensor(f"{prefix}{names.down}.weight", (hidden, inner)))

    def _stacked(self, name: str, moe: MoeSpec) -> EachExpert:
        """Experts that lie in one tensor; rows of gate and up take turns and are put apart."""
        hidden, inner, count = self.spec.hidden_size, moe.intermediate_size, moe.num_experts
        apart = np.arange(2 * inner, dtype=np.int64).reshape(inner, 2).T.ravel()
        bias = self._weights.tensor(f"{name}.gate_up_proj_bias", (count, 2 * inner)).dequantize()
        down_bias = self._weights.tensor(f"{name}.down_proj_bias", (count, hidden)).dequantize()

        def make(number: int) -> NetworkTensors:
            gate_up = self._one_of(f"{name}.gate_up_proj", number, (count, 2 * inner, hidden)).take_rows(apart)
            down = self._one_of(f"{name}.down_proj", number, (count, hidden, inner))
            return NetworkTensors([gate_up], down, bias[number][apart], down_bias[number])

        return EachExpert(range(count), make)

    def _one_of(self, name: str, number: int, shape: tuple[int, int, int]) -> WeightMatrix:
        """One expert's matrix `[out, in]`. Plain floats are stored as `[in, out]`, quantised ones as they should be."""
        _, rows, columns = shape
        if self._weights.info(name).encoding in ("F32", "F16", "BF16"):
            stored = self._weights.tensor(name, (shape[0], columns, rows))
            return _transposed(stored.rows(number * columns, (number + 1) * columns), self._weights)
        return self._weights.expert(name, number, shape)

    def _norm(self, name: str, size: int) -> FloatArray:
        weight = self._weights.vector(name, size)
        return weight + np.float32(self._family.norm_offset) if self._family.norm_offset else weight

    def _post_norm(self, name: str) -> FloatArray | None:
        return self._norm(name, self.spec.hidden_size) if self.spec.post_norms else None


def _transposed(matrix: WeightMatrix, weights: HfWeights) -> BlockTensor:
    """A matrix of plain floats, turned without decoding it."""
    if not isinstance(matrix, BlockTensor):
        raise ModelFileError(weights.files.path, f"experts in {matrix.encoding} are not supported", "Use another form")
    size = matrix.data.shape[1] // matrix.num_columns
    values = np.ascontiguousarray(matrix.data.view(f"u{size}").T)
    return BlockTensor(values.view(np.uint8), matrix.type, (matrix.num_columns, matrix.num_rows))
