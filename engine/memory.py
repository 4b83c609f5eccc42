"""The engine's memory as arithmetic: what a model will take, before it is loaded, and how many pages a budget buys.

Formulas over a file's headers, no torch. What is counted is this process's own memory: the file's pages are mapped
while it loads, but they are the system's, which takes them back when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from engine.limits import DRAWN_AT_ONCE
from engine.models.spec import ModelSpec
from engine.quant.grouped import grouped_bytes
from engine.quant.matrix import PIECE_VALUES

# Share of the memory free after loading that the KV cache may take when no budget is given.
_CPU_SHARE = 0.25
GPU_SHARE = 0.90
# While a piece of a matrix is decoded: its values, their integers and the scales, spread out.
_DECODING_COPIES = 4

# On a GPU, of packed weights that many rows are multiplied by: a larger matrix is decoded in slices of so many bytes.
DECODED_BYTES = 64 << 20

# The bytes that packed weights take, from the stacked matrices' encodings, rows and columns; None: no packed form.
PackedBytes = Callable[[Sequence[str], int, int], int | None]


class EngineMemoryError(Exception):
    """The model does not fit. The message gives the bytes needed and available, and what to change."""


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int, *, fp8: bool = False) -> int:
    """K and V of one token in all layers: `2 * layers * kv_heads * head_dim * element_bytes`.

    Grouped-query attention enters by `kv_heads`, the key-value heads, not the query heads. `fp8`: elements of a byte,
    whatever `element_bytes` says, and a float32 scale for each head.
    """
    head_bytes = spec.head_dim + 4 if fp8 else spec.head_dim * element_bytes
    return 2 * spec.num_layers * spec.num_kv_heads * head_bytes


def scratch_bytes(spec: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, element_bytes: int) -> int:
    """An upper bound on one step's activations: the widest block's inputs and outputs, and the float32 logits.

    The logits count twice, for the sampler's adjusted copy, and those that are drawn from at once nine times more; the
    most that was measured is eight.
    """
    network = 3 * spec.intermediate_size
    if (moe := spec.moe) is not None:  # what goes through the experts is there top_k times; the router's input is wider
        network = max(network, moe.top_k * (spec.hidden_size + moe.intermediate_size) + 3 * spec.hidden_size)
    widest = 2 * spec.hidden_size + network + 2 * (spec.q_size + 2 * spec.kv_size)
    logits = 2 * max_num_seqs + 9 * min(max_num_seqs, DRAWN_AT_ONCE)
    return max_num_batched_tokens * widest * element_bytes + logits * spec.vocab_size * 4


def text_count_bytes(texts: int, vocab: int) -> int:
    """On a GPU, of the tables that say how often so many texts have each token, for penalties."""
    return 5 * texts * vocab


def available_bytes() -> int:
    """Main memory this process can still take: the least of what the machine and the cgroup have left."""
    available = psutil.virtual_memory().available
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit_path, encoding="ascii") as limit, open(used_path, encoding="ascii") as used:
                return max(0, min(available, int(limit.read()) - int(used.read())))
        except (OSError, ValueError):  # no such cgroup version, or its limit is the word "max"
            continue
    return available


def choose_num_blocks(
    *,
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    budget_bytes: int | None,
    free_bytes: int,
    on_gpu: bool,
) -> int:
    """Pages of the KV cache, the null page included.

    With `budget_bytes`, what it buys; otherwise a share of `free_bytes`, but no more than `max_num_seqs` sequences of
    `max_model_len` can fill. Raises EngineMemoryError when not even one sequence of `max_model_len` fits.
    """
    block_bytes = bytes_per_token * block_size
    per_sequence = -(-max_model_len // block_size)
    share = int(free_bytes * (GPU_SHARE if on_gpu else _CPU_SHARE))
    budget = share if budget_bytes is None else budget_bytes
    blocks = budget // block_bytes
    if budget_bytes is None:
        blocks = min(blocks, per_sequence * max_num_seqs + 1)
    if blocks < per_sequence + 1:
        needed = (per_sequence + 1) * block_bytes
        raise EngineMemoryError(
            f"one sequence of {max_model_len} tokens needs a KV cache of {needed:,} bytes, {budget:,} are to be had: "
            f"lower max_model_len (to {max(0, blocks - 1) * block_size} at most) or raise kv_cache_bytes"
        )
    return blocks


class MatrixHeader(Protocol):
    """What a file says of a matrix."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def encoding(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Storage:
    """How a policy stores a model: bytes per activation and per decoded weight, whether packed matrices keep a decoded
    copy, what packing yields (None: nothing is packed), how many times that a matrix takes while it is packed, and what
    is decoded of packed weights at a time while they multiply."""

    element_bytes: int
    dense_element_bytes: int
    keep_dense: bool
    packed_bytes: PackedBytes | None
    packing_copies: int = 0
    decoded_bytes: int = 0
    on_gpu: bool = False


def gpu_storage(element_bytes: int, *, packed: bool) -> Storage:
    """How a GPU stores a model: all weights decoded, or `packed` wherever they can be."""
    return Storage(
        element_bytes=element_bytes,
        dense_element_bytes=element_bytes,
        keep_dense=not packed,
        packed_bytes=grouped_bytes if packed else None,
        decoded_bytes=DECODED_BYTES if packed else 0,
        on_gpu=True,
    )


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """What a model that drafts takes beside the one that it drafts for: weights, and per token in its own pages."""

    num_parameters: int
    values_per_token: int


