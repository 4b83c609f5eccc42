"""Where the tokens of a mixture of experts go, and how they come back: routing, permutation, combination.

    route      scores [tokens, experts] -> top_k experts and weights per token, and how many tokens each expert gets
    permute    a counting sort of the slots (token, choice) by expert, and a table of blocks for `moe_gemm.py`
    combine    out[t] = sum over j of weight[t, j] * y[t * top_k + j]

Where other ranks hold other experts, all are routed to, but only those here get blocks, and only their y are summed.

Softmax, then top_k (arXiv 2101.03961, 2401.04088); renormalised weights are a softmax over those picked. Equal scores
go to the expert with the lower number. Nothing here depends on a number that only the device knows: the grids are
bounded by tokens and experts, the block table has room for the worst case, and its unused blocks are empty.

The sort takes two launches and no atomics: `route` counts per chunk of tokens, and each program of `permute` adds up
the counts of the chunks before its own. Slots of an expert lie by chunk, choice and token, the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch, next_power_of_2

CHUNK = 32  # tokens per program of `route` and `permute`
_COUNTS_AT_ONCE = 16  # chunks whose counts are added up in one step
_BLOCKS_AT_ONCE = 16  # entries of the block table written in one step
_COMBINE_BLOCK = 1024  # elements per program


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    tokens: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """CHUNK tokens. Grid: (chunks,)."""
    chunk = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.arange(0, EXPERTS_PADDED)
    choice = tl.arange(0, TOP_K_PADDED)
    kept = token < tokens
    place = token.to(tl.int64)[:, None]
    exists = (expert < EXPERTS)[None, :]
    scores = tl.load(scores_ptr + place * EXPERTS + expert[None, :], mask=kept[:, None] & exists, other=0.0)
    scores = tl.where(exists, scores, -float("inf"))
    # A lane of no expert is below every other, minus infinity included, and is never picked: experts >= TOP_K.
    left = tl.where(exists, tl.maximum(scores, -3.0e38), -float("inf"))
    picked = tl.full((CHUNK, TOP_K_PADDED), -float("inf"), dtype=tl.float32)
    counts = tl.zeros((EXPERTS_PADDED,), dtype=tl.int32)
    for j in range(TOP_K):
        best = tl.argmax(left, 1, tie_break_left=True)
        is_best = expert[None, :] == best[:, None]
        score = tl.sum(tl.where(is_best, scores, 0.0), 1)
        picked = tl.where((choice == j)[None, :], score[:, None], picked)
        left = tl.where(is_best, -float("inf"), left)
        counts += tl.sum((is_best & kept[:, None]).to(tl.int32), 0)
        tl.store(chosen_ptr + token.to(tl.int64) * TOP_K + j, best.to(tl.int32), mask=kept)
    tl.store(counts_ptr + chunk * EXPERTS_PADDED + expert, counts)
    top = tl.max(picked, 1)[:, None]
    shares = tl.exp(picked - top)
    if RENORMALISE:
        total = tl.sum(shares, 1)
    else:
        total = tl.sum(tl.exp(scores - top), 1)
    tl.store(
        weights_ptr + place * TOP_K + choice[None, :],
        shares / total[:, None],
        mask=kept[:, None] & (choice < TOP_K)[None, :],
    )


@triton.jit(do_not_specialize=["tokens", "num_chunks", "num_blocks"])
def permute_kernel(
    order_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    tokens: tl.tensor,
    num_chunks: tl.tensor,
    num_blocks: tl.tensor,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    FIRST: tl.constexpr,
    HERE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COUNTS_AT_ONCE: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
) -> None:
    """The slots of CHUNK tokens, and this program's share of the block table. Grid: (chunks,).

    Experts FIRST to FIRST + HERE - 1 have blocks, which count them from FIRST on.
    """
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PADDED)
    total = tl.zeros((EXPERTS_PADDED,), dtype=tl.int32)
    earlier = tl.zeros((EXPERTS_PADDED,), dtype=tl.int32)
    for first in range(0, num_chunks, COUNTS_AT_ONCE):
        other = first + tl.arange(0, COUNTS_AT_ONCE)
        counts = tl.load(
            counts_ptr + other[:, None] * EXPERTS_PADDED + expert[None, :], mask=(other < num_chunks)[:, None], other=0
        )
        total += tl.sum(counts, 0)
        earlier += tl.sum(tl.where((other < chunk)[:, None], counts, 0), 0)
    start = tl.cumsum(total, 0) - total  # of the expert's slots in the order
    _place_slots(order_ptr, chosen_ptr, start + earlier, chunk, expert, tokens, TOP_K, CHUNK)

    is_here = (expert >= FIRST) & (expert < FIRST + HERE)
    count = tl.where(is_here, (total + BLOCK_M - 1) // BLOCK_M, 0)
    end_block = tl.cumsum(count, 0)
    for first in range(chunk * BLOCKS_AT_ONCE, num_blocks, num_chunks * BLOCKS_AT_ONCE):
        block = first + tl.arange(0, BLOCKS_AT_ONCE)
        owner = tl.sum((end_block[None, :] <= block[:, None]).to(tl.int32), 1)  # EXPERTS_PADDED: nobody's
        mine = expert[None, :] == owner[:, None]
        row = tl.sum(tl.where(mine, (start - (end_block - count) * BLOCK_M)[None, :], 0), 1) + block * BLOCK_M
        stop = tl.sum(tl.where(mine, (start + total)[None, :], 0), 1)
        used = owner < EXPERTS
        entry = blocks_ptr + 3 * block
        inside = block < num_blocks
        tl.store(entry, tl.where(used, owner - FIRST, 0), mask=inside)
        tl.store(entry + 1, tl.where(used, row, 0), mask=inside)
        tl.store(entry + 2, tl.where(used, tl.minimum(stop, row + BLOCK_M), 0), mask=inside)


@triton.jit
def _place_slots(
    order_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    base: tl.tensor,
    chunk: tl.tensor,
    expert: tl.tensor,
    tokens: tl.tensor,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write this chunk's slots to the order. base: where the next slot of each expert goes."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    kept = token < tokens
    for j in range(TOP_K):
        slot = token.to(tl.int64) * TOP_K + j
        mine = (tl.load(chosen_ptr + slot, mask=kept, other=-1)[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        place = tl.sum(mine * (base[None, :] + rank), 1)
        tl.store(order_ptr + place, slot.to(tl.int32), mask=kept)
        base += tl.sum(mine, 0)


@triton.jit
def combine_kernel(
    out_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
    FIRST: tl.constexpr,
    HERE: tl.constexpr,
) -> None:
    """BLOCK elements of one token, summed in float32. Grid: (tokens, ceil(HIDDEN / BLOCK)).

    ALL: every expert is here; else experts FIRST to FIRST + HERE - 1 are, and nobody has written the others' y.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = column < HIDDEN
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        slot = token * TOP_K + j
        if ALL:
            written = kept
        else:
            expert = tl.load(chosen_ptr + slot)
            written = column < tl.where((expert >= FIRST) & (expert < FIRST + HERE), HIDDEN, 0)
        y = tl.load(y_ptr + slot * HIDDEN + column, mask=written, other=0.0).to(tl.float32)
        total += y * tl.load(weights_ptr + slot)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=kept)


