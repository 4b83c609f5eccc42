"""Every tuned number of the quantised matrix products: tile sides, warps, pipeline stages, splits, where cuBLAS begins.

A committed table and not an autotuner, for the reasons given in `heuristics.py`. `python -m engine.kernels.tune` times
the candidates on a GPU and prints rows for here. The present ones come from compiled resources (no spills, loads in
flight, tensor-core instructions), not yet from timings.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.kernels.heuristics import INTERPRETER


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows of x and outputs per program, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (architecture, bits) -> tiles by rising height: the first that holds all rows is taken, else the last.
_PACKED: dict[tuple[int, int], tuple[ProductTile, ...]] = {
    (80, 4): (ProductTile(16, 64, 4, 5), ProductTile(32, 64, 4, 4), ProductTile(64, 64, 4, 3)),
    (80, 8): (ProductTile(16, 64, 4, 4), ProductTile(32, 64, 4, 4), ProductTile(64, 64, 4, 3)),
    (90, 4): (ProductTile(16, 64, 4, 6), ProductTile(32, 64, 4, 5), ProductTile(64, 64, 4, 4)),
    (90, 8): (ProductTile(16, 64, 4, 5), ProductTile(32, 64, 4, 4), ProductTile(64, 64, 4, 4)),
}
# architecture -> tiles for eight-bit floats, which Ampere cannot multiply.
FP8_ARCH = 89
_FP8: dict[int, tuple[ProductTile, ...]] = {
    89: (ProductTile(16, 64, 4, 4), ProductTile(64, 64, 4, 3), ProductTile(128, 64, 8, 3)),
    90: (ProductTile(16, 64, 4, 5), ProductTile(64, 128, 4, 4), ProductTile(128, 128, 8, 4)),
    100: (ProductTile(16, 64, 4, 5), ProductTile(64, 64, 4, 4), ProductTile(128, 64, 8, 4)),
}
_INTERPRETED = (ProductTile(16, 128, 4, 3), ProductTile(64, 128, 4, 3))

# More rows than this: the matrix cores have more to do than the memory, and weights are decoded for cuBLAS, which does
# it better. The product above is at its best while reading weights takes longer than multiplying.
CUBLAS_ABOVE_ROWS = 64

_PROGRAMS_PER_SM = 2
_MAX_SPLITS = 16
_LEAST_COLUMNS = 512  # of a split: fewer are over before the pipeline is full


def packed_tiles(arch: int, bits: int) -> tuple[ProductTile, ...]:
    """The tiles for compute capability `arch` (90: 9.0), or for INTERPRETER, by rising height.

    Takes the newest listed architecture that is not newer than `arch`. Raises ValueError for an older one.
    """
    if arch == INTERPRETER:
        return _INTERPRETED
    if arch < 80:
        raise ValueError(f"packed products need compute capability 8.0 (Ampere) or newer, this GPU has {arch / 10}")
    if arch >= 120:  # consumer Blackwell: tensor cores and shared memory of the small chips
        arch = 80
    listed = max(key[0] for key in _PACKED if key[0] <= arch and key[1] == bits)
    return _PACKED[listed, bits]


def fp8_tiles(arch: int) -> tuple[ProductTile, ...]:
    """The same for products of eight-bit floats. Raises ValueError below compute capability 8.9."""
    if arch == INTERPRETER:
        return _INTERPRETED
    if arch < FP8_ARCH:
        raise ValueError(f"products of eight-bit floats need compute capability 8.9 (Ada), this GPU has {arch / 10}")
    if arch >= 120:
        arch = FP8_ARCH
    return _FP8[max(listed for listed in _FP8 if listed <= arch)]


def choose_tile(tiles: tuple[ProductTile, ...], rows: int) -> ProductTile:
    """The lowest tile that holds all rows, else the highest."""
    return next((tile for tile in tiles if rows <= tile.block_m), tiles[-1])


def choose_splits(tile: ProductTile, rows: int, out_features: int, groups: int, group_size: int, num_sms: int) -> int:
    """Among how many programs a tile's columns are divided: enough for each multiprocessor to have several."""
    programs = -(-rows // tile.block_m) * -(-out_features // tile.block_n)
    wanted = -(-_PROGRAMS_PER_SM * num_sms // max(1, programs))
    splits = max(1, min(wanted, _MAX_SPLITS, groups * group_size // _LEAST_COLUMNS))
    per_split = -(-groups // splits)
    return -(-groups // per_split)  # none of them without groups
