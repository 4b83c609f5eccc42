"""Models of true shapes with random weights: no download, and speed does not depend on the values.

A `RandomModel` is opened, planned and loaded like any other; its matrices are views of one small block of numbers, so
making them costs next to nothing and what is timed on the card is the real size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.loader.info import GenerationDefaults, ModelInfo, TokenizerData
from engine.loader.source import OpenModel
from engine.memory import MatrixHeader
from engine.models.rope import RopeSpec
from engine.models.spec import ModelSpec, MoeSpec
from engine.models.tensors import ExpertTensors, FloatArray, LayerTensors, NetworkTensors
from engine.planning.headers import matrices_of
from engine.planning.shapes import SHAPES as PUBLISHED
from engine.quant.fp8 import Fp8Matrix
from engine.quant.int4 import Int4Matrix
from engine.quant.matrix import GROUP_SIZE, PIECE_VALUES, AffineBlocks, WeightMatrix

Encoding = Literal["bf16", "fp8", "awq"]
_ENCODINGS: dict[Encoding, str] = {"bf16": "BF16", "fp8": "F8_E4M3", "awq": "AWQ"}
_AWQ_GROUP = 128
_MAX_POSITION = 16384
Block = Literal["floats", "bytes", "codes"]
_RANDOM = np.random.default_rng(0)
_BYTES = _RANDOM.integers(0, 256, PIECE_VALUES, dtype=np.uint8)
_BLOCKS: dict[Block, npt.NDArray[Any]] = {
    "floats": (_RANDOM.standard_normal(PIECE_VALUES) * 0.02).astype(np.float32),
    "bytes": _BYTES,
    "codes": _BYTES & np.uint8(0xB7),  # e4m3 with no exponent so large that it is no number
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes and the encoding of its matrices."""

    name: str
    spec: ModelSpec
    encoding: Encoding = "bf16"

    @property
    def active_parameters(self) -> int:
        """Of one token's forward pass, the embedding left out."""
        spec = self.spec
        attention = spec.num_layers * spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size)
        width = spec.intermediate_size if spec.moe is None else spec.moe.top_k * spec.moe.intermediate_size
        return attention + spec.num_layers * 3 * spec.hidden_size * width + spec.vocab_size * spec.hidden_size

    def read_bytes(self, batch: int, held_bytes: int) -> float:
        """Weights that a step of `batch` tokens reads: all but the embedding, and of experts those that are hit."""
        spec, moe = self.spec, self.spec.moe
        embedding = spec.vocab_size * spec.hidden_size * 2
        if moe is None:
            return held_bytes - embedding
        experts = spec.num_layers * 3 * spec.hidden_size * moe.intermediate_size * 2  # of one each, bfloat16
        hit = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** batch)
        return held_bytes - embedding - experts * (moe.num_experts - hit)


def _shape(name: str, published: str, encoding: Encoding = "bf16") -> Shape:
    """A public model's sizes, with rotary tables no longer than the check needs."""
    return Shape(name, replace(PUBLISHED[published], max_position=_MAX_POSITION), encoding)


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("llama-3.1-8b", "llama-3.1-8b"),
        _shape("llama-3.1-8b-fp8", "llama-3.1-8b", "fp8"),
        _shape("llama-3.1-8b-awq", "llama-3.1-8b", "awq"),
        _shape("qwen3-8b", "qwen3-8b"),
        _shape("llama-70b-fp8", "llama-3.1-70b", "fp8"),
        _shape("qwen3-30b-a3b", "qwen3-30b-a3b"),
    )
}


def tiny(shape: Shape) -> Shape:
    """The same with everything small, for a rehearsal on a CPU."""
    spec, moe = shape.spec, shape.spec.moe
    small = replace(
        spec,
        layers=tuple(replace(layer, rope=RopeSpec(theta=10_000.0, rotary_dim=32)) for layer in spec.layers[:1]),
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=128,
        max_position=512,
        moe=None if moe is None else MoeSpec(8, 2, 64, renormalise=True),
    )
    return replace(shape, spec=small)


@dataclass(frozen=True, slots=True)
class TiledMatrix:
    """Floats, the same block over and over. See `WeightMatrix`."""

    num_rows: int
    num_columns: int
    encoding: str = "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_rows, self.num_columns

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.num_columns * 2

    @property
    def column_order(self) -> None:
        return None

    def take_rows(self, index: npt.NDArray[np.int64]) -> TiledMatrix:
        return replace(self, num_rows=len(index))

    def rows(self, start: int, stop: int) -> TiledMatrix:
        return replace(self, num_rows=stop - start)

    def columns(self, start: int, stop: int) -> TiledMatrix:
        return replace(self, num_columns=stop - start)

    def dequantize(self) -> FloatArray:
        return _tiled("floats", self.num_rows, self.num_columns)

    def affine(self) -> AffineBlocks | None:
        return None