def most_blocks(tokens: int, top_k: int, experts: int, block_m: int) -> int:
    """The most blocks of `block_m` rows that the slots can take: each expert with a slot may leave one unfilled."""
    slots = tokens * top_k
    return slots // block_m + min(slots, experts)


@dataclass(frozen=True, slots=True)
class Routing:
    """Device buffers of one step's routing to `experts`, of which `here` are here."""

    chosen: torch.Tensor  # int32 [tokens, top_k]
    weights: torch.Tensor  # float32 [tokens, top_k]
    counts: torch.Tensor  # int32 [chunks, experts padded to a power of two]
    order: torch.Tensor  # int32 [tokens * top_k]: slots by expert; slot = token * top_k + choice
    # int32 [blocks, 3]: expert, counted from here.start, first and last + 1 place in the order; both 0: unused
    blocks: torch.Tensor
    experts: int
    here: range

    @classmethod
    def empty(
        cls, tokens: int, top_k: int, experts: int, block_m: int, device: torch.device, here: range | None = None
    ) -> Routing:
        """Buffers for `tokens`, to be filled by `routing_launches`. `here` None: all experts."""
        here = range(experts) if here is None else here

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        return cls(
            chosen=ints(tokens, top_k),
            weights=torch.empty(tokens, top_k, dtype=torch.float32, device=device),
            counts=ints(-(-tokens // CHUNK), next_power_of_2(experts)),
            order=ints(tokens * top_k),
            blocks=ints(most_blocks(tokens, top_k, len(here), block_m), 3),
            experts=experts,
            here=here,
        )


def routing_launches(scores: torch.Tensor, into: Routing, *, renormalise: bool, block_m: int) -> tuple[Launch, Launch]:
    """`route`, then `permute`. scores: float32 `[tokens, experts]`, contiguous; `block_m` as `into` was made with."""
    tokens, experts = scores.shape
    chunks, padded = into.counts.shape
    top_k = into.chosen.shape[1]
    shared: dict[str, int | float | bool | str] = {
        "EXPERTS": experts,
        "EXPERTS_PADDED": padded,
        "TOP_K": top_k,
        "CHUNK": CHUNK,
    }
    warps = min(16, max(4, CHUNK * padded // 1024))  # 32 scores a thread
    route = Launch(
        kernel=route_kernel,
        grid=(chunks,),
        args={
            "chosen_ptr": into.chosen,
            "weights_ptr": into.weights,
            "counts_ptr": into.counts,
            "scores_ptr": scores,
            "tokens": tokens,
        },
        constants=shared | {"TOP_K_PADDED": next_power_of_2(top_k), "RENORMALISE": renormalise},
        num_warps=warps,
        num_stages=1,
    )
    permute = Launch(
        kernel=permute_kernel,
        grid=(chunks,),
        args={
            "order_ptr": into.order,
            "blocks_ptr": into.blocks,
            "chosen_ptr": into.chosen,
            "counts_ptr": into.counts,
            "tokens": tokens,
            "num_chunks": chunks,
            "num_blocks": into.blocks.shape[0],
        },
        constants=shared
        | {"FIRST": into.here.start, "HERE": len(into.here), "BLOCK_M": block_m}
        | {"COUNTS_AT_ONCE": _COUNTS_AT_ONCE, "BLOCKS_AT_ONCE": _BLOCKS_AT_ONCE},
        num_warps=warps,
        num_stages=1,
    )
    return route, permute


def combine_launch(y: torch.Tensor, routing: Routing, out: torch.Tensor) -> Launch:
    """y: `[tokens * top_k, hidden]`, written for the experts that are here; out: `[tokens, hidden]`; contiguous."""
    tokens, hidden = out.shape
    here = routing.here
    return Launch(
        kernel=combine_kernel,
        grid=(tokens, -(-hidden // _COMBINE_BLOCK)),
        args={"out_ptr": out, "y_ptr": y, "weights_ptr": routing.weights, "chosen_ptr": routing.chosen},
        constants={
            "HIDDEN": hidden,
            "TOP_K": routing.weights.shape[1],
            "BLOCK": _COMBINE_BLOCK,
            "ALL": len(here) == routing.experts,
            "FIRST": here.start,
            "HERE": len(here),
        },
        num_warps=4,
        num_stages=1,
    )


def route_reference(scores: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen int64, weights float32), both `[tokens, top_k]`, in plain torch."""
    values, chosen = scores.sort(dim=-1, descending=True, stable=True)
    values, chosen = values[:, :top_k], chosen[:, :top_k]
    weights = values.softmax(-1) if renormalise else scores.softmax(-1).gather(1, chosen)
    return chosen, weights
