"""Compile kernels ahead of time, without a GPU, and count what they use.

    python -m engine.kernels.compile [--arch 80 ...] [--model llama-3.1-8b ...] [--role decode ...] [--dtype bfloat16]
        [--json]
    python -m engine.kernels.compile --products [--arch 80 ...]

A kernel that spills registers, asks for more shared memory than the chip has, or misses the tensor cores is slow or
does not launch at all; the compiled code shows all three. Registers, stack and local memory come from
`cuobjdump -res-usage`, instruction counts from `cuobjdump -sass` (both ship with Triton), shared memory from Triton's
own metadata. What gets compiled is what `specialisations.py` lists, and `product_launches.py` for quantised weights.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.kernels.launch import FP_FUSION, Launch
from engine.kernels.product_launches import product_launches
from engine.kernels.specialisations import MODEL_SHAPES, ModelShape, Specialisation, model_launches

# Shared memory that one thread block may use, bytes (CUDA C++ Programming Guide, table "Technical Specifications").
SHARED_BYTES_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

_DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}


class CompileError(Exception):
    """A kernel that cannot be compiled here, with what to do."""


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one compiled kernel uses. Spills: stack and local memory per thread that the compiler had to add."""

    kernel: str  # the model's launch: "decode", "prefill"
    variant: str  # what for: "llama-3.1-8b bfloat16"
    uses_tensor_cores: bool  # whether it multiplies matrices, and so should have mma or wgmma
    arch: int  # 90: sm_90
    num_warps: int
    num_stages: int
    shared_bytes: int  # per thread block
    registers: int  # per thread, 255 at most
    spill_bytes: int  # per thread
    mma: int  # tensor-core instructions of a warp (HMMA; of eight-bit floats QMMA)
    wgmma: int  # of a warp group (HGMMA and QGMMA on sm_90, UTCHMMA and UTCQMMA on sm_100)
    async_copies: int  # global to shared memory past the registers (LDGSTS): loads that overlap arithmetic

    @property
    def shared_limit_bytes(self) -> int:
        return SHARED_BYTES_LIMIT[self.arch]


def compile_models(
    archs: Sequence[int], shapes: Sequence[ModelShape], dtype: torch.dtype = torch.bfloat16, roles: Sequence[str] = ()
) -> Iterator[KernelResources]:
    """Compile every kernel of every model for every architecture, or those in `roles` alone. Raises CompileError."""
    for arch in archs:
        for shape in shapes:
            variant = f"{shape.name} {str(dtype).removeprefix('torch.')}"
            for part in model_launches(shape, arch, dtype):
                if not roles or part.role in roles:
                    yield compile_launch(part, arch, variant)


def compile_products(
    archs: Sequence[int], dtype: torch.dtype = torch.bfloat16, roles: Sequence[str] = ()
) -> Iterator[KernelResources]:
    """Compile every kernel for quantised weights, as `compile_models`. Raises CompileError."""
    for arch in archs:
        for purpose, part in product_launches(arch, dtype):
            if roles and part.role not in roles:
                continue
            yield compile_launch(part, arch, f"{purpose} {str(dtype).removeprefix('torch.')}")


def compile_launch(part: Specialisation, arch: int, variant: str) -> KernelResources:
    """Compile the kernel as the launch would on an NVIDIA GPU of compute capability `arch` (80: 8.0) and count.

    Tensors may be on the "meta" device; their pointers count as 16-byte aligned. Raises CompileError.
    """
    compiled = compile_kernel(part.launch, arch)
    registers, spill_bytes = _resource_usage(compiled.asm["cubin"])
    sass = _cuobjdump(compiled.asm["cubin"], "-sass")
    return KernelResources(
        kernel=part.role,
        variant=variant,
        uses_tensor_cores=part.uses_tensor_cores,
        arch=arch,
        num_warps=part.launch.num_warps,
        num_stages=part.launch.num_stages,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        mma=len(re.findall(r"\b[HQ]MMA\b", sass)),
        wgmma=len(re.findall(r"\b(?:[HQ]GMMA|UTC[HQ]MMA)\b", sass)),
        async_copies=len(re.findall(r"\bLDGSTS\b", sass)),
    )


