"""Counts kernel compilations, above all those after warm-up: each one stalls every running request.

Triton compiles a kernel when it first meets a new combination of constants, types and divisibilities. Warm-up meets
all of them; one that appears later is a fault of ours (a length taken for a constant, a misaligned buffer). The
monitor listens to Triton's compiler, so that such a fault becomes a metric, a log line and a failing test.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class JitMonitor:
    """Listens from `install` to `uninstall`; thread-safe. Any listener that was there before is called on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._previous: Callable[..., None] | None = None
        self._installed = False
        self._warm = False
        self._compiled = 0
        self._late: list[str] = []

    @property
    def compilations(self) -> int:
        """Kernels compiled or loaded from Triton's disk cache since `install`."""
        return self._compiled

    @property
    def late_compilations(self) -> int:
        """Those of them that happened after `mark_warm`: should be zero."""
        return len(self._late)

    @property
    def late_kernels(self) -> tuple[str, ...]:
        """Their names, oldest first."""
        return tuple(self._late)

    def install(self) -> None:
        """Start listening, if not yet; what follows is warm-up until `mark_warm` (again, when a second model loads)."""
        from triton import knobs

        with self._lock:
            self._warm = False
            if self._installed:
                return
            self._previous = knobs.compilation.listener
            knobs.compilation.listener = self._on_compile
            self._installed = True

    def uninstall(self) -> None:
        """Stop listening and put back the previous listener."""
        from triton import knobs

        with self._lock:
            if self._installed:
                knobs.compilation.listener = self._previous
                self._installed = False

    def mark_warm(self) -> None:
        """Warm-up is over: from now on every compilation is a late one."""
        self._warm = True

    def _on_compile(self, *, src: Any, cache_hit: bool, **details: Any) -> None:
        with self._lock:
            self._compiled += 1
            if self._warm:
                self._late.append(src.name)
        if self._warm:
            how = "loaded from the disk cache" if cache_hit else "compiled"
            logger.warning("kernel %s was %s after warm-up: running requests had to wait for it", src.name, how)
        if self._previous is not None:
            self._previous(src=src, cache_hit=cache_hit, **details)


monitor = JitMonitor()
"""The process's monitor: the serving path installs it before its first kernel, telemetry reads it."""
