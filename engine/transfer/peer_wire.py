"""What two engines say to each other when one fetches pages of the other, over a stream socket.

    holder → fetcher   magic, version, challenge
    fetcher → holder   space, proof that it has the secret
    holder → fetcher   whether it is welcome, and how it gets pages; with shared memory, the descriptor of the file
                       that holds them; with NIXL, where that file lies in memory
    fetcher → holder   number of keys, keys                                                        again and again
    holder → fetcher   number of those found from the first on without a gap, then each: its value, or its slot

The proof is asked for because a value is a prompt's keys and values. What travels is not encrypted, as with Redis
without TLS: such an address belongs into a private network. Each value has a checksum of its own (`format.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time

VERSION = 2
HELLO = struct.Struct("<4sH32s")  # magic, version, challenge
CLAIM = struct.Struct("<16s32s")  # space, proof
WELCOME = struct.Struct("<BBQ")  # one of those below, one of the ways, bytes of a value
WINDOW = struct.Struct("<QI")  # address of the first slot, bytes of NIXL's metadata, which follow
COUNT = struct.Struct("<H")
SLOT = struct.Struct("<Q")
MAGIC = b"TLPG"
KEY_BYTES = 32
MOST_KEYS = 1024

OK, OTHER_SECRET, OTHER_SPACE, FULL = range(4)
REFUSALS = {
    OTHER_SECRET: "it has another page seed",
    OTHER_SPACE: "its pages are of another model, data type, shape or layout version",
    FULL: "too many fetch from it already",
}

VALUES, SHARED, NIXL = range(3)  # on this connection; as slots of a file that both have; as slots that NIXL reads
WAYS = {VALUES: "tcp://", SHARED: "shm://", NIXL: "nixl://"}


class Broken(OSError):
    """The other side ended the connection, is too slow, or says what it cannot mean."""


def proof(secret: bytes, challenge: bytes, space: bytes) -> bytes:
    """What only those can say who have the secret. 32 bytes."""
    return hmac.digest(secret, b"tierline pages" + challenge + space, hashlib.sha256)


def receive(connection: socket.socket, size: int, ends: float | None = None) -> bytearray:
    """So many bytes. `ends`: monotonic seconds by which all of them must be here.

    Raises:
        Broken: they do not come.
        OSError: the connection fails; TimeoutError: nothing came for as long as its time-out is.
    """
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        if ends is not None and time.monotonic() >= ends:
            raise Broken(f"{have} of {size} bytes came in time")
        got = connection.recv_into(view[have:])
        if not got:
            raise Broken(f"the connection ended after {have} of {size} bytes")
        have += got
    return data