def compile_kernel(launch: Launch, arch: int) -> Any:
    """Triton's compiled kernel of `launch` for `arch`. Raises CompileError."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not hasattr(launch.kernel, "params"):
        raise CompileError("kernels are interpreted in this process: unset TRITON_INTERPRET to compile them")
    if arch not in SHARED_BYTES_LIMIT:
        raise CompileError(f"unknown architecture {arch}: choose from {sorted(SHARED_BYTES_LIMIT)}")
    signature, constants, attributes = _specialise(launch)
    options: dict[str, Any] = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    options |= {"enable_fp_fusion": FP_FUSION, "maxnreg": launch.max_registers}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _specialise(launch: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """The launch's signature, constants and attributes by Triton's rules for a call from Python.

    An integer becomes a constant if it is 1 and carries "divisible by 16" if it is, pointers likewise by alignment,
    unless the kernel declares the parameter `do_not_specialize`. Empty attributes are written where Triton writes them:
    a kernel compiled here is then found in the disk cache when serving asks for it.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for param in launch.kernel.params:
        name, path = param.name, (param.num,)
        if param.is_constexpr:
            signature[name] = "constexpr"
            constants[path], attributes[path] = launch.constants[name], []
            continue
        value = launch.args[name]
        if isinstance(value, float):
            signature[name] = "fp32"
            continue
        if isinstance(value, torch.Tensor):
            signature[name], aligned = "*" + _DTYPE_NAMES[value.dtype], True
        elif value == 1 and not param.do_not_specialize:
            signature[name] = "constexpr"
            constants[path], attributes[path] = 1, []
            continue
        else:
            signature[name], aligned = "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
        if not param.do_not_specialize:
            attributes[path] = [["tt.divisibility", 16]] if aligned else []
    return signature, constants, attributes


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack and local bytes) per thread."""
    text = _cuobjdump(cubin, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if match is None:
        raise CompileError(f"cuobjdump -res-usage printed nothing to read: {text[:200]!r}")
    registers, stack, local = (int(group) for group in match.groups())
    return registers, stack + local


def _cuobjdump(cubin: bytes, option: str) -> str:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise CompileError(f"{tool} {option} failed: {run.stderr.strip()}")
    return run.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or JSON. Returns 1 if a kernel spills or wants more shared memory than there is, 2 on errors."""
    models = {shape.name: shape for shape in MODEL_SHAPES}
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.compile", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_BYTES_LIMIT), help="default: 80, 90")
    parser.add_argument("--model", action="append", choices=sorted(models), help="default: all")
    parser.add_argument("--role", action="append", default=[], help="a kernel as the table names it; default: all")
    parser.add_argument("--products", action="store_true", help="in place of models: products with quantised weights")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    options = parser.parse_args(arguments)
    shapes = [models[name] for name in options.model or models]
    try:
        archs, dtype = options.arch or [80, 90], getattr(torch, options.dtype)
        if options.products:
            resources = list(compile_products(archs, dtype, options.role))
        else:
            resources = list(compile_models(archs, shapes, dtype, options.role))
    except CompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        json.dump([asdict(one) for one in resources], sys.stdout, indent=1)
        print()
    else:
        print(resource_table(resources))
    return int(any(one.spill_bytes or one.shared_bytes > one.shared_limit_bytes for one in resources))


def resource_table(resources: Sequence[KernelResources]) -> str:
    """One line per kernel, for people."""
    columns = ("kernel", "variant", "arch", "warps", "stages", "shared", "regs", "spill", "mma", "wgmma", "async")
    rows = [columns] + [
        (
            one.kernel,
            one.variant,
            f"sm_{one.arch}",
            *(str(number) for number in (one.num_warps, one.num_stages, one.shared_bytes, one.registers)),
            *(str(number) for number in (one.spill_bytes, one.mma, one.wgmma, one.async_copies)),
        )
        for one in resources
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
