"""A segment file of the journal: preallocated, and written through mapped memory where the file system can map.

What has been copied into the mapping belongs to the kernel, as after a `write`: a `kill -9` loses none of it, and fsync
brings it to the disk. Unlike a `write` it costs no system call, nor the handing over of the interpreter's lock that
goes with one. The blocks are allocated when the file is made, which is where a full disk shows. Some file systems
(of networks, in user space) map no file for writing: there every record is a `write`.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

_READ_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# Pages that have been written are unmapped after so many bytes: they would count as this process's memory.
_UNMAP_BYTES: Final = 1024 * 1024


class Segment:
    """An open segment file. Whoever takes `descriptor` over at the end closes it."""

    def __init__(self, path: Path, capacity: int, header: bytes) -> None:
        """Raises OSError: there is no room on the disk, or no file can be made; nothing is left of it."""
        self.capacity = capacity
        self.descriptor = os.open(path, _READ_WRITE, 0o600)
        try:
            os.posix_fallocate(self.descriptor, 0, capacity)
            os.pwrite(self.descriptor, header, 0)
            self._memory = _mapped(self.descriptor, capacity)
        except OSError:
            os.close(self.descriptor)
            path.unlink()
            raise
        self._mapped_from = 0

    def write(self, data: bytes, offset: int) -> None:
        """Copy `data` to `offset`, in bytes.

        Raises:
            ValueError: it does not fit.
            OSError: the disk failed; only where the file is not mapped. What was there is there, or a part of `data`.
        """
        end = offset + len(data)
        if end > self.capacity:
            raise ValueError(f"{len(data)} bytes at {offset} of a segment of {self.capacity}")
        if self._memory is None:
            _write(self.descriptor, data, offset)
            return
        self._memory[offset:end] = data
        if offset - self._mapped_from > _UNMAP_BYTES:
            start = self._mapped_from
            self._mapped_from = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, start, self._mapped_from - start)

    def retire(self) -> int:
        """Nothing is written any more: let the mapping go and return the descriptor, which is now the caller's."""
        if self._memory is not None:
            self._memory.close()
        return self.descriptor

    @property
    def mapped(self) -> bool:
        return self._memory is not None


def _mapped(descriptor: int, capacity: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(descriptor, capacity)
    except OSError:  # whatever it is: the file has its blocks and its header, so it can be written
        return None


def _write(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
