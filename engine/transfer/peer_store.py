"""The pages that another engine offers, as a store: what a decoding engine fetches of a prompt computed elsewhere."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence

from engine.transfer import peer_wire as wire
from engine.transfer.nixl_memory import NixlReader
from engine.transfer.peer_address import PeerAddress
from engine.transfer.store import StoreFailed

_TIMEOUT_S = 1.0  # to connect, and between two pieces
_BATCH_S = 5.0  # for all that is asked for at once
_MOST_METADATA_BYTES = 1 << 20


class PeerStore:
    """`PageStore` that only gives. A connection per thread that asks at the same time; they are kept."""

    batch = 8

    def __init__(self, address: PeerAddress, *, space: bytes, secret: bytes, value_bytes: int) -> None:
        """Raises ValueError where NIXL cannot be used here."""
        self.name = str(address)
        self._address = address
        self._space = space
        self._secret = secret
        self._value_bytes = value_bytes
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._reader: NixlReader | None = None
        if address.nixl:
            try:
                self._reader = NixlReader(value_bytes, self.batch)
            except OSError as error:
                raise ValueError(f"pages cannot be fetched by nixl://: {error}") from error

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._ask(kept, keys)
            except TimeoutError as error:
                raise StoreFailed(f"no answer for {_TIMEOUT_S:g} s") from error
            except OSError:
                self._close_idle()  # it was started anew, perhaps
        try:
            return self._ask(self._connect(), keys)
        except OSError as error:
            raise StoreFailed(str(error) or type(error).__name__) from error

    def _connect(self) -> _Connection:
        return _Connection(self._address, self._space, self._secret, self._value_bytes, self._reader)

    def _ask(self, connection: _Connection, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            values = connection.load(keys)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return [*values, *[None] * (len(keys) - len(values))]

    def save(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        raise StoreFailed("pages are fetched from other engines, not given to them")

    def discard(self, key: bytes) -> None:
        """It is the other engine's: nothing to be done."""

    def holds(self, key: bytes) -> bool:
        return False  # only the other engine knows

    def close(self) -> None:
        self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Connection:
    """One connection that has been let in. Raises OSError for whatever goes wrong."""

    def __init__(
        self, address: PeerAddress, space: bytes, secret: bytes, value_bytes: int, reader: NixlReader | None
    ) -> None:
        self._value_bytes = value_bytes
        self._reader = reader
        self._file: int | None = None
        self._holder: tuple[str, int] | None = None  # its name to NIXL, and where its first slot lies
        self._way = wire.SHARED if address.path is not None else wire.VALUES if reader is None else wire.NIXL
        self._socket = address.connect(_TIMEOUT_S)
        try:
            self._enter(space, secret)
        except BaseException:
            self.close()
            raise

    def _enter(self, space: bytes, secret: bytes) -> None:
        magic, version, challenge = wire.HELLO.unpack(wire.receive(self._socket, wire.HELLO.size))
        if magic != wire.MAGIC:
            raise wire.Broken("no engine that offers pages listens there")
        if version != wire.VERSION:
            raise wire.Broken(f"it speaks version {version} of the transfer, not {wire.VERSION}")
        self._socket.sendall(wire.CLAIM.pack(space, wire.proof(secret, challenge, space)))
        said, way, size = wire.WELCOME.unpack(self._welcome())
        if said != wire.OK:
            raise wire.Broken(wire.REFUSALS.get(said, "it refuses without a known reason"))
        if way != self._way:
            raise wire.Broken(f"it offers pages by {wire.WAYS.get(way, 'other means')}, not {wire.WAYS[self._way]}")
        if size != self._value_bytes:
            raise wire.Broken(f"its pages have {size} bytes, not {self._value_bytes}")
        if self._way == wire.SHARED and self._file is None:
            raise wire.Broken("it shares no memory")
        if self._reader is not None:
            address, length = wire.WINDOW.unpack(wire.receive(self._socket, wire.WINDOW.size))
            if length > _MOST_METADATA_BYTES:
                raise wire.Broken(f"it says {length} bytes about its memory")
            self._holder = self._reader.meet(bytes(wire.receive(self._socket, length))), address

    def _welcome(self) -> bytes:
        if self._way != wire.SHARED:
            return bytes(wire.receive(self._socket, wire.WELCOME.size))
        data, files, _, _ = socket.recv_fds(self._socket, wire.WELCOME.size, 1)
        if files:
            self._file = files[0]
        if not data:
            raise wire.Broken("the connection ended")
        return data + wire.receive(self._socket, wire.WELCOME.size - len(data))

    def load(self, keys: Sequence[bytes]) -> list[bytes]:
        """The values of the first keys, up to the first that has none."""
        ends = time.monotonic() + _BATCH_S
        self._socket.sendall(wire.COUNT.pack(len(keys)) + b"".join(keys))
        (found,) = wire.COUNT.unpack(wire.receive(self._socket, wire.COUNT.size, ends))
        if found > len(keys):
            raise wire.Broken(f"it found {found} of {len(keys)} pages")
        if self._way == wire.VALUES:
            return [bytes(wire.receive(self._socket, self._value_bytes, ends)) for _ in range(found)]
        # NOTE: nothing keeps a slot from being given to another page while it is read. Then the checksum does not fit,
        # and the page is computed. It takes a whole round of evictions at the other engine meanwhile.
        slots = [slot for (slot,) in wire.SLOT.iter_unpack(wire.receive(self._socket, found * wire.SLOT.size, ends))]
        if self._file is not None:
            return [os.pread(self._file, self._value_bytes, slot * self._value_bytes) for slot in slots]
        assert self._reader is not None
        assert self._holder is not None
        return self._reader.read(*self._holder, slots, ends)

    def close(self) -> None:
        self._socket.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._reader is not None and self._holder is not None:
            with contextlib.suppress(OSError):  # it is gone already
                self._reader.leave(self._holder[0])
            self._holder = None
