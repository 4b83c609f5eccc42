"""A lock that lives in a file and dies with its process: one supervisor per data folder, one pull per model.

It is an advisory `flock`: the kernel releases it however the holder ends, so a stale file never blocks a start.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class AlreadyLocked(Exception):
    """Another process holds the lock; `note` is what it wrote into the file, such as its process id."""

    def __init__(self, path: Path, note: str) -> None:
        super().__init__(f"{path} is held by another process ({note or 'unknown'})")
        self.note = note


class FileLock:
    """Hold `path` exclusively: with `wait` until it is free, else at once or not at all."""

    def __init__(self, path: Path, *, note: str = "", wait: bool = False) -> None:
        self.path = path
        self._note = note
        self._wait = wait
        self._fd: int | None = None

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            AlreadyLocked: someone else holds it and `wait` is off.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if self._wait else fcntl.LOCK_NB))
        except BlockingIOError:
            note = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise AlreadyLocked(self.path, note) from None
        except BaseException:
            os.close(fd)
            raise
        os.ftruncate(fd, 0)
        os.pwrite(fd, self._note.encode(), 0)
        self._fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._fd is not None:
            # The file stays: removing it would let two processes lock two files of the same name.
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None