@cache
def _tiled(block: Block, *shape: int) -> npt.NDArray[Any]:
    """The block over and over, once per shape: all layers share it."""
    size, values = int(np.prod(shape)), _BLOCKS[block]
    return (values[:size] if size <= values.size else np.resize(values, size)).reshape(shape)


def _matrix(encoding: Encoding, rows: int, columns: int) -> WeightMatrix:
    if encoding == "awq":
        group = min(_AWQ_GROUP, columns)
        scale = np.full((rows, columns // group), 0.004, dtype=np.float32)
        packed = _tiled("bytes", rows, columns // GROUP_SIZE, GROUP_SIZE // 2)
        return Int4Matrix(packed, scale, np.full(scale.shape, 8, dtype=np.uint8), "AWQ")
    if encoding == "fp8":
        codes = _tiled("codes", rows, columns)
        return Fp8Matrix(codes, np.full((rows, 1), 0.02, dtype=np.float32), columns)
    return TiledMatrix(rows, columns)


@dataclass(frozen=True, slots=True)
class _Header:
    shape: tuple[int, ...]
    encoding: str


class RandomTensors:
    """`ModelTensors` of a shape. Embedding and output matrix are floats in every encoding, as in published models."""

    def __init__(self, shape: Shape) -> None:
        self.spec, self._encoding = shape.spec, shape.encoding

    def embedding(self) -> WeightMatrix:
        return TiledMatrix(self.spec.vocab_size, self.spec.hidden_size)

    def output(self) -> WeightMatrix:
        return self.embedding()

    def final_norm(self) -> FloatArray:
        return np.ones(self.spec.hidden_size, dtype=np.float32)

    def score(self, labels: int) -> FloatArray:
        raise NotImplementedError("models of random weights generate text")

    def layers(self) -> Iterator[LayerTensors]:
        return (self.layer(index) for index in range(self.spec.num_layers))

    def layer(self, index: int) -> LayerTensors:
        """Block `index`: all are the same."""
        spec = self.spec
        ones = np.ones(spec.hidden_size, dtype=np.float32)
        head = np.ones(spec.head_dim, dtype=np.float32) if spec.qk_norm else None
        return LayerTensors(
            attention_norm=ones,
            qkv=[self._of(size, spec.hidden_size) for size in (spec.q_size, spec.kv_size, spec.kv_size)],
            attention_output=self._of(spec.hidden_size, spec.q_size),
            mlp_norm=ones,
            mlp=self._network(spec.intermediate_size) if spec.moe is None else self._experts(spec.moe),
            q_norm=head,
            k_norm=head,
        )

    def matrices(self, *, output: bool = True) -> Iterator[Sequence[MatrixHeader]]:
        """What `Demand` counts."""
        *blocks, last = matrices_of(self.spec, _ENCODINGS[self._encoding])
        yield from blocks
        if output:
            yield last

    def _of(self, rows: int, columns: int) -> WeightMatrix:
        return _matrix(self._encoding, rows, columns)

    def _network(self, width: int) -> NetworkTensors:
        hidden = self.spec.hidden_size
        return NetworkTensors([self._of(width, hidden), self._of(width, hidden)], self._of(hidden, width))

    def _experts(self, moe: MoeSpec) -> ExpertTensors:
        router = _RANDOM.standard_normal((moe.num_experts, self.spec.hidden_size), dtype=np.float32)
        return ExpertTensors(router, None, [self._network(moe.intermediate_size)] * moe.num_experts)


class RandomModel(OpenModel):
    """A model of `shape`, without a file."""

    def __init__(self, shape: Shape) -> None:
        self.path = Path(f"random/{shape.name}")
        self.spec = shape.spec
        self._shape = shape

    @cached_property
    def info(self) -> ModelInfo:
        """See `OpenModel`: a vocabulary without words and without an end."""
        empty = TokenizerData("gpt2", "gpt-2", [], [], [], None, None, None, add_bos=False)
        return ModelInfo(
            path=self.path,
            name=self._shape.name,
            spec=self.spec,
            quantization=self._shape.encoding,
            file_bytes=0,
            tokenizer=empty,
            chat_template=None,
            tool_template=None,
            generation=GenerationDefaults(None, None),
            licence=None,
            pooling=None,
        )

    def tensors(self) -> RandomTensors:
        """See `OpenModel`."""
        return RandomTensors(self._shape)

    def digest(self) -> bytes:
        """See `OpenModel`."""
        return self._shape.name.encode().ljust(32, b"\0")[:32]
