"""Memory and utilisation of the machine's NVIDIA GPUs for `/metrics`: by NVML, or as `nvidia-smi` tells them.

NVML is the driver's own library; the package nvidia-ml-py (optional, `pip install 'tierline[gpu]'`) speaks to it in
microseconds. Without the package the driver's tool is asked, a process each time. Both work without torch, which the
HTTP process does not import. Where there is neither, there are no GPU metrics; a value that a GPU does not report
(partitioned ones have no utilisation) has no sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

log = logging.getLogger("engine.gpu")

_QUERY = ("--query-gpu=index,memory.used,memory.total,utilization.gpu", "--format=csv,noheader,nounits")
_MIB = 1 << 20
_MIN_INTERVAL_SECONDS = 5.0
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. None: not reported."""

    gpu_id: str
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    utilization_percent: float | None


# Asks for all GPUs of the machine.
Ask = Callable[[], Awaitable[list[Gpu]]]


class Nvml:
    """The GPUs by NVML. `library`: the module `pynvml` of nvidia-ml-py."""

    def __init__(self, library: Any) -> None:
        """Raises the library's NVMLError where there is no driver."""
        self._nvml = library
        library.nvmlInit()
        self._handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]

    async def ask(self) -> list[Gpu]:
        """All GPUs, numbered as `nvidia-smi` does."""
        return [self._read(index, handle) for index, handle in enumerate(self._handles)]

    def _read(self, index: int, handle: Any) -> Gpu:
        used = total = utilization = None
        with contextlib.suppress(self._nvml.NVMLError):
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            used, total = float(memory.used), float(memory.total)
        with contextlib.suppress(self._nvml.NVMLError):
            utilization = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return Gpu(str(index), used, total, utilization)


class Tool:
    """The GPUs by the driver's tool."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def ask(self) -> list[Gpu]:
        """All GPUs; none, and a line in the log, where the tool fails."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(self._path, *_QUERY, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            log.warning("%s did not answer within %.0f s", self._path, _TIMEOUT_SECONDS)
            return []
        if process.returncode != 0:
            log.warning("%s failed: %s", self._path, (errors or output).decode(errors="replace").strip())
            return []
        return parse(output.decode())


def parse(text: str) -> list[Gpu]:
    """The rows of `nvidia-smi`, one GPU each; memory comes in MiB. Rows of another form are left out."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit():
            used, total, utilization = (_number(field) for field in fields[1:])
            gpus.append(
                Gpu(
                    gpu_id=fields[0],
                    memory_used_bytes=None if used is None else used * _MIB,
                    memory_total_bytes=None if total is None else total * _MIB,
                    utilization_percent=utilization,
                )
            )
    return gpus


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


def find_source(tool: str = "nvidia-smi") -> Ask | None:
    """Whoever can be asked about the GPUs here: NVML before the tool; None where nobody can."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        library = None
    if library is not None:
        try:
            return Nvml(library).ask
        except library.NVMLError as error:  # no driver, or another one than its library
            log.info("NVML cannot be used: %s", error)
    path = shutil.which(tool)
    return None if path is None else Tool(path).ask


class GpuMetrics:
    """The three `llm_gpu_*` gauges, refreshed at most every five seconds."""

    def __init__(self, registry: CollectorRegistry, ask: Ask | None) -> None:
        """`ask`: see `find_source`; None: there are no gauges."""
        self._ask = ask
        self._next_refresh = 0.0
        if ask is None:
            return
        self._gauges = {
            field: Gauge(f"llm_gpu_{field}", text, ["gpu_id"], registry=registry)
            for field, text in (
                ("memory_used_bytes", "GPU memory in use, by all processes."),
                ("memory_total_bytes", "GPU memory installed."),
                ("utilization_percent", "Share of the last sample period in which a kernel ran."),
            )
        }

    async def refresh(self) -> None:
        """Ask, if there is somebody to ask and the last answer is old enough."""
        if self._ask is None or time.monotonic() < self._next_refresh:
            return
        self._next_refresh = time.monotonic() + _MIN_INTERVAL_SECONDS
        for gpu in await self._ask():
            for field, gauge in self._gauges.items():
                value = getattr(gpu, field)
                if value is not None:
                    gauge.labels(gpu.gpu_id).set(value)
