"""Where the time of each step goes, as a trace that Chrome (chrome://tracing) and Perfetto open.

A step is cut into phases that follow each other: `queue` (what runs next), `prepare` (arrays for the device), `forward`
(the model), `meanwhile` (what is done while a GPU works), `sample` (tokens from logits), `wait` (for the results),
`post` (what the scheduler and the clients are told). Whoever begins a phase says so in one line, which ends the phase
before. On a GPU `forward` and `sample` are the times to start the kernels. Where each step begins before the one before
it is over, a step here is a turn: it prepares one and waits for the other. Without a file a phase costs a comparison.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

# A trace as large as viewers open with ease; at some 700 bytes a step, hundreds of thousands of steps.
MOST_BYTES = 256 << 20
_LINES_BEHIND = 64  # kept back at most, so that a process that is killed has written nearly all


class StepTrace:
    """Not thread-safe: it belongs to the thread that runs the steps."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._written, self._most_bytes = 0, MOST_BYTES
        self._unflushed = 0
        self._step_start = self._phase_start = 0
        self._phase: str | None = None

    def start(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        """Write every step from now on to `path`, until `stop`, or until there are `most_bytes`.

        Raises:
            OSError: the file cannot be written.
        """
        self.stop()
        self._file = path.open("w", encoding="utf-8")
        self._written, self._most_bytes, self._phase = 0, most_bytes, None
        self._write(
            "[" + json.dumps({"name": "process_name", "ph": "M", "pid": os.getpid(), "args": {"name": "engine"}})
        )

    def stop(self) -> None:
        """Complete the file. May be called again."""
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None

    def phase(self, name: str) -> None:
        """End the phase before, if there is one, and begin this one. The first begins a step."""
        if self._file is None:
            return
        now = time.perf_counter_ns()
        if self._phase is None:
            self._step_start = now
        else:
            self._event(self._phase, self._phase_start, now)
        self._phase, self._phase_start = name, now

    def end(self, **counts: int) -> None:
        """End the step. `counts`: what is to be known of it, rows and tokens, say."""
        if self._file is None or self._phase is None:
            return
        now = time.perf_counter_ns()
        self._event(self._phase, self._phase_start, now)
        self._event("step", self._step_start, now, counts)
        self._phase = None
        if self._written > self._most_bytes:
            logger.warning("the trace has %d bytes and ends here", self._written)
            self.stop()

    def _event(self, name: str, start: int, end: int, counts: dict[str, int] | None = None) -> None:
        """One complete event; its times are microseconds."""
        event = {"name": name, "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3, "pid": os.getpid(), "tid": 0}
        self._write(",\n" + json.dumps(event if counts is None else event | {"args": counts}))

    def _write(self, text: str) -> None:
        if self._file is not None:
            self._file.write(text)
            self._written += len(text)
            self._unflushed += 1
            if self._unflushed >= _LINES_BEHIND:
                self._file.flush()
                self._unflushed = 0


trace = StepTrace()
"""The process's trace: the core starts it if it is asked to, and the loop and the runner tell it of their phases."""
