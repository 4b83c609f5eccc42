"""The memory ledger of a plan: weights, KV cache, activations, and how many requests the rest of a GPU has room for.

    KV per token = 2 (K and V) * layers * key-value heads * head_dim * bytes
    activations  = `engine.memory.scratch_bytes`: the widest block of one step, and its logits
    requests     = pages that the rest buys / pages of one request

All formulas are those by which the engine itself divides memory when it starts, so a plan and a start with
`--precision bfloat16` agree; what other precisions hold lies between the two columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from engine.memory import (
    GPU_SHARE,
    Demand,
    MatrixHeader,
    Storage,
    kv_bytes_per_token,
    scratch_bytes,
)
from engine.models.spec import ModelSpec

_KV_ELEMENT_BYTES = 2  # bfloat16, as activations on a GPU
_BFLOAT16 = Storage(element_bytes=2, dense_element_bytes=2, keep_dense=True, packed_bytes=None, on_gpu=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a GPU: `parallel` requests of `context` tokens each."""

    gpu_bytes: int
    context: int
    parallel: int
    max_num_batched_tokens: int = 512
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Room:
    """What is left beside weights of `weights_bytes`, and what it holds."""

    weights_bytes: int
    kv_budget_bytes: int
    kv_capacity_tokens: int
    requests: int  # of the whole context
    longest_context: int  # of `parallel` requests, at most the model's
    fits: bool


@dataclass(frozen=True, slots=True)
class Ledger:
    """See the module. `stored_bytes`: by encoding. `stored`: as if kernels read the stored weights. which `--precision
    auto` comes close to. `held`: decoded to bfloat16, with a tied output matrix of its own."""

    parameters: int
    stored_bytes: Mapping[str, int]
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    kv_bytes_within_windows: int  # what one request's tokens in reach of sliding windows take; no less is kept today
    activation_bytes: int
    workload: Workload
    stored: Room
    held: Room

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"stored_bytes": dict(self.stored_bytes)}


def make_ledger(spec: ModelSpec, stored_bytes: Mapping[str, int], workload: Workload) -> Ledger:
    """Raises ValueError for a context beyond the model's, and for sizes below one."""
    if not 1 <= workload.context <= spec.max_position:
        raise ValueError(f"a context of {workload.context} tokens is outside 1 to {spec.max_position}, the model's own")
    if workload.parallel < 1 or workload.gpu_bytes < 1:
        raise ValueError("parallel requests and GPU memory must be at least 1")
    per_token = kv_bytes_per_token(spec, _KV_ELEMENT_BYTES)
    scratch = scratch_bytes(spec, workload.max_num_batched_tokens, workload.parallel, _KV_ELEMENT_BYTES)
    demand = Demand(
        spec,
        list(matrices_of(spec)),
        max_model_len=workload.context,
        block_size=workload.block_size,
        max_num_seqs=workload.parallel,
        max_num_batched_tokens=workload.max_num_batched_tokens,
    )
    held = demand.plan(_BFLOAT16).weights_bytes
    per_layer = per_token // spec.num_layers
    in_reach = sum(min(layer.window or workload.context, workload.context) for layer in spec.layers)
    return Ledger(
        parameters=spec.num_parameters,
        stored_bytes=stored_bytes,
        kv_bytes_per_token=per_token,
        kv_bytes_per_request=_pages(workload.context, workload) * workload.block_size * per_token,
        kv_bytes_within_windows=per_layer * in_reach,
        activation_bytes=scratch,
        workload=workload,
        stored=_room(sum(stored_bytes.values()), scratch, per_token, spec.max_position, workload),
        held=_room(held, scratch, per_token, spec.max_position, workload),
    )


def _pages(tokens: int, workload: Workload) -> int:
    return -(-tokens // workload.block_size)


def _room(weights: int, scratch: int, per_token: int, longest: int, workload: Workload) -> Room:
    budget = max(0, int((workload.gpu_bytes - weights - scratch) * GPU_SHARE))
    # The first page of the cache belongs to nobody.
    pages = max(0, budget // (per_token * workload.block_size) - 1)
    requests = pages // _pages(workload.context, workload)
    return Room(
        weights_bytes=weights,
        kv_budget_bytes=budget,
        kv_capacity_tokens=pages * workload.block_size,
        requests=requests,
        longest_context=min(longest, pages // workload.parallel * workload.block_size),
        fits=requests >= workload.parallel,
    )


@dataclass(frozen=True, slots=True)
class _Matrix:
    shape: tuple[int, ...]
    encoding: str = "BF16"


def matrices_of(spec: ModelSpec) -> Iterator[Sequence[MatrixHeader]]:
    """The matrices that such a model's products are made of, by its sizes alone."""
    hidden = spec.hidden_size
    for layer in spec.layers:
        yield [_Matrix((spec.q_size, hidden)), _Matrix((spec.kv_size, hidden)), _Matrix((spec.kv_size, hidden))]
        yield [_Matrix((hidden, spec.q_size))]
        networks, inner = 1, spec.intermediate_size
        if layer.experts and spec.moe is not None:
            networks, inner = spec.moe.num_experts, spec.moe.intermediate_size
        for _ in range(networks):
            yield [_Matrix((inner, hidden)), _Matrix((inner, hidden))]
            yield [_Matrix((hidden, inner))]
    yield [_Matrix((spec.vocab_size, hidden))]


def product_parameters(spec: ModelSpec, *, experts_only: bool = False) -> int:
    """Weights in the blocks' matrices, which quantisation applies to: neither embedding and output nor norms."""
    if experts_only:
        if spec.moe is None:
            return 0
        network = 3 * spec.hidden_size * spec.moe.intermediate_size
        return sum(layer.experts for layer in spec.layers) * spec.moe.num_experts * network
    *blocks, _ = matrices_of(spec)
    return sum(matrix.shape[0] * matrix.shape[1] for group in blocks for matrix in group)
