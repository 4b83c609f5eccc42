"""Who holds which part of a model: arithmetic over its spec, no torch.

    rank = (stages - 1 - stage) * tensor + tensor_rank

A stage is a run of blocks; its `tensor` ranks share the heads, the feed-forward networks, the experts and the
vocabulary of each block. Rank 0 is in the last stage, because it samples: logits need no way back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.spec import ModelSpec
from engine.parallel.errors import LayoutError

MOST_RANKS = 64  # the GPUs of the largest machine, with room to spare


@dataclass(frozen=True, slots=True)
class Layout:
    """`tensor` ranks share each block, `pipeline` stages share the blocks. Raises LayoutError for too few or many."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline) < 1 or self.num_ranks > MOST_RANKS:
            raise LayoutError(
                f"tensor_parallel {self.tensor} times pipeline_parallel {self.pipeline}: "
                f"1 to {MOST_RANKS} processes run on one machine"
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def places(self) -> list[Place]:
        """All of them, by rank."""
        return [Place(self, rank) for rank in range(self.num_ranks)]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank in a layout."""

    layout: Layout
    rank: int

    @property
    def stage(self) -> int:
        """0 has the first blocks."""
        return self.layout.pipeline - 1 - self.rank // self.layout.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.layout.tensor

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which schedules and samples."""
        return self.rank == 0

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.layout.pipeline - 1

    @property
    def stage_ranks(self) -> range:
        """Those who share this one's blocks, itself included."""
        first = self.rank - self.tensor_rank
        return range(first, first + self.layout.tensor)

    @property
    def previous_rank(self) -> int:
        """Who sends what goes into this stage."""
        return self.rank + self.layout.tensor

    @property
    def next_rank(self) -> int:
        """Who gets what comes out of this stage."""
        return self.rank - self.layout.tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of the model `whole`. `spec`: the model as this rank sees it, fewer heads and blocks.

    The ranges are of the whole model's blocks, heads, key-value heads, columns of the feed-forward networks, experts
    and tokens. Where there are fewer key-value heads than ranks, several ranks hold the same one.
    """

    whole: ModelSpec
    spec: ModelSpec
    place: Place
    layers: range
    heads: range
    kv_heads: range
    inner: range
    experts: range
    vocabulary: range

    @property
    def table_rows(self) -> int:
        """Of the embedding, held here."""
        return len(self.vocabulary) if self.place.is_first else 0


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Raises LayoutError where `spec` cannot be divided so."""
    ranks = layout.tensor
    if not _divides(spec, ranks):
        possible = [str(n) for n in range(1, MOST_RANKS + 1) if _divides(spec, n)]
        inner = f" and {spec.intermediate_size} columns of its feed-forward networks" if _has_dense(spec) else ""
        experts = "" if spec.moe is None else f", {spec.moe.num_experts} experts"
        raise LayoutError(
            f"{spec.num_heads} attention heads ({spec.num_kv_heads} of keys and values){inner}{experts} cannot be "
            f"divided among {ranks} tensor-parallel ranks: use {', '.join(possible)}"
        )
    if layout.pipeline > spec.num_layers:
        raise LayoutError(
            f"{spec.num_layers} layers cannot be divided into {layout.pipeline} stages: use {spec.num_layers} or fewer"
        )


def part_of(spec: ModelSpec, place: Place) -> Part:
    """What the rank at `place` holds. Raises LayoutError as `check_layout`."""
    check_layout(spec, place.layout)
    ranks, rank = place.layout.tensor, place.tensor_rank
    heads = _share(spec.num_heads, ranks, rank)
    group = spec.num_heads // spec.num_kv_heads
    kv_heads = range(heads.start // group, (heads.stop - 1) // group + 1)
    inner = _share(spec.intermediate_size, ranks, rank)
    layers = _share(spec.num_layers, place.layout.pipeline, place.stage)
    own = replace(
        spec,
        layers=spec.layers[layers.start : layers.stop],
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        intermediate_size=len(inner),
    )
    return Part(
        whole=spec,
        spec=own,
        place=place,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        experts=_share(0 if spec.moe is None else spec.moe.num_experts, ranks, rank),
        vocabulary=vocabulary_of(spec.vocab_size, ranks, rank),
    )


def vocabulary_of(size: int, ranks: int, rank: int) -> range:
    """Equal parts but for the last one, so that who joins them can cut off what is too much."""
    width = -(-size // ranks)
    return range(min(size, rank * width), min(size, (rank + 1) * width))


def _divides(spec: ModelSpec, ranks: int) -> bool:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return False
    if _has_dense(spec) and spec.intermediate_size % ranks:
        return False
    return spec.moe is None or spec.moe.num_experts >= ranks


def _has_dense(spec: ModelSpec) -> bool:
    return not all(layer.experts for layer in spec.layers)


def _share(count: int, parts: int, number: int) -> range:
    """Of `count` things in `parts` runs as equal as can be, run `number`."""
    return range(count * number // parts, count * (number + 1) // parts)
