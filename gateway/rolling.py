"""Restarts processes of a running `tierline up` one after the other, each ready again before the next is asked.

Nothing is told to the supervisor: a process that is asked to end drains, and whatever ends is started again. What runs,
and how it is, stands in the supervisor's state file.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Told = Callable[[str, str], None]  # a process, and what becomes of it


class CannotRestart(Exception):
    """The message says why, and what has been restarted by then."""


def restart_in_turn(
    state_file: Path, names: Sequence[str], told: Told, *, timeout_s: float = 900.0, poll_s: float = 0.1
) -> None:
    """Restart the processes `names`. `timeout_s`: for each.

    Raises:
        CannotRestart: nothing runs, a process is not there or not ready, or it did not come back. The rest is left
            as it is.
    """
    running = _running(state_file)
    if missing := [name for name in names if name not in running]:
        raise CannotRestart(f"'{missing[0]}' does not run here; these do: {', '.join(sorted(running))}.")
    for name in names:
        before = _running(state_file)[name]
        if before["status"] != "ready":
            raise CannotRestart(f"'{name}' is {before['status']}: only what serves is restarted. See its log.")
        told(name, "stopping")
        os.kill(before["pid"], signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while True:
            now = _running(state_file)[name]
            if now["restarts"] > before["restarts"] and now["status"] == "ready":
                break
            if now["restarts"] > before["restarts"] + 1:
                raise CannotRestart(f"'{name}' ended again before it was ready. See its log; the others serve on.")
            if time.monotonic() > deadline:
                raise CannotRestart(
                    f"'{name}' was not ready after {timeout_s:.0f} s. See its log; the others serve on."
                )
            time.sleep(poll_s)
        told(name, "ready")


def _running(state_file: Path) -> dict[str, dict[str, Any]]:
    """The processes by name.

    Raises:
        CannotRestart: `tierline up` does not run.
    """
    try:
        state = json.loads(state_file.read_text())
        os.kill(state["pid"], 0)
    except (FileNotFoundError, ProcessLookupError):
        state = {"state": "stopped"}
    except PermissionError as error:
        raise CannotRestart("'tierline up' runs as another user: restart its engines as that one.") from error
    if state["state"] in ("stopped", "failed"):
        raise CannotRestart("'tierline up' does not run here: what it started is not there to be restarted.")
    processes: dict[str, dict[str, Any]] = state["processes"]
    return processes
