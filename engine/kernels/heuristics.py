"""Every tuned number of the attention kernels: tile sides, warps, pipeline stages, splits.

A committed table and not an autotuner: tuning while serving synchronises the device, breaks graph capture, and lets
timing noise choose different arithmetic on different hosts. Rows are looked up by architecture, head size and dtype;
the query heads per KV head ("group") set the height of decode tiles in `attn_decode` itself.

The values come from compiled resources (`compile.py`: no spills, shared memory, tensor-core instructions), not yet
from timings on a GPU. Stages: a key's address depends on a page number that is itself loaded, one indirection, so
Triton keeps `(num_stages - 1) // 2` tiles of K and V in flight (at least one) and, from three stages on, fetches page
numbers ahead too. The shared memory of the compiled kernels shows it: 21, 21, 38 and 54 KiB for 2, 3, 5 and 7 stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# "Architecture" of the interpreter: its cost is per tile and not per element, so tiles are big.
INTERPRETER = 0


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Keys per tile, warps per program, pipeline stages."""

    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Query rows (tokens x heads of a group) and keys per tile, warps per program, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How decode splits a sequence's keys: into pieces of `size` (`fixed`), or of at least `size`."""

    size: int
    fixed: bool


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """The tiles for one (architecture, head size, dtype)."""

    decode: DecodeTile
    prefill: PrefillTile
    prefill_short: PrefillTile  # for few query rows per sequence


# (architecture, padded head size, bytes per element). The rows of 80 keep to the 99 KiB of shared memory of its small
# relatives 86, 89 and 120, which use them too.
_TILES: dict[tuple[int, int, int], AttentionTiles] = {
    (80, 64, 2): AttentionTiles(DecodeTile(64, 4, 7), PrefillTile(128, 64, 8, 3), PrefillTile(16, 32, 4, 5)),
    (80, 128, 2): AttentionTiles(DecodeTile(32, 4, 5), PrefillTile(128, 64, 8, 3), PrefillTile(16, 32, 4, 5)),
    (80, 256, 2): AttentionTiles(DecodeTile(32, 4, 5), PrefillTile(64, 32, 8, 3), PrefillTile(16, 32, 4, 5)),
    (90, 64, 2): AttentionTiles(DecodeTile(64, 4, 5), PrefillTile(128, 64, 8, 5), PrefillTile(16, 64, 4, 5)),
    (90, 128, 2): AttentionTiles(DecodeTile(32, 4, 7), PrefillTile(128, 64, 8, 5), PrefillTile(16, 32, 4, 5)),
    (90, 256, 2): AttentionTiles(DecodeTile(32, 4, 5), PrefillTile(128, 32, 8, 3), PrefillTile(16, 32, 4, 5)),
    (100, 64, 2): AttentionTiles(DecodeTile(64, 4, 5), PrefillTile(128, 32, 8, 3), PrefillTile(16, 64, 4, 5)),
    (100, 128, 2): AttentionTiles(DecodeTile(32, 4, 7), PrefillTile(128, 64, 8, 3), PrefillTile(16, 32, 4, 5)),
    (100, 256, 2): AttentionTiles(DecodeTile(32, 4, 5), PrefillTile(128, 32, 8, 3), PrefillTile(16, 32, 4, 5)),
    # float32 is for exactness, not speed: products without tensor cores, small tiles.
    (80, 64, 4): AttentionTiles(DecodeTile(16, 4, 3), PrefillTile(16, 16, 4, 3), PrefillTile(16, 16, 4, 3)),
    (80, 128, 4): AttentionTiles(DecodeTile(16, 4, 3), PrefillTile(32, 16, 4, 3), PrefillTile(16, 16, 4, 2)),
    (80, 256, 4): AttentionTiles(DecodeTile(16, 8, 3), PrefillTile(16, 16, 4, 3), PrefillTile(16, 16, 4, 3)),
}
_INTERPRETER_TILES = AttentionTiles(DecodeTile(64, 4, 3), PrefillTile(64, 64, 4, 3), PrefillTile(16, 64, 4, 3))

# Below this many query rows per sequence on average, a tall tile would be mostly padding.
SHORT_PREFILL_ROWS = 64

# Few enough keys to spread one sequence over the chip, enough that a split is worth its start. Fixed: batch-invariant.
SPLIT_AT_LEAST = SplitRule(size=128, fixed=False)
SPLIT_FIXED = SplitRule(size=256, fixed=True)

_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 64


def attention_tiles(arch: int, head_dim: int, dtype: torch.dtype) -> AttentionTiles:
    """The tiles for compute capability `arch` (90: 9.0), or for INTERPRETER.

    Takes the newest listed architecture that is not newer than `arch`. Raises ValueError for a head size, a dtype or
    an architecture that the kernels do not serve.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"attention kernels take float16, bfloat16 and float32, not {dtype}")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"attention kernels take head sizes of 16 to 256 in steps of 16, not {head_dim}")
    if arch == INTERPRETER:
        return _INTERPRETER_TILES
    if arch < 80:
        raise ValueError(f"attention kernels need compute capability 8.0 (Ampere) or newer, this GPU has {arch / 10}")
    if arch >= 120:  # consumer Blackwell: tensor cores and shared memory of the small chips
        arch = 89
    padded = max(64, 1 << (head_dim - 1).bit_length())
    listed = max(key[0] for key in _TILES if key[0] <= arch and key[1:] == (padded, dtype.itemsize))
    return _TILES[listed, padded, dtype.itemsize]


def decode_splits(num_seqs: int, kv_heads: int, num_sms: int, max_seq_len: int, rule: SplitRule) -> int:
    """How many splits a decode launch offers each sequence: `max_splits` of `attn_decode`, at least 1.

    A fixed-size rule needs as many as the longest sequence has. Otherwise enough programs for each multiprocessor to
    have several, but no more than the longest sequence can use.
    """
    usable = max(1, -(-max_seq_len // rule.size))
    if rule.fixed:
        return usable
    return min(usable, _MAX_SPLITS, max(1, -(-_PROGRAMS_PER_SM * num_sms // max(1, num_seqs * kv_heads))))
