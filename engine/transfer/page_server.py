"""Offers an engine's pages to others: each page that is computed is put into an outbox, from which whoever has the
secret may fetch it by its digest: over TCP, or by reading the outbox itself, as shared memory or by NIXL.

The outbox is filled as other tiers are, by copies between two steps; the engine's loop never waits for a fetcher. The
least recently used page makes room for the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from engine.transfer import peer_wire as wire
from engine.transfer.courier import MOST_QUEUED_BYTES, Tier
from engine.transfer.format import PageFormat
from engine.transfer.host_store import HostStore
from engine.transfer.nixl_memory import NixlWindow
from engine.transfer.peer_address import PeerAddress

log = logging.getLogger("engine.transfer")

MOST_FETCHERS = 64  # connections: an engine has a few each
_TIMEOUT_S = 10.0  # for somebody who has asked and does not take what is sent
_ENTER_S = 2.0
_SETTLE_S = 0.5  # what is on its way into the outbox is waited for so long


class PageServer:
    """Listens from the start. `outbox` is to be given every page that others may want."""

    def __init__(
        self, address: PeerAddress, capacity_bytes: int, page_format: PageFormat, secret: bytes, told: str | None = None
    ) -> None:
        """`told`: the address that others are to use, where it is not the one that this listens on.

        Raises:
            ValueError: it cannot listen there, `capacity_bytes` hold no page, or NIXL cannot be used here.
        """
        self._store = HostStore(capacity_bytes, page_format.value_bytes, name="outbox")
        self._format = page_format
        self._secret = secret
        self._listener, where = address.listen()
        self.address = told or str(where)
        self._path = where.path
        # Fetchers get a descriptor that cannot write.
        self._file = os.open(f"/proc/self/fd/{self._store.fileno()}", os.O_RDONLY) if where.path is not None else None
        self._window = self._open_window() if where.nixl else None
        # A step can fill more pages than other tiers may have in their queue, and all of them will be asked for.
        self.outbox = Tier(self._store, page_format, most_queued_bytes=max(MOST_QUEUED_BYTES, capacity_bytes))
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="pages offered", daemon=True).start()

    def _open_window(self) -> NixlWindow:
        try:
            return NixlWindow(self._store.fileno(), self._store.make_whole())
        except OSError as error:
            raise ValueError(f"pages cannot be offered by nixl://: {error}") from error

    def keep(self, keys: Sequence[bytes]) -> None:
        """Pages of these names will be wanted: others go first."""
        self._store.touch(keys)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                self._connections.add(connection)
                full = len(self._connections) > MOST_FETCHERS
            threading.Thread(target=self._serve, args=(connection, full), name="pages fetched", daemon=True).start()

    def _serve(self, connection: socket.socket, full: bool) -> None:
        try:
            with connection:
                connection.settimeout(_ENTER_S)
                if self._let_in(connection, full):
                    while self._answer(connection):
                        pass
        except OSError as error:
            log.info("a fetcher of pages is gone: %s", error)
        except Exception:
            log.exception("offering pages failed")
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _let_in(self, connection: socket.socket, full: bool) -> bool:
        challenge, wanted = secrets.token_bytes(32), self._format.space
        connection.sendall(wire.HELLO.pack(wire.MAGIC, wire.VERSION, challenge))
        space, proof = wire.CLAIM.unpack(wire.receive(connection, wire.CLAIM.size))
        # The proof covers the space, so that who has the secret is told what else is wrong.
        said = wire.OK
        if not secrets.compare_digest(proof, wire.proof(self._secret, challenge, space)):
            said = wire.OTHER_SECRET
        elif space != wanted:
            said = wire.OTHER_SPACE
        elif full:
            said = wire.FULL
        way = wire.SHARED if self._file is not None else wire.VALUES if self._window is None else wire.NIXL
        welcome = wire.WELCOME.pack(said, way, self._format.value_bytes if said == wire.OK else 0)
        if said == wire.OK and self._file is not None:
            socket.send_fds(connection, [welcome], [self._file])
        elif said == wire.OK and self._window is not None:
            metadata = self._window.metadata
            connection.sendall(welcome + wire.WINDOW.pack(self._window.address, len(metadata)) + metadata)
        else:
            connection.sendall(welcome)
        if said != wire.OK:
            log.warning("a fetcher of pages is refused: %s", wire.REFUSALS[said])
        return said == wire.OK

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one question; False: there is none any more."""
        connection.settimeout(None)  # it may come at any time
        if not (first := connection.recv(1)):
            return False
        connection.settimeout(_TIMEOUT_S)
        (count,) = wire.COUNT.unpack(first + wire.receive(connection, wire.COUNT.size - 1))
        if not 0 < count <= wire.MOST_KEYS:
            raise wire.Broken(f"it asks for {count} pages at once")
        data = bytes(wire.receive(connection, count * wire.KEY_BYTES))
        keys = [data[start : start + wire.KEY_BYTES] for start in range(0, len(data), wire.KEY_BYTES)]
        self.outbox.settle(keys, _SETTLE_S)
        if self._file is not None or self._window is not None:
            slots = self._store.slots(keys)
            connection.sendall(wire.COUNT.pack(len(slots)) + b"".join(map(wire.SLOT.pack, slots)))
            return True
        values = self._store.load(keys)
        found = values[: values.index(None)] if None in values else values
        connection.sendall(wire.COUNT.pack(len(found)))
        for value in found:
            assert value is not None
            connection.sendall(value)
        return True

    def close(self) -> None:
        """Stop listening and let fetchers go. The outbox is closed by who closes tiers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `accept`
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        if self._window is not None:
            self._window.close()
