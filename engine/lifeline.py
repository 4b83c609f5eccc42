"""No orphans: a process that ends with the one that started it, whatever ends that one.

Two means: the kernel's signal at the parent's death (Linux), and the end of file on something that only the parent
holds open: the socket between HTTP process and core, or the pipe of a supervisor (any system).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

# A supervisor names here the read end of a pipe whose write end only it holds.
LIFELINE_FD = "TIERLINE_LIFELINE_FD"

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


def watch_lifeline() -> bool:
    """Kill this process when the supervisor's pipe closes; False if no supervisor gave one.

    Killed and not asked to stop: the supervisor ended without draining, so nobody waits for an orderly end.
    """
    value = os.environ.get(LIFELINE_FD)
    if value is None:
        return False

    def wait_for_the_end(descriptor: int) -> None:
        while os.read(descriptor, 1):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, args=(int(value),), name="lifeline", daemon=True).start()
    return True
