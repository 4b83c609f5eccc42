"""Drawing tokens: temperature, min_p, top_k, top_p and the draw, for many rows at once and without sorting.

With x the logits, M their maximum and u the row's number in [0, 1):

    s = (x - M) / temperature,  p = exp(s),  tokens with s < log(min_p) or x = -inf are out
    top_k    the k largest s stay                           Z = what they sum to (all of p without top_k)
    top_p    the fewest that hold top_p * Z, likeliest first, stay     N = what they sum to
    draw     the first token whose running sum, in order of the vocabulary or, after top_k or top_p, likeliest first,
             is above u * N

which is what `engine.sampling.draw` does by ranking (inverse transform sampling; top_p: arXiv 1904.09751). Ranking is
not needed: "the tokens above a bound" have a count and a sum, both grow as the bound falls, so the bound where one of
them passes a goal is found by searching the range of the 31 bits of -s, whose order is that of the numbers; a pass
leaves a sixteenth of it. Equal values count in order of the vocabulary. To make the passes short, a histogram first
shows a coarse bound that is low enough; only the tokens above it, a few hundred as a rule, are searched. Sums of p are
float64; nothing waits for the host.

    maximum   [rows, chunks]    largest logit of each chunk of the vocabulary
    weigh     [rows, chunks]    sum of p of each chunk; for top_k and top_p count and sum by bins of s
    compact   [rows]            the tokens above the coarse bound, in order of the vocabulary
    draw      [rows]            the bounds, and the token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch, next_power_of_2

CHUNK = 2048  # tokens of the vocabulary per program
BINS, BINS_PER_UNIT = 64, 2  # the last bin holds everything below
_PASS, _WAYS = 512, 16  # tokens, and bounds, that a step of a search compares
_PIECE = 128  # tokens that are sorted into bins at a time
# A row's settings: row of the logits, temperature, log(min_p), top_k or 0, top_p, u. Float64, one upload for all.
SETTINGS = tl.constexpr(6)


@triton.jit
def maximum_kernel(
    maxima_ptr: tl.tensor, logits_ptr: tl.tensor, settings_ptr: tl.tensor, VOCAB: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Grid: (rows, chunks)."""
    row = tl.program_id(0)
    source = tl.load(settings_ptr + row * SETTINGS).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + source * VOCAB + token, mask=token < VOCAB, other=-float("inf"))
    tl.store(maxima_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(x, 0))


@triton.jit
def row_maximum(maxima_ptr: tl.tensor, row: tl.tensor, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr) -> tl.tensor:
    chunk = tl.arange(0, CHUNKS_PADDED)
    maxima = tl.load(maxima_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=-float("inf"))
    return tl.max(maxima, 0)


@triton.jit
def scaled_logits(
    logits_ptr: tl.tensor,
    settings_ptr: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    top: tl.tensor,
    VOCAB: tl.constexpr,
) -> tl.tensor:
    """s of these tokens of a row; minus infinity for those that are out, or beyond the vocabulary."""
    settings = settings_ptr + row * SETTINGS
    source = tl.load(settings).to(tl.int64)
    x = tl.load(logits_ptr + source * VOCAB + token, mask=token < VOCAB, other=-float("inf"))
    s = (x - top) / tl.load(settings + 1).to(tl.float32)
    return tl.where(s < tl.load(settings + 2).to(tl.float32), -float("inf"), s)


