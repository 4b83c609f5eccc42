"""Compiles the C kernels in `engine/kernels/cpu_*.c` on first use and loads them; does without where that fails.

The library is built for this very processor with the system's C compiler, kept in a cache folder under a name that
hashes source, flags, compiler and processor, and probed before use. It has threads of its own, as many as torch is set
to use (`cpu_pool.c` says why). `TIERLINE_NATIVE=0` turns it off, `TIERLINE_CACHE_DIR` moves the folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.models.spec import Activation

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent.parent / "kernels"
_SOURCES = ("cpu_attention.c", "cpu_block.c", "cpu_decoder.c", "cpu_draw.c", "cpu_linear.c", "cpu_pool.c")
_HEADERS = ("cpu_common.h", "cpu_kernels.h", "cpu_pool.h")
# Read with this module, not when the compiler runs: Python and C must agree on every argument, and a process may have
# run for long, its package replaced under it, before it builds. Also, what is hashed must be what is compiled.
_CODE = {name: (_SOURCE_DIR / name).read_bytes() for name in (*_SOURCES, *_HEADERS) if (_SOURCE_DIR / name).is_file()}
_FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-Wno-psabi",
    "-march=native",
    "-std=gnu11",
    "-fno-math-errno",
    "-pthread",
    "-fPIC",
)
_COMPILE_TIMEOUT_S = 120

# Element types and activations as the C side numbers them.
ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}

_LONG, _POINTER, _INT, _FLOAT = ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type[ctypes._SimpleCData[int]] | None, tuple[type, ...]]] = {
    "tl_rms_norm": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _FLOAT, _INT)),
    "tl_rotary": (None, (_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _INT)),
    "tl_gated": (None, (_POINTER, _POINTER, _LONG, _LONG, _INT, _INT)),
    "tl_paged_attention": (None, (_POINTER, _INT)),
    "tl_kv_write": (None, (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG)),
    "tl_packed_linear": (
        None,
        (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _INT, _INT, _INT),
    ),
    "tl_draw": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG)),
    "tl_blocks": (None, (_POINTER, _LONG)),
    "tl_x_block_bytes": (_LONG, ()),
    "tl_set_threads": (_INT, (_INT,)),
}


class NativeBuildError(Exception):
    """The kernels cannot be compiled or loaded here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they are turned off, cannot be built or are not x86-64/aarch64 little endian.

    Built once per machine, loaded once per process. A failure is logged as a warning: everything works without, slower.
    """
    if os.environ.get("TIERLINE_NATIVE") == "0":
        logger.info("compiled kernels are turned off (TIERLINE_NATIVE=0)")
        return None
    try:
        kernels = build()
        kernels.tl_set_threads(torch.get_num_threads())
        return kernels
    except (NativeBuildError, OSError) as error:
        logger.warning("no compiled CPU kernels, decoding will be slower: %s", error)
        return None


def set_threads(count: int) -> None:
    """Let the compiled kernels, where there are any, use `count` threads."""
    kernels = library()
    if kernels is not None:
        kernels.tl_set_threads(count)


def build(extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Compile (unless cached) and load. Raises NativeBuildError."""
    missing = sorted({*_SOURCES, *_HEADERS} - _CODE.keys())
    if missing:
        raise NativeBuildError(f"{', '.join(missing)} not found in {_SOURCE_DIR}: the installation is incomplete")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NativeBuildError("no C compiler found (install gcc or clang)")
    flags = (*_FLAGS, *extra_flags)
    path = cache_dir() / f"cpu-{_fingerprint(compiler, flags)}.so"
    if not path.exists():
        _compile(compiler, flags, path)
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError as error:  # the machine went down before all of it was on the disk
        logger.warning("the compiled CPU kernels cannot be loaded and are compiled again: %s", error)
        _compile(compiler, flags, path)
        kernels = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels


def cache_dir() -> Path:
    """Where compiled kernels are kept: private to the user, since what lies there is executed."""
    root = os.environ.get("TIERLINE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "tierline" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise NativeBuildError(f"there is no place to keep them: {error}: set TIERLINE_CACHE_DIR") from error
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise NativeBuildError(f"{folder} belongs to, or can be written by, another user: set TIERLINE_CACHE_DIR")
    return folder


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for code in _CODE.values():
        digest.update(code)
    for text in (compiler, _run([compiler, "--version"]), *flags, platform.machine(), _processor_features()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _processor_features() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    logger.info("compiling the CPU kernels, once for this machine")
    try:
        _compile_beside(compiler, flags, target)
    except OSError as error:  # read-only, or full
        raise NativeBuildError(f"{target.parent} cannot be written: {error}: set TIERLINE_CACHE_DIR") from error


def _compile_beside(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        for name, code in _CODE.items():
            (Path(scratch) / name).write_bytes(code)
        objects = [Path(scratch) / f"{name}.o" for name in _SOURCES]
        commands = [
            [compiler, *flags, "-c", str(Path(scratch) / name), "-o", str(out)]
            for name, out in zip(_SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))
        library_path = Path(scratch) / "cpu.so"
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library_path), "-lm"])
        library_path.replace(target)  # atomic: a second process either finds all of it or builds its own


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NativeBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout
