"""A BERT encoder as an ONNX graph, built from its weights: token ids in, unit vectors out, in float32 or int8.

    input_ids, attention_mask [batch, tokens] int64  ->  embedding [batch, hidden] float32

Everything between is one matrix of rows, [batch * tokens, hidden], but for attention.

In int8, a linear layer's input is quantised row by row (LLM.int8, Dettmers et al. 2022, section 3: "vector-wise"),
never over the whole tensor, so that a text's vector does not depend on what else is in its batch. Columns with
outliers are first evened out against the weights (SmoothQuant, Xiao et al. 2023, equation 4). Machines without VNNI
add up products of two pairs in 16 bits; inputs of 0 to 180 and weights of -90 to 90 always fit there, so that every
machine computes the same integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from cache.embedding.folder import Description, UnsupportedModel

Array = NDArray[np.float32]

_MICROSOFT = "com.microsoft"  # operators of ONNX Runtime's own
_SMOOTHING = 0.65
_MAX = 90  # of a weight, and half the range of an input: 2 * (2 * 90) * 90 < 2**15
_GELU_MIN = 0.17  # gelu(x) > -0.17 for every x


def build(model: Description, maxima: Mapping[str, Array] | None = None) -> onnx.ModelProto:
    """The graph in float32, or in int8 where `maxima` are given (see `linear_inputs`).

    Args:
        maxima: for each layer that `linear_inputs` names, the largest absolute value of every column of its input.

    Raises:
        UnsupportedModel: a weight is missing.
    """
    return _Builder(model, _weights(model), maxima).model()


def linear_inputs(model: Description) -> dict[str, str]:
    """The linear layers whose input has outlier columns, and which value of the float32 graph that input is."""
    found = {}
    for i in range(model.layers):
        found[f"query_key_value_{i}"] = f"output_{i - 1}" if i else "embedded"
        found[f"intermediate_{i}"] = f"attended_{i}"
    return found


def with_outputs(graph: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """The graph with values from its inside among its outputs, [rows, hidden] each."""
    wider = onnx.ModelProto()
    wider.CopyFrom(graph)
    wider.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return wider


def _weights(model: Description) -> dict[str, Array]:
    loaded = load_file(model.folder / "model.safetensors")
    return {name.removeprefix("bert."): np.asarray(value, dtype=np.float32) for name, value in loaded.items()}


class _Builder:
    def __init__(self, model: Description, weights: dict[str, Array], maxima: Mapping[str, Array] | None) -> None:
        self._about = model
        self._weights = weights
        self._maxima = maxima
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def model(self) -> onnx.ModelProto:
        about = self._about
        rows = self._embed()
        for i in range(about.layers):
            rows = self._layer(rows, i)
        self._pool(rows)
        ids = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"])
            for name in ("input_ids", "attention_mask")
        ]
        vectors = helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", about.hidden_size])
        graph = helper.make_graph(self._nodes, "bert", ids, [vectors], list(self._constants.values()))
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(_MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def _embed(self) -> str:
        """Words, positions and the one segment, normalised: [batch * tokens, hidden]."""
        words = self._weight("embeddings.word_embeddings.weight")
        places = self._weight("embeddings.position_embeddings.weight")
        places = places + self._weight("embeddings.token_type_embeddings.weight")[0]
        word = self._op("Gather", [self._constant("words", words), "input_ids"], "word")
        tokens = self._op("Shape", ["input_ids"], "tokens", start=1, end=2)
        zero = self._constant("zero", np.zeros(1, np.int64))
        place = self._op("Slice", [self._constant("places", places), zero, tokens, zero], "place")
        both = self._op("Add", [word, place], "word_and_place")
        flat = self._op("Reshape", [both, self._shape(-1, self._about.hidden_size)], "flat")
        return self._normalised(flat, "embeddings.LayerNorm", "embedded")

    def _layer(self, rows: str, i: int) -> str:
        hidden, prefix = self._about.hidden_size, f"encoder.layer.{i}."
        names = [f"{prefix}attention.self.{name}" for name in ("query", "key", "value")]
        projected, bias = self._linear(rows, names, f"query_key_value_{i}")
        parts = [f"{name}_{i}" for name in ("query", "key", "value")]
        self._nodes.append(
            helper.make_node("Split", [projected, self._constant("thirds", np.full(3, hidden))], parts, axis=-1)
        )
        batch = self._op("Shape", ["input_ids"], "shape") if i == 0 else "shape"
        if i == 0:
            wide = self._constant("hidden", np.array([hidden]))
            self._op("Concat", [batch, wide], "wide_shape", axis=0)
            self._op("Cast", ["attention_mask"], "mask", to=TensorProto.INT32)
        shaped = [self._op("Reshape", [part, "wide_shape"], f"{part}_wide") for part in parts]
        heads = self._op(
            "MultiHeadAttention", [*shaped, bias, "mask"], f"heads_{i}", _MICROSOFT, num_heads=self._about.heads
        )
        flat = self._op("Reshape", [heads, self._shape(-1, hidden)], f"heads_flat_{i}")
        attended = self._add_and_norm(flat, rows, f"{prefix}attention.output", f"attended_{i}")
        inner, bias = self._linear(attended, [f"{prefix}intermediate.dense"], f"intermediate_{i}")
        active = self._op("BiasGelu", [inner, bias], f"gelu_{i}", _MICROSOFT)
        return self._add_and_norm(active, attended, f"{prefix}output", f"output_{i}", least=-_GELU_MIN)

    def _add_and_norm(self, rows: str, residual: str, prefix: str, output: str, *, least: float | None = None) -> str:
        dense, bias = self._linear(rows, [f"{prefix}.dense"], f"{output}_dense", least=least)
        # Not SkipLayerNormalization, which does these three in one: on a CPU that takes twice the time.
        biased = self._op("Add", [dense, bias], f"{output}_biased")
        return self._normalised(self._op("Add", [biased, residual], f"{output}_sum"), f"{prefix}.LayerNorm", output)

    def _pool(self, rows: str) -> None:
        """Mean over the tokens that count, or the first one; to length 1. The mean's divisor drops out there."""
        wide = self._op("Reshape", [rows, "wide_shape"], "wide")
        if self._about.pooling == "mean":
            counts = self._op("Cast", ["attention_mask"], "counts", to=TensorProto.FLOAT)
            column = self._op("Unsqueeze", [counts, self._constant("two", np.array([2]))], "counts_column")
            kept = self._op("Mul", [wide, column], "kept")
            pooled = self._op("ReduceSum", [kept, self._constant("one", np.array([1]))], "pooled", keepdims=0)
        else:
            first = self._constant("first", np.array(0))
            pooled = self._op("Gather", [wide, first], "pooled", axis=1)
        length = self._op("ReduceL2", [pooled, self._constant("last", np.array([-1]))], "length", keepdims=1)
        self._op("Div", [pooled, length], "embedding")

    def _linear(self, rows: str, names: list[str], output: str, *, least: float | None = None) -> tuple[str, str]:
        """Rows times the transposed weights of the layers side by side; and the name of their bias, not yet added.

        `least` is a bound from below of the rows' values, where they have one: their range is then used in full.
        """
        weight = np.concatenate([self._weight(f"{name}.weight") for name in names]).T  # [inputs, outputs]
        bias = np.concatenate([self._weight(f"{name}.bias") for name in names])
        if self._maxima is None:
            product = self._op("MatMul", [rows, self._constant(f"{output}_weight", weight)], output)
            return product, self._constant(f"{output}_bias", bias)
        if (largest := self._maxima.get(output)) is not None:
            smooth = np.maximum(largest, 1e-3) ** _SMOOTHING
            smooth /= np.maximum(np.abs(weight).max(axis=1), 1e-4) ** (1 - _SMOOTHING)
            weight = weight * smooth[:, None]
            rows = self._op("Mul", [rows, self._constant(f"{output}_smooth", 1 / smooth)], f"{output}_smoothed")
        steps = np.maximum(np.abs(weight).max(axis=0), 1e-9) / _MAX
        quantised = np.rint(weight / steps).astype(np.int8)
        last = self._constant("last", np.array([-1]))
        if least is None:
            height = self._op("ReduceMax", [self._op("Abs", [rows], f"{output}_abs"), last], f"{output}_height")
            step = self._op("Mul", [height, self._scalar("per_row_step", 1 / _MAX)], f"{output}_step")
            zero = self._constant("row_zero", np.array(_MAX, np.uint8))
        else:
            bias = bias + least * (quantised * steps).sum(axis=0)
            rows = self._op("Add", [rows, self._scalar("lift", -least)], f"{output}_lifted")
            height = self._op("ReduceMax", [rows, last], f"{output}_height")
            step = self._op("Mul", [height, self._scalar("per_lifted_step", 1 / (2 * _MAX))], f"{output}_step")
            zero = self._constant("lifted_zero", np.array(0, np.uint8))
        scaled = self._op("Div", [rows, step], f"{output}_scaled")
        rounded = self._op("QuantizeLinear", [scaled, self._scalar("unit", 1.0), zero], f"{output}_quantised")
        inputs = [
            rounded,
            self._constant(f"{output}_weight", quantised),
            self._scalar("unit", 1.0),
            self._constant(f"{output}_steps", steps.astype(np.float32)),
            zero,
        ]
        product = self._op("MatMulIntegerToFloat", inputs, f"{output}_product", _MICROSOFT)
        return self._op("Mul", [product, step], output), self._constant(f"{output}_bias", bias.astype(np.float32))

    def _normalised(self, rows: str, name: str, output: str) -> str:
        gamma = self._constant(f"{name}.gamma", self._weight(f"{name}.weight"))
        beta = self._constant(f"{name}.beta", self._weight(f"{name}.bias"))
        epsilon = self._about.layer_norm_eps
        return self._op("LayerNormalization", [rows, gamma, beta], output, axis=-1, epsilon=epsilon)

    def _weight(self, name: str) -> Array:
        try:
            return self._weights[name]
        except KeyError:
            raise UnsupportedModel(f"{self._about.folder}/model.safetensors has no weight '{name}'.") from None

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def _scalar(self, name: str, value: float) -> str:
        return self._constant(name, np.array(value, np.float32))

    def _shape(self, *sizes: int) -> str:
        return self._constant("shape_" + "_".join(map(str, sizes)), np.array(sizes))

    def _op(self, kind: str, inputs: list[str], output: str, domain: str = "", **options: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [output], output, domain=domain, **options))
        return output