@dataclass(frozen=True, slots=True)
class Demand:
    """A model and how it is to be served. `matrices`: in lists that share one product, as `GgufTensors.matrices`."""

    spec: ModelSpec
    matrices: Sequence[Sequence[MatrixHeader]]
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int | None = None
    adapter_values: int = 0  # numbers in all adapters that there may be at a time
    kv_fp8: bool = False  # keys and values in eight-bit floats
    vocabulary: int | None = None  # rows of the embedding that are held here; None: all
    ranks: int = 1  # processes that hold a part each in the same memory, and all ask what is free before one loads

    def plan(self, storage: Storage) -> MemoryPlan:
        """What this takes when stored so."""
        packed, dense, loading, decoded = 0, 0, 0, set[str]()
        for group in self.matrices:
            rows, columns = sum(matrix.shape[0] for matrix in group), group[0].shape[1]
            encodings = [matrix.encoding for matrix in group]
            size = storage.packed_bytes(encodings, rows, columns) if storage.packed_bytes else None
            if size is not None:
                packed += size
                loading = max(loading, storage.packing_copies * size)
            if size is None or storage.keep_dense:
                decoded_bytes = rows * columns * storage.dense_element_bytes
                dense += decoded_bytes
                loading = max(loading, decoded_bytes)  # it is reordered into another one
            if size is None and storage.packed_bytes is not None:
                decoded |= set(encodings)
        spec = self.spec
        angles = self.max_model_len * sum(rope.rotary_dim for rope in spec.ropes)
        per_token = kv_bytes_per_token(spec, storage.element_bytes, fp8=self.kv_fp8)
        pages = -(-self.max_model_len // self.block_size) + 1
        return MemoryPlan(
            packed_bytes=packed,
            dense_bytes=dense,
            embedding_bytes=spec.hidden_size
            * (spec.vocab_size if self.vocabulary is None else self.vocabulary)
            * storage.element_bytes,
            table_bytes=4 * (spec.num_float32_parameters + angles),
            # On a GPU the pieces are made in main memory, one matrix at a time.
            loading_bytes=0 if storage.on_gpu else loading + 4 * _DECODING_COPIES * PIECE_VALUES,
            scratch_bytes=storage.decoded_bytes
            + (text_count_bytes(self.max_num_seqs, spec.vocab_size) if storage.on_gpu else 0)
            + scratch_bytes(spec, self.max_num_batched_tokens, self.max_num_seqs, storage.element_bytes),
            kv_cache_bytes=self.kv_cache_bytes or pages * self.block_size * per_token,
            adapter_bytes=self.adapter_values * storage.element_bytes,
            decoded=tuple(sorted(decoded)),
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model will take, in bytes. `kv_cache_bytes`: what was asked for, else one sequence of `max_model_len`."""

    packed_bytes: int
    dense_bytes: int
    embedding_bytes: int
    table_bytes: int  # norms, routers and rotary tables
    loading_bytes: int  # for a moment, before there are activations
    scratch_bytes: int
    kv_cache_bytes: int
    decoded: tuple[str, ...] = field(default=())  # encodings without a packed form, where others were to be packed
    adapter_bytes: int = 0  # kept ready for adapters

    @property
    def weights_bytes(self) -> int:
        """What the model's weights take once they are loaded, all copies counted."""
        return self.packed_bytes + self.dense_bytes + self.embedding_bytes + self.table_bytes

    @property
    def without_kv_bytes(self) -> int:
        """The most that is held at a time, the KV cache apart."""
        return self.weights_bytes + self.adapter_bytes + max(self.loading_bytes, self.scratch_bytes)

    @property
    def total_bytes(self) -> int:
        return self.without_kv_bytes + self.kv_cache_bytes

    def refusal(self, free_bytes: int) -> str:
        """Why this does not fit: the sum, its parts, and what to do."""
        why = f" (no packed form for {', '.join(self.decoded)} in this engine)" if self.decoded else ""
        parts = (
            f"{self.packed_bytes:,} packed weights",
            f"{self.dense_bytes:,} decoded weights{why}",
            f"{self.embedding_bytes:,} embedding",
            f"{self.table_bytes:,} norms and rotary table",
            f"{self.kv_cache_bytes:,} KV cache",
            *([f"{self.adapter_bytes:,} adapters"] if self.adapter_bytes else []),
            f"{max(self.loading_bytes, self.scratch_bytes):,} to load and to compute",
        )
        return (
            f"the model needs {self.total_bytes:,} bytes, {free_bytes:,} are free: {' + '.join(parts)}. "
            "Use a smaller model, a lower max_model_len or kv_cache_bytes, or precision auto on a CPU"
        )


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """What an engine holds, in bytes, and the sizes it follows from."""

    weights_bytes: int
    kv_cache_bytes: int
    scratch_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    adapter_bytes: int = 0  # kept ready for adapters, whether or not they are there

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.adapter_bytes + self.kv_cache_bytes + self.scratch_bytes

    def as_dict(self) -> dict[str, int]:
        return {
            "weights_bytes": self.weights_bytes,
            "adapter_bytes": self.adapter_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "scratch_bytes": self.scratch_bytes,
            "total_bytes": self.total_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_capacity_tokens": self.kv_capacity_tokens,
        }
