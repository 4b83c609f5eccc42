"""The tensors of one rank's part, taken from the whole model's files: rows of what comes in, columns of what goes out.

    qkv, gate_up, output, embedding   rows: each rank computes its own heads, inner columns and tokens
    attention output, down            columns: each rank's result is a term of a sum, and so is an expert's
    norms, router                     whole on every rank; biases of sums on the first rank of a stage only

Rows are views of the mapped file and columns copies of a part of it, so a rank reads what it holds. The exceptions are
AWQ, GPTQ and compressed-tensors, whose words are repacked matrix by matrix before they are cut. Blocks of columns that
share a scale stay whole: where a part would cut one, or columns have an order of their own, the layout is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.loader.source import ModelTensors
from engine.memory import MatrixHeader
from engine.models.tensors import ExpertTensors, FloatArray, LayerTensors, NetworkTensors
from engine.parallel.errors import LayoutError
from engine.parallel.layout import Part
from engine.quant.matrix import WeightMatrix


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What will be held of a matrix: see `MatrixHeader`."""

    shape: tuple[int, ...]
    encoding: str


class PartTensors:
    """`ModelTensors` of the part `part` of the model in `source`.

    Raises LayoutError, when a tensor is taken, where its encoding cannot be cut so.
    """

    def __init__(self, source: ModelTensors, part: Part) -> None:
        self.spec = part.spec
        self._source, self._part = source, part

    def embedding(self) -> WeightMatrix:
        return _rows(self._source.embedding(), self._part.vocabulary)

    def output(self) -> WeightMatrix:
        return _rows(self._source.output(), self._part.vocabulary)

    def final_norm(self) -> FloatArray:
        return self._source.final_norm()

    def score(self, labels: int) -> FloatArray:
        return self._source.score(labels)

    def layers(self) -> Iterator[LayerTensors]:
        for index in self._part.layers:
            yield self.layer(index)

    def layer(self, index: int) -> LayerTensors:
        """Block `index` of the whole model."""
        part, tensors = self._part, self._source.layer(index)
        head_dim, is_first = part.spec.head_dim, part.place.tensor_rank == 0
        sizes = [part.whole.q_size, part.whole.kv_size, part.whole.kv_size]
        spans = [_scaled(heads, head_dim) for heads in (part.heads, part.kv_heads, part.kv_heads)]
        try:
            return replace(
                tensors,
                qkv=_parts_of(tensors.qkv, sizes, spans),
                qkv_bias=_parts_of_vector(tensors.qkv_bias, sizes, spans),
                sinks=None if tensors.sinks is None else tensors.sinks[part.heads.start : part.heads.stop],
                attention_output=_columns(tensors.attention_output, spans[0]),
                attention_output_bias=tensors.attention_output_bias if is_first else None,
                mlp=self._mlp(tensors.mlp),
            )
        except ValueError as error:
            raise LayoutError(
                f"layer {index} cannot be divided among {part.place.layout.tensor} tensor-parallel ranks: {error}"
            ) from error

    def _mlp(self, mlp: NetworkTensors | ExpertTensors) -> NetworkTensors | ExpertTensors:
        part = self._part
        if isinstance(mlp, ExpertTensors):
            return mlp.only(part.experts)
        sizes, spans = [part.whole.intermediate_size] * 2, [part.inner] * 2
        return NetworkTensors(
            gate_up=_parts_of(mlp.gate_up, sizes, spans),
            down=_columns(mlp.down, part.inner),
            gate_up_bias=_parts_of_vector(mlp.gate_up_bias, sizes, spans),
            down_bias=mlp.down_bias if part.place.tensor_rank == 0 else None,
        )

    def matrices(self, *, output: bool = True) -> Iterator[Sequence[MatrixHeader]]:
        """See `ModelTensors.matrices`: the shapes are those that this part will have."""
        return part_matrices(self._source.matrices(output=output), self._part)


def part_matrices(groups: Iterator[Sequence[MatrixHeader]], part: Part) -> Iterator[Sequence[MatrixHeader]]:
    """Of the whole model's matrices, see `ModelTensors.matrices`, what `part` will hold; no tensor is looked at."""
    spec = part.spec
    for index, layer in enumerate(part.whole.layers):
        if layer.experts and part.whole.moe is not None:
            count = part.whole.moe.num_experts
            qkv, attended, *experts = (next(groups) for _ in range(2 + 2 * count))
            networks = experts[2 * part.experts.start : 2 * part.experts.stop]
        else:
            qkv, attended, gate_up, down = (next(groups) for _ in range(4))
            networks = [_with_rows(gate_up, 2 * spec.intermediate_size), _with_columns(down, len(part.inner))]
        if index in part.layers:
            yield _with_rows(qkv, spec.q_size + 2 * spec.kv_size)
            yield _with_columns(attended, spec.q_size)
            yield from networks
    for output in groups:
        yield _with_rows(output, len(part.vocabulary))


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


def _rows(matrix: WeightMatrix, span: range) -> WeightMatrix:
    return matrix.rows(span.start, span.stop)


def _columns(matrix: WeightMatrix, span: range) -> WeightMatrix:
    return matrix if len(span) == matrix.num_columns else matrix.columns(span.start, span.stop)


def _parts_of(stacked: Sequence[WeightMatrix], sizes: Sequence[int], spans: Sequence[range]) -> list[WeightMatrix]:
    """Of matrices of `sizes` rows, one by one or all in one, the rows `spans` of each."""
    if len(stacked) == len(sizes):
        return [_rows(matrix, span) for matrix, span in zip(stacked, spans, strict=True)]
    (whole,) = stacked
    return [_rows(whole, span) for span in _in_one(sizes, spans)]


def _parts_of_vector(values: FloatArray | None, sizes: Sequence[int], spans: Sequence[range]) -> FloatArray | None:
    if values is None:
        return None
    return np.concatenate([values[span.start : span.stop] for span in _in_one(sizes, spans)])


def _in_one(sizes: Sequence[int], spans: Sequence[range]) -> list[range]:
    """The spans where the things that they are of lie end to end."""
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [range(start + span.start, start + span.stop) for start, span in zip(starts, spans, strict=True)]


def _with_rows(group: Sequence[MatrixHeader], rows: int) -> list[PartHeader]:
    """One header for all, as their rows are stacked in one product; the encodings stay, each with no row of its own."""
    columns = group[0].shape[1]
    first, *others = (header.encoding for header in group)
    return [PartHeader((rows, columns), first), *(PartHeader((0, columns), encoding) for encoding in others)]


def _with_columns(group: Sequence[MatrixHeader], columns: int) -> list[PartHeader]:
    return [PartHeader((header.shape[0], columns), header.encoding) for header in group]
