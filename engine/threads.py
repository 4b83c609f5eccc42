"""How many threads the engine computes with, and how they wait. To be called before torch is imported.

OpenMP threads that spin while waiting slow everything beside them (and themselves, when something runs beside them)
by one to two orders of magnitude, so waiting is passive, after a spin of some ten microseconds that bridges the gap
between two operations of one step. Only the engine's core process calls this; it imports no torch.
"""

from __future__ import annotations

import os
import sys

import psutil

# More threads than this gain nothing in batch-1 decoding: memory bandwidth is spent.
_MAX_THREADS = 8
_SPIN_COUNT = 2_000


def configure(threads: int | None, *, ranks: int = 1) -> int:
    """Set the OpenMP environment and return the number of threads: `threads`, or a choice by cores and CPU quota.

    `ranks`: processes that share them; what is returned is the share of one.

    Raises RuntimeError when torch is already imported (its thread pool has read the environment), ValueError for
    `threads` below 1.
    """
    if "torch" in sys.modules:
        raise RuntimeError("engine.threads.configure must run before torch is imported")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    count = max(1, (threads or min(available_cores(), _MAX_THREADS)) // ranks)
    os.environ["OMP_NUM_THREADS"] = str(count)
    os.environ["MKL_NUM_THREADS"] = str(count)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))  # GNU OpenMP, which torch ships on Linux
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # LLVM and Intel OpenMP
    return count


def available_cores() -> int:
    """Physical cores this process may use: the least of the affinity mask, the cgroup's quota and the hardware."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    quota = _cgroup_quota()
    return max(1, min(allowed, physical, int(quota) if quota is not None else allowed))


def _cgroup_quota() -> float | None:
    """CPUs granted by the cgroup (v2, then v1), or None when there is no limit or no cgroup."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", encoding="ascii") as file:
            limit = int(file.read())
        with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us", encoding="ascii") as file:
            return limit / int(file.read()) if limit > 0 else None
    except (OSError, ValueError):
        return None
