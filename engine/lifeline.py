"""No orphans: a child that ends with its parent, whatever kills the parent.

The kernel sends the signal (Linux only); elsewhere the closed socket between the two processes does the same, one step
later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit at once if the parent has gone already.

    Raises:
        OSError: the kernel refused.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died between fork and prctl; then nobody will ever send the signal.
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent process {parent_pid} is gone")
