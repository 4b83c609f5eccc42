"""The matrices of a model by its sizes alone: what a plan counts where there are no files to ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.memory import MatrixHeader
from engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Header:
    """See `MatrixHeader`."""

    shape: tuple[int, ...]
    encoding: str = "BF16"


def matrices_of(
    spec: ModelSpec, encoding: str = "BF16", *, experts_only: bool = False
) -> Iterator[Sequence[MatrixHeader]]:
    """As `ModelTensors.matrices`. `encoding`: of the blocks' matrices, or of the experts alone; the output matrix and
    what is left are as published models have them."""
    hidden = spec.hidden_size
    other = "BF16" if experts_only else encoding
    for layer in spec.layers:
        yield [Header((size, hidden), other) for size in (spec.q_size, spec.kv_size, spec.kv_size)]
        yield [Header((hidden, spec.q_size), other)]
        if layer.experts and spec.moe is not None:
            networks, inner, kind = spec.moe.num_experts, spec.moe.intermediate_size, encoding
        else:
            networks, inner, kind = 1, spec.intermediate_size, other
        for _ in range(networks):
            yield [Header((inner, hidden), kind), Header((inner, hidden), kind)]
            yield [Header((hidden, inner), kind)]
    yield [Header((spec.vocab_size, hidden))]


def product_parameters(spec: ModelSpec, *, experts_only: bool = False) -> int:
    """Weights in the blocks' matrices, which quantisation applies to: neither embedding and output nor norms."""
    if experts_only:
        if spec.moe is None:
            return 0
        network = 3 * spec.hidden_size * spec.moe.intermediate_size
        return sum(layer.experts for layer in spec.layers) * spec.moe.num_experts * network
    *blocks, _ = matrices_of(spec)
    return sum(matrix.shape[0] * matrix.shape[1] for group in blocks for matrix in group)