@triton.jit
def bin_of(s: tl.tensor, BINS: tl.constexpr, BINS_PER_UNIT: tl.constexpr) -> tl.tensor:
    return tl.minimum(-s * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def weigh_kernel(
    sums_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    bin_sums_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    settings_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_UNIT: tl.constexpr,
) -> None:
    """Grid: (rows, chunks)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    place = row * CHUNKS + chunk
    top = row_maximum(maxima_ptr, row, CHUNKS, CHUNKS_PADDED)
    ranked = (tl.load(settings_ptr + row * SETTINGS + 3) > 0) | (tl.load(settings_ptr + row * SETTINGS + 4) < 1)
    if ranked:
        bins = tl.arange(0, BINS)
        counts = tl.zeros((BINS,), dtype=tl.int32)
        sums = tl.zeros((BINS,), dtype=tl.float64)
        for first in range(0, CHUNK, PIECE):
            token = chunk * CHUNK + first + tl.arange(0, PIECE)
            s = scaled_logits(logits_ptr, settings_ptr, row, token, top, VOCAB)
            within = (bin_of(s, BINS, BINS_PER_UNIT)[:, None] == bins[None, :]) & (s > -float("inf"))[:, None]
            counts += tl.sum(within.to(tl.int32), 0)
            sums += tl.sum(tl.where(within, tl.exp(s)[:, None], 0.0), 0).to(tl.float64)
        tl.store(bin_counts_ptr + place * BINS + bins, counts)
        tl.store(bin_sums_ptr + place * BINS + bins, sums)
        tl.store(sums_ptr + place, tl.sum(sums, 0))
    else:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        s = scaled_logits(logits_ptr, settings_ptr, row, token, top, VOCAB)
        tl.store(sums_ptr + place, tl.sum(tl.exp(s).to(tl.float64), 0))


@triton.jit
def compact_kernel(
    sizes_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    below_ptr: tl.tensor,
    bin_counts_ptr: tl.tensor,
    bin_sums_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    settings_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BINS_PER_UNIT: tl.constexpr,
) -> None:
    """Ids and -s of the tokens above the coarse bound. Grid: (rows,). Rows that draw from everything end at once."""
    row = tl.program_id(0)
    top_k = tl.load(settings_ptr + row * SETTINGS + 3)
    top_p = tl.load(settings_ptr + row * SETTINGS + 4)
    if (top_k <= 0) & (top_p >= 1):
        return
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    sums = tl.zeros((BINS,), dtype=tl.float64)
    for chunk in range(CHUNKS):
        counts += tl.load(bin_counts_ptr + (row * CHUNKS + chunk) * BINS + bins)
        sums += tl.load(bin_sums_ptr + (row * CHUNKS + chunk) * BINS + bins)
    if top_k > 0:
        short = tl.cumsum(counts, 0) < top_k
    else:  # a little more than top_p: sums in another order differ in their last digits
        short = tl.cumsum(sums, 0) < top_p * tl.sum(sums, 0) * (1 + 1e-9)
    last_bin = tl.sum(short.to(tl.int32), 0)
    top = row_maximum(maxima_ptr, row, CHUNKS, CHUNKS_PADDED)
    base = row.to(tl.int64) * VOCAB
    size = 0
    for first in range(0, VOCAB, CHUNK):
        token = first + tl.arange(0, CHUNK)
        s = scaled_logits(logits_ptr, settings_ptr, row, token, top, VOCAB)
        kept = (bin_of(s, BINS, BINS_PER_UNIT) <= last_bin) & (s > -float("inf"))
        place = base + size + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(ids_ptr + place, token, mask=kept)
        tl.store(below_ptr + place, tl.abs(s), mask=kept)  # and not -s, whose zero would have a sign
        size += tl.sum(kept.to(tl.int32), 0)
    tl.store(sizes_ptr + row, size)


@triton.jit
def around(keys_ptr: tl.tensor, size: tl.tensor, bound: tl.tensor, PASS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """(how many tokens have keys below `bound`, their sum of p, how many have this key). keys: the bits of -s."""
    below = bound * 0
    equal = bound * 0
    total = bound.to(tl.float64) * 0.0
    for first in range(0, size, PASS):
        place = first + tl.arange(0, PASS)
        key = tl.load(keys_ptr + place, mask=place < size, other=0x7FFFFFFF)
        below += tl.sum((key < bound).to(tl.int32), 0)
        equal += tl.sum((key == bound).to(tl.int32), 0)
        p = tl.exp(-key.to(tl.float32, bitcast=True))
        total += tl.sum(tl.where(key < bound, p, 0.0).to(tl.float64), 0)
    return below, total, equal


@triton.jit
def lowest_bound(
    keys_ptr: tl.tensor,
    size: tl.tensor,
    goal: tl.tensor,
    high: tl.tensor,
    BY_COUNT: tl.constexpr,
    ABOVE: tl.constexpr,
    PASS: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The lowest bound up to `high` where the count (BY_COUNT) or the sum of p of the tokens whose keys are at most
    the bound reaches the goal, or passes it (ABOVE); `high` if none does. Each pass leaves one part in WAYS."""
    low = high * 0
    way = tl.arange(0, WAYS)
    while low < high:
        step = (high - low + WAYS - 1) // WAYS
        bounds = low + step * (way + 1) - 1
        measure = tl.zeros((WAYS,), dtype=tl.float64)
        for first in range(0, size, PASS):
            place = first + tl.arange(0, PASS)
            key = tl.load(keys_ptr + place, mask=place < size, other=0x7FFFFFFF)
            if BY_COUNT:
                amount = tl.full((PASS,), 1.0, dtype=tl.float32)
            else:
                amount = tl.exp(-key.to(tl.float32, bitcast=True))
            kept = key[None, :] <= bounds[:, None]
            measure += tl.sum(tl.where(kept, amount[None, :], 0.0).to(tl.float64), 1)
        if ABOVE:
            missed = measure <= goal
        else:
            missed = measure < goal
        failed = tl.sum((missed & (bounds < high)).to(tl.int32), 0)
        high = tl.minimum(low + step * (failed + 1) - 1, high)
        low += step * failed
    return high


@triton.jit
def draw_from_all(
    logits_ptr: tl.tensor,
    settings_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    row: tl.tensor,
    top: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """The token where the running sum over the vocabulary passes u * sum: first its chunk, then its place therein."""
    index = tl.arange(0, CHUNKS_PADDED)
    sums = tl.load(sums_ptr + row * CHUNKS + index, mask=index < CHUNKS, other=0.0)
    running = tl.cumsum(sums, 0)
    target = tl.load(settings_ptr + row * SETTINGS + 5) * tl.sum(sums, 0)
    last = tl.max(tl.where(sums > 0, index, 0), 0)
    chunk = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), last)
    target -= tl.sum(tl.where(index < chunk, sums, 0.0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    p = tl.exp(scaled_logits(logits_ptr, settings_ptr, row, token, top, VOCAB)).to(tl.float64)
    passed = tl.sum((tl.cumsum(p, 0) <= target).to(tl.int32), 0)
    # Sums of other order may leave the target a last digit too high: then it is the last token that can be drawn.
    return tl.minimum(chunk * CHUNK + passed, tl.max(tl.where(p > 0, token, 0), 0))


@triton.jit
def draw_ranked(
    keys_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    size: tl.tensor,
    everything: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    u: tl.tensor,
    PASS: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The token by the bounds of top_k, top_p and the draw. everything: the sum of p over the vocabulary."""
    bound = size * 0 + 0x7F7FFFFF  # of the tokens that stay; and how many of those at it
    at_bound = size
    held = everything
    if top_k > 0:
        bound = lowest_bound(keys_ptr, size, tl.minimum(top_k, size), bound, True, False, PASS, WAYS)
        below, held, equal = around(keys_ptr, size, bound, PASS)
        at_bound = tl.minimum(top_k - below, equal)
        held += at_bound * tl.exp(-bound.to(tl.float32, bitcast=True)).to(tl.float64)
    if top_p < 1:
        goal = top_p * held
        nucleus = lowest_bound(keys_ptr, size, goal, bound, False, False, PASS, WAYS)
        below, sum_below, equal = around(keys_ptr, size, nucleus, PASS)
        p = tl.exp(-nucleus.to(tl.float32, bitcast=True))
        # One more as long as those before it hold less than the goal; the likeliest stays whatever top_p is.
        needed = tl.where(p > 0, tl.minimum(tl.ceil((goal - sum_below).to(tl.float32) / p), 1.0e9), 1.0).to(tl.int32)
        most = tl.where(nucleus == bound, tl.minimum(at_bound, equal), equal)
        at_bound = tl.maximum(tl.minimum(needed, most), 1)
        bound = nucleus
        held = sum_below + at_bound * p.to(tl.float64)
    target = u * held
    drawn = lowest_bound(keys_ptr, size, target, bound, False, True, PASS, WAYS)
    below, sum_below, equal = around(keys_ptr, size, drawn, PASS)
    p = tl.exp(-drawn.to(tl.float32, bitcast=True))
    equal = tl.where(drawn == bound, tl.minimum(at_bound, equal), equal)
    rank = tl.where(p > 0, tl.minimum((target - sum_below).to(tl.float32) / p, 1.0e9), 0.0).to(tl.int32)
    rank = tl.maximum(tl.minimum(rank, equal - 1), 0)
    token = size * 0
    seen = size * 0
    for first in range(0, size, PASS):
        place = first + tl.arange(0, PASS)
        same = (tl.load(keys_ptr + place, mask=place < size, other=0x7FFFFFFF) == drawn).to(tl.int32)
        here = (same == 1) & (seen + tl.cumsum(same, 0) - 1 == rank)
        token += tl.sum(tl.load(ids_ptr + place, mask=here, other=0), 0)
        seen += tl.sum(same, 0)
    return token


@triton.jit
def draw_kernel(
    tokens_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    sizes_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    settings_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PASS: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    """One row's token, written where the row stands among the logits. Grid: (rows,)."""
    row = tl.program_id(0)
    settings = settings_ptr + row * SETTINGS
    top_k, top_p = tl.load(settings + 3).to(tl.int32), tl.load(settings + 4)
    if (top_k <= 0) & (top_p >= 1):
        top = row_maximum(maxima_ptr, row, CHUNKS, CHUNKS_PADDED)
        token = draw_from_all(
            logits_ptr, settings_ptr, sums_ptr, row, top, VOCAB, CHUNKS, CHUNKS_PADDED, CHUNK
        )  # fmt: skip
    else:
        index = tl.arange(0, CHUNKS_PADDED)
        everything = tl.sum(tl.load(sums_ptr + row * CHUNKS + index, mask=index < CHUNKS, other=0.0), 0)
        base = row.to(tl.int64) * VOCAB
        token = draw_ranked(
            keys_ptr + base, ids_ptr + base, tl.load(sizes_ptr + row), everything, top_k, top_p,
            tl.load(settings + 5), PASS, WAYS,
        )  # fmt: skip
    tl.store(tokens_ptr + tl.load(settings).to(tl.int64), token.to(tl.int64))


@dataclass(frozen=True, slots=True)
class DrawBuffers:
    """Scratch for `rows` draws: two numbers of 32 bits per token of the vocabulary, and the histograms."""

    maxima: torch.Tensor  # float32 [rows, chunks]
    sums: torch.Tensor  # float64 [rows, chunks]
    bin_counts: torch.Tensor  # int32 [rows, chunks, BINS]
    bin_sums: torch.Tensor  # float64 [rows, chunks, BINS]
    sizes: torch.Tensor  # int32 [rows]
    ids: torch.Tensor  # int32 [rows, vocab]
    below: torch.Tensor  # float32 [rows, vocab]: -s

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> DrawBuffers:
        chunks = -(-vocab // CHUNK)
        return cls(
            maxima=torch.empty(rows, chunks, dtype=torch.float32, device=device),
            sums=torch.empty(rows, chunks, dtype=torch.float64, device=device),
            bin_counts=torch.empty(rows, chunks, BINS, dtype=torch.int32, device=device),
            bin_sums=torch.empty(rows, chunks, BINS, dtype=torch.float64, device=device),
            sizes=torch.empty(rows, dtype=torch.int32, device=device),
            ids=torch.empty(rows, vocab, dtype=torch.int32, device=device),
            below=torch.empty(rows, vocab, dtype=torch.float32, device=device),
        )


def draw_launches(
    logits: torch.Tensor, settings: torch.Tensor, tokens: torch.Tensor, buffers: DrawBuffers
) -> tuple[Launch, ...]:
    """The four launches, in order. logits: float32 `[*, vocab]`, contiguous, finite somewhere in every row that draws;
    settings: float64 `[rows, SETTINGS]`; tokens: int64 `[*]`, those of the rows that draw are written."""
    rows, vocab = settings.shape[0], logits.shape[1]
    chunks = buffers.maxima.shape[1]
    source = {"logits_ptr": logits, "settings_ptr": settings, "maxima_ptr": buffers.maxima}
    bins = {"bin_counts_ptr": buffers.bin_counts, "bin_sums_ptr": buffers.bin_sums}
    sizes = {"VOCAB": vocab, "CHUNKS": chunks, "CHUNKS_PADDED": next_power_of_2(chunks), "CHUNK": CHUNK}
    binning = {"BINS": BINS, "BINS_PER_UNIT": BINS_PER_UNIT}
    candidates = {"sizes_ptr": buffers.sizes, "ids_ptr": buffers.ids}
    keys = buffers.below.view(torch.int32)  # numbers that are not negative have the order of their bits
    return (
        Launch(maximum_kernel, (rows, chunks), source, {"VOCAB": vocab, "CHUNK": CHUNK}, 8, 1),
        Launch(
            weigh_kernel, (rows, chunks), source | bins | {"sums_ptr": buffers.sums},
            sizes | binning | {"PIECE": _PIECE}, 8, 1,
        ),
        Launch(
            compact_kernel, (rows,), source | bins | candidates | {"below_ptr": buffers.below},
            sizes | binning, 8, 1,
        ),
        Launch(
            draw_kernel, (rows,),
            source | candidates | {"sums_ptr": buffers.sums, "keys_ptr": keys, "tokens_ptr": tokens},
            sizes | {"PASS": _PASS, "WAYS": _WAYS}, 4, 1,
        ),
    )  # fmt: skip
