"""The memory ledger of a plan: weights, KV cache, activations, and how many requests the rest of a GPU has room for.

    KV per token = 2 (K and V) * layers * key-value heads * (head_dim * 2 bytes; with FP8 head_dim + 4)
    activations  = `engine.memory.scratch_bytes`: the widest block of one step, and its logits
    requests     = pages that the rest buys / pages of one request

Each precision that an engine on a GPU can have is a column of its own, and each rank of a model in several processes is
counted as that rank counts itself; what has least room decides. All formulas are those by which the engine divides
memory when it starts, so a plan and a start agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from engine.memory import GPU_SHARE, Demand, Storage, gpu_storage, kv_bytes_per_token
from engine.parallel.layout import Layout, Part, part_of
from engine.parallel.shards import part_matrices
from engine.planning.source import Source

_ELEMENT_BYTES = 2  # bfloat16, as activations on a GPU
_PRECISIONS = {"auto": gpu_storage(_ELEMENT_BYTES, packed=True), "bfloat16": gpu_storage(_ELEMENT_BYTES, packed=False)}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the GPUs, `gpu_bytes` each: `parallel` requests of `context` tokens each."""

    gpu_bytes: int
    context: int
    parallel: int
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_fp8: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Room:
    """What one GPU holds, the one of those that share the model that has least room; and what all of them can serve."""

    weights_bytes: int
    activation_bytes: int
    kv_budget_bytes: int
    kv_capacity_tokens: int
    requests: int  # of the whole context
    longest_context: int  # of `parallel` requests, at most the model's
    fits: bool


@dataclass(frozen=True, slots=True)
class Ledger:
    """See the module. Keys and values are counted over all GPUs. `precision`: a room for each of the engine's on a GPU,
    `auto` with packed weights, `bfloat16` with decoded ones, and both with a tied output matrix of its own."""

    parameters: int
    stored_bytes: Mapping[str, int]  # by encoding
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    kv_bytes_within_windows: int  # what one request's tokens in reach of sliding windows take; no less is kept today
    workload: Workload
    precision: Mapping[str, Room]

    def as_dict(self) -> dict[str, object]:
        rooms = {name: asdict(room) for name, room in self.precision.items()}
        return asdict(self) | {"stored_bytes": dict(self.stored_bytes), "precision": rooms}


def make_ledger(source: Source, workload: Workload) -> Ledger:
    """Raises ValueError for a context beyond the model's, and for sizes below one; LayoutError where the model cannot
    be divided so."""
    spec = source.spec
    if not 1 <= workload.context <= spec.max_position:
        raise ValueError(f"a context of {workload.context} tokens is outside 1 to {spec.max_position}, the model's own")
    if workload.parallel < 1 or workload.gpu_bytes < 1:
        raise ValueError("parallel requests and GPU memory must be at least 1")
    layout = Layout(workload.tensor_parallel, workload.pipeline_parallel)
    parts = [part_of(spec, place) for place in layout.places]
    per_token = sum(kv_bytes_per_token(part.spec, _ELEMENT_BYTES, fp8=workload.kv_fp8) for part in parts)
    demands = [_demand(source, part, workload) for part in parts]
    in_reach = sum(min(layer.window or workload.context, workload.context) for layer in spec.layers)
    return Ledger(
        parameters=spec.num_parameters,
        stored_bytes=source.stored_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_per_request=_pages(workload.context, workload) * workload.block_size * per_token,
        kv_bytes_within_windows=per_token // spec.num_layers * in_reach,
        workload=workload,
        precision={
            name: min((_room(demand, storage, spec.max_position, workload) for demand in demands), key=_tokens)
            for name, storage in _PRECISIONS.items()
        },
    )


def _demand(source: Source, part: Part, workload: Workload) -> Demand:
    return Demand(
        part.spec,
        list(part_matrices(iter(source.matrices), part)),
        max_model_len=workload.context,
        block_size=workload.block_size,
        max_num_seqs=workload.parallel,
        max_num_batched_tokens=workload.max_num_batched_tokens,
        kv_fp8=workload.kv_fp8,
        vocabulary=part.table_rows,
    )


def _pages(tokens: int, workload: Workload) -> int:
    return -(-tokens // workload.block_size)


def _room(demand: Demand, storage: Storage, longest: int, workload: Workload) -> Room:
    plan = demand.plan(storage)
    budget = max(0, int((workload.gpu_bytes - plan.without_kv_bytes) * GPU_SHARE))
    per_page = kv_bytes_per_token(demand.spec, _ELEMENT_BYTES, fp8=workload.kv_fp8) * workload.block_size
    # The first page of the cache belongs to nobody.
    pages = max(0, budget // per_page - 1)
    requests = pages // _pages(workload.context, workload)
    return Room(
        weights_bytes=plan.weights_bytes,
        activation_bytes=plan.scratch_bytes,
        kv_budget_bytes=budget,
        kv_capacity_tokens=pages * workload.block_size,
        requests=requests,
        longest_context=min(longest, pages // workload.parallel * workload.block_size),
        fits=requests >= workload.parallel,
    )


def _tokens(room: Room) -> int:
    return room.kv_capacity_tokens
