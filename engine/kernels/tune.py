"""Time the tiles of the packed products on this GPU and print rows for `product_table.py`.

    python -m engine.kernels.tune

Takes minutes, mostly for the compiler. What it prints is pasted into the table by hand and committed, with the card and
the versions in the message: serving itself never times anything.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from engine.kernels.launch import Launch
from engine.kernels.packed_gemm import PackedWeight, packed_gemm_launches
from engine.kernels.product_table import ProductTile, choose_splits

# Llama 3.1 8B: query, key and value; output; gate and up; down.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
GROUPS = {4: 128, 8: 32}  # bits -> the most common group
HEIGHTS = (16, 32, 64)
_REPEATS = 20


def candidates(block_m: int) -> list[ProductTile]:
    """The tiles of this height that are worth a trial."""
    return [ProductTile(block_m, *rest) for rest in itertools.product((32, 64, 128), (4, 8), (3, 4, 5, 6))]


def fastest(tiles: Iterable[ProductTile], seconds: Callable[[ProductTile], float | None]) -> ProductTile:
    """The tile that takes least by `seconds`; None from it: the tile does not fit. Raises ValueError if none does."""
    timed = [(taken, index, tile) for index, tile in enumerate(tiles) if (taken := seconds(tile)) is not None]
    if not timed:
        raise ValueError("no tile fits this GPU")
    return min(timed)[2]


def _seconds(tile: ProductTile, bits: int, device: torch.device) -> float | None:
    """One step's products with `tile.block_m` rows, all shapes; None: out of registers or shared memory."""
    from triton.runtime.errors import OutOfResources

    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    total = 0.0
    for outputs, columns in SHAPES:
        group = GROUPS[bits]
        groups = columns // group
        packed = torch.randint(0, 256, (groups, outputs, group * bits // 8), dtype=torch.uint8, device=device)
        factors = torch.ones(groups, outputs, dtype=torch.float16, device=device)
        weight = PackedWeight(packed, factors, factors, bits)
        x = torch.randn(tile.block_m, columns, dtype=torch.bfloat16, device=device)
        out = torch.empty(tile.block_m, outputs, dtype=x.dtype, device=device)
        splits = choose_splits(tile, tile.block_m, outputs, groups, group, num_sms)
        sums = torch.empty(splits * out.numel(), dtype=torch.float32, device=device)
        try:
            launches = packed_gemm_launches(x, weight, out, sums, tile=tile, splits=splits)
            total += _median_seconds(launches, device)
        except OutOfResources:
            return None
    return total


def _median_seconds(launches: Sequence[Launch], device: torch.device) -> float:
    """Of one after the other, with a cache that holds none of the weights."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    taken: list[float] = []
    for _ in range(1 + _REPEATS):  # the first one compiles
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for launch in launches:
            launch.run()
        end.record()
        end.synchronize()
        taken.append(float(start.elapsed_time(end)) / 1000)
    return statistics.median(taken[1:])


def main() -> int:
    """Returns 2 without a GPU."""
    if not torch.cuda.is_available():
        print("error: tiles are timed on a GPU, and torch finds none here", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability(device)
    print(f"# {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    for bits in GROUPS:
        tiles = [fastest(candidates(height), partial(_seconds, bits=bits, device=device)) for height in HEIGHTS]
        shown = ", ".join(f"ProductTile({t.block_m}, {t.block_n}, {t.num_warps}, {t.num_stages})" for t in tiles)
        print(f"    ({10 * major + minor}, {bits}): ({shown}),")
    return 0


if __name__ == "__main__":
    sys.exit(main())
