"""What the Triton kernels use once compiled: registers, shared memory, spills, tensor-core instructions.

    python -m bench.kernels_report [--arch 80 ...] [--model llama-3.1-8b ...]

Needs no GPU: kernels are compiled ahead of time with the tools that ship with Triton, so the figures are exact and the
same on every machine with the same Triton. The physical limits stand beside them as rows of the system "limit".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

from bench.report import Row, report
from engine.kernels.compile import (
    SHARED_BYTES_LIMIT,
    CompileError,
    KernelResources,
    compile_models,
    compile_products,
    resource_table,
)
from engine.kernels.specialisations import MODEL_SHAPES

DEFAULT_ARCHS = (80, 90)
_UNITS = {
    "registers": "per thread",
    "spill_bytes": "bytes per thread",
    "shared_bytes": "bytes per block",
    "mma": "instructions",
    "wgmma": "instructions",
    "async_copies": "instructions",
}
_PLAIN = ("registers", "spill_bytes", "shared_bytes")  # all there is to say of a kernel without matrix products


def rows(resources: Iterable[KernelResources]) -> Iterator[Row]:
    """One row per kernel, model, architecture and quantity."""
    for one in resources:
        setting = f"sm_{one.arch} {one.variant} warps={one.num_warps} stages={one.num_stages}"
        for metric in _UNITS if one.uses_tensor_cores else _PLAIN:
            unit = _UNITS[metric]
            yield Row.of(metric, one.kernel, setting, unit, [getattr(one, metric)])


def limits(archs: Iterable[int]) -> Iterator[Row]:
    """What the chips allow."""
    for arch in archs:
        yield Row.of("registers", "limit", f"sm_{arch}", _UNITS["registers"], [255])
        yield Row.of("shared_bytes", "limit", f"sm_{arch}", _UNITS["shared_bytes"], [SHARED_BYTES_LIMIT[arch]])


def main() -> int:
    """Compile, report to `bench/results/kernels.json`. Returns 1 if a kernel spills or exceeds its chip."""
    models = {shape.name: shape for shape in MODEL_SHAPES}
    parser = argparse.ArgumentParser(prog="python -m bench.kernels_report", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_BYTES_LIMIT), help="default: 80 90")
    parser.add_argument("--model", action="append", choices=sorted(models), help="default: all, and quantised weights")
    options = parser.parse_args()
    archs = options.arch or DEFAULT_ARCHS
    try:
        resources = list(compile_models(archs, [models[name] for name in options.model or models]))
        if not options.model:
            resources += compile_products(archs)
    except CompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(resource_table(resources))
    report("kernels", [*limits(archs), *rows(resources)], show=False)
    bad = [one for one in resources if one.spill_bytes or one.shared_bytes > one.shared_limit_bytes]
    for one in bad:
        print(f"does not fit: {one}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
