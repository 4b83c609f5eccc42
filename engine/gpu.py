"""Memory and utilisation of the machine's NVIDIA GPUs for `/metrics`, as `nvidia-smi` tells them.

The tool comes with the driver, so the HTTP process needs neither torch nor a library. Without the tool there are no GPU
metrics; a value that a GPU does not report (partitioned ones have no utilisation) has no sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from dataclasses import dataclass

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


class GpuMetrics:
    """The three `llm_gpu_*` gauges, refreshed at most every five seconds."""

    def __init__(self, registry: CollectorRegistry, tool: str = "nvidia-smi") -> None:
        self._tool = shutil.which(tool)
        self._next_refresh = 0.0
        if self._tool is None:
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
        """Ask the tool, if there is one and the last answer is old enough."""
        if self._tool is None or time.monotonic() < self._next_refresh:
            return
        self._next_refresh = time.monotonic() + _MIN_INTERVAL_SECONDS
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(self._tool, *_QUERY, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            log.warning("%s did not answer within %.0f s", self._tool, _TIMEOUT_SECONDS)
            return
        if process.returncode != 0:
            log.warning("%s failed: %s", self._tool, (errors or output).decode(errors="replace").strip())
            return
        for gpu in parse(output.decode()):
            for field, gauge in self._gauges.items():
                value = getattr(gpu, field)
                if value is not None:
                    gauge.labels(gpu.gpu_id).set(value)
