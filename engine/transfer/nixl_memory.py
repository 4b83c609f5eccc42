"""Pages read straight out of another engine's memory by NIXL, NVIDIA's library for that.

The holder registers the file of its outbox and hands out where it lies; a fetcher, told the slots of its pages, reads
them without the holder's doing. What carries the bytes is NIXL's choice: RDMA where there is a network for it, else TCP
or memory that processes share. As with any shared outbox, a slot may be given away while it is read, and the page's
checksum tells.
"""

from __future__ import annotations

import importlib
import mmap
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MEMORY = "DRAM"
_BACKEND = "UCX"
_POLL_S = 50e-6


class NixlWindow:
    """The holder's side: a file in memory, mapped and registered. `metadata` and `address` are what fetchers need."""

    def __init__(self, file: int, size: int) -> None:
        """Raises OSError where the library cannot be used here."""
        self._agent = _agent("offers")
        self._mapped = mmap.mmap(file, size)
        view: npt.NDArray[np.uint8] = np.frombuffer(self._mapped, dtype=np.uint8)
        self.address = int(view.ctypes.data)
        self._registered = _called(self._agent.register_memory, [(self.address, size, 0, "")], _MEMORY)
        self.metadata = bytes(_called(self._agent.get_agent_metadata))

    def close(self) -> None:
        """Nobody can read it any more. The mapping goes with the process, or with the last who looks at it."""
        _called(self._agent.deregister_memory, self._registered)


class NixlReader:
    """The fetcher's side: one for each engine that is asked. Thread-safe; reads come one after the other."""

    def __init__(self, value_bytes: int, most_values: int) -> None:
        """Raises OSError where the library cannot be used here."""
        self._agent = _agent("fetches")
        self._value_bytes = value_bytes
        self._buffer: npt.NDArray[np.uint8] = np.zeros(value_bytes * most_values, dtype=np.uint8)
        self._address = int(self._buffer.ctypes.data)
        self._lock = threading.Lock()
        self._stuck = False
        _called(self._agent.register_memory, [(self._address, self._buffer.nbytes, 0, "")], _MEMORY)

    def meet(self, metadata: bytes) -> str:
        """The name of the holder that has handed this out. Raises OSError."""
        with self._lock:
            name = _called(self._agent.add_remote_agent, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def leave(self, name: str) -> None:
        """Forget a holder. Raises OSError."""
        with self._lock:
            _called(self._agent.remove_remote_agent, name)

    def read(self, name: str, address: int, slots: Sequence[int], ends: float) -> list[bytes]:
        """The values in these slots, the first of which lies at `address` of that holder.

        `ends`: monotonic seconds by which they must be here. Raises OSError; TimeoutError where they are not.
        """
        size = self._value_bytes
        if len(slots) * size > self._buffer.nbytes:
            raise OSError(f"{len(slots)} pages at once are more than the buffer holds")
        if not slots:
            return []
        with self._lock:
            if self._stuck:
                raise OSError("a transfer by NIXL was not given up: its buffer may still be written to")
            here = [(self._address + i * size, size, 0) for i in range(len(slots))]
            there = [(address + slot * size, size, 0) for slot in slots]
            descriptions = [_called(self._agent.get_xfer_descs, one, _MEMORY) for one in (here, there)]
            handle = _called(self._agent.initialize_xfer, "READ", *descriptions, name)
            try:
                self._finish(handle, ends)
            finally:
                self._release(handle)
            return [self._buffer[i * size : (i + 1) * size].tobytes() for i in range(len(slots))]

    def _finish(self, handle: Any, ends: float) -> None:
        state = _called(self._agent.transfer, handle)
        while state == "PROC":
            if time.monotonic() >= ends:
                raise TimeoutError
            time.sleep(_POLL_S)
            state = _called(self._agent.check_xfer_state, handle)
        if state != "DONE":
            raise OSError(f"NIXL ended the transfer with {state}")

    def _release(self, handle: Any) -> None:
        try:
            _called(self._agent.release_xfer_handle, handle)
        except OSError:  # it goes on, and nobody knows until when
            self._stuck = True


def _agent(what_for: str) -> Any:
    api = _called(importlib.import_module, "nixl._api")
    config = _called(api.nixl_agent_config, backends=[_BACKEND])
    return _called(api.nixl_agent, f"tierline {what_for} {uuid.uuid4()}", config)


def _called(function: Any, *arguments: Any, **options: Any) -> Any:
    """Its errors, which have no class in common, as OSError."""
    try:
        return function(*arguments, **options)
    except Exception as error:
        raise OSError(f"NIXL: {error or type(error).__name__}") from error
