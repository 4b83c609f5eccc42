"""No orphans: a process that the supervisor started ends when the supervisor ends, however that happens.

Two independent means. On Linux the kernel kills the child when its parent dies (PR_SET_PDEATHSIG); the child is
started as `python -m gateway.lifeline PARENT COMMAND...`, which asks for that and becomes COMMAND. And everywhere,
every child inherits the read end of a pipe whose write end only the supervisor has; `watch` ends the process when
that pipe closes. A gateway worker, whose parent is not the supervisor, calls `watch` itself.

This file imports nothing of the project, so that starting through it costs no time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import threading

LIFELINE_FD = "TIERLINE_LIFELINE_FD"

_PR_SET_PDEATHSIG = 1


class Lifeline:
    """The supervisor's end. Give `fd` to each child with the variable `LIFELINE_FD`; never close it before the end."""

    def __init__(self) -> None:
        # Not inheritable: a child that held the write end would keep all of them alive.
        self.fd, self._held = os.pipe()

    def environment(self) -> dict[str, str]:
        return {LIFELINE_FD: str(self.fd)}

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._held)


def command(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Wrap a command so that it ends with this process."""
    return (sys.executable, "-m", "gateway.lifeline", str(os.getpid()), *argv)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies. Survives `exec`; does nothing where there is no prctl.

    `parent` is the process id that the caller believes to be its parent: if that one has died before the request
    could take effect, this process ends at once.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(0)


def watch() -> bool:
    """End this process when the supervisor's pipe closes. False when no supervisor started it.

    Killed rather than asked: the supervisor is gone without having drained, and what must survive that is on disk.
    """
    value = os.environ.get(LIFELINE_FD)
    if value is None or not _is_pipe(fd := int(value)):
        return False
    os.set_inheritable(fd, True)

    def wait_for_the_end() -> None:
        while os.read(fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()
    return True


def _is_pipe(fd: int) -> bool:
    """Whether the number still means the pipe: a process between may have closed it and handed on the variable."""
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


def main() -> None:
    """`python -m gateway.lifeline PARENT COMMAND...`: become COMMAND, tied to PARENT."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        sys.exit("usage: python -m gateway.lifeline PARENT_PID COMMAND [ARGUMENT...]")
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[2]}: {error}")


if __name__ == "__main__":
    main()
