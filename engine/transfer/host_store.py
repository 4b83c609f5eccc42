"""Pages in a second pool on this host: main memory beside a GPU, or a file where memory is what is short.

A file without a name, in memory (`memfd`) or in a folder, cut into slots of one value each; the system's page cache
does the rest. The least recently used value gives its slot to the next. Nothing survives the process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine.transfer.store import StoreFailed


class HostStore:
    """`PageStore` of `capacity_bytes` at most. All values have `value_bytes`."""

    batch = 4

    def __init__(
        self, capacity_bytes: int, value_bytes: int, folder: Path | None = None, *, name: str = "host"
    ) -> None:
        """`folder` None: in memory.

        Raises:
            ValueError: there is no room for one value, or the folder is none, or it is full.
        """
        self.name = name
        self.total = capacity_bytes // value_bytes
        if self.total < 1:
            raise ValueError(f"{capacity_bytes:,} bytes hold no page: one takes {value_bytes:,}")
        self._value_bytes = value_bytes
        self._file = _open(self.total * value_bytes, folder)
        self._lock = threading.Lock()
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._free: list[int] = []
        self._used = 0  # slots that were ever written: those behind them are free, too

    def __len__(self) -> int:
        return len(self._slots)

    def fileno(self) -> int:
        """The file: slot `i` begins at `i * value_bytes`."""
        return self._file

    def make_whole(self) -> int:
        """Give the file all of its slots, so that it can be mapped; nothing is written. Returns its bytes."""
        size = self.total * self._value_bytes
        os.ftruncate(self._file, size)
        return size

    def slots(self, keys: Sequence[bytes]) -> list[int]:
        """Where the values of the first keys are, up to the first that has none. Nothing keeps them there."""
        found: list[int] = []
        with self._lock:
            for key in keys:
                if (slot := self._slots.get(key)) is None:
                    break
                self._slots.move_to_end(key)
                found.append(slot)
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Those that are there have been used."""
        with self._lock:
            for key in keys:
                if key in self._slots:
                    self._slots.move_to_end(key)

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._read(key) for key in keys]

    def _read(self, key: bytes) -> bytes | None:
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                return None
            self._slots.move_to_end(key)
            try:
                return os.pread(self._file, self._value_bytes, slot * self._value_bytes)
            except OSError as error:
                raise StoreFailed(f"reading a page failed: {error}") from None

    def save(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in values:
            with self._lock:
                if key in self._slots:
                    self._slots.move_to_end(key)
                    continue
                slot = self._take()
                try:
                    written = os.pwrite(self._file, value, slot * self._value_bytes)
                except OSError as error:
                    self._free.append(slot)
                    raise StoreFailed(f"writing a page failed: {error}") from None
                if written != self._value_bytes:
                    self._free.append(slot)
                    raise StoreFailed(f"{written} of {self._value_bytes} bytes were written")
                self._slots[key] = slot

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if self._used < self.total:
            self._used += 1
            return self._used - 1
        return self._slots.popitem(last=False)[1]

    def discard(self, key: bytes) -> None:
        with self._lock:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def holds(self, key: bytes) -> bool:
        # Without the lock, which may be held for as long as a disk takes: an old answer does no harm.
        return key in self._slots

    def close(self) -> None:
        os.close(self._file)

    def check(self) -> None:
        """Verify that every slot that was ever used is free or holds one value. Raises RuntimeError."""
        with self._lock:
            slots = [*self._slots.values(), *self._free]
            if sorted(slots) != list(range(self._used)) or self._used > self.total:
                raise RuntimeError(f"{len(self._slots)} values, {len(self._free)} free slots, {self._used} used")


def _open(size: int, folder: Path | None) -> int:
    if folder is None:
        return os.memfd_create("tierline-kv-pages", os.MFD_CLOEXEC)
    try:
        free = shutil.disk_usage(folder).free
        file, path = tempfile.mkstemp(prefix="tierline-kv-", dir=folder)
    except OSError as error:
        raise ValueError(f"{folder} cannot hold pages: {error.strerror}") from None
    os.unlink(path)
    if free < size:
        os.close(file)
        raise ValueError(f"{folder} has {free:,} bytes free; {size:,} are asked for")
    return file
