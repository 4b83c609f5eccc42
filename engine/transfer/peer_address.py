"""Where another engine's pages are fetched: `tcp://HOST:PORT`, `shm:///PATH` on the same host, or `nixl://HOST:PORT`."""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

_SOCKET_PATH_BYTES = 107  # of sockaddr_un, its final zero apart
_WILDCARDS = ("0.0.0.0", "::")
_WRITE = "write tcp://HOST:PORT, shm:///PATH on the same host, or nixl://HOST:PORT"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """`path` of a socket on this host, or `host` and `port`. `nixl`: pages are read by that library, see
    `nixl_memory.py`, and all else goes over this connection."""

    path: str | None = None
    host: str = ""
    port: int = 0
    nixl: bool = False

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Raises ValueError with what to write instead."""
        unreadable = f"'{text}' is no address of pages: {_WRITE}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise ValueError(unreadable) from None
        if parts.scheme == "nixl" and importlib.util.find_spec("nixl") is None:
            raise ValueError(f"'{text}': the library is not installed: pip install 'tierline[nixl]', on Linux")
        plain = not (parts.query or parts.fragment or parts.username or parts.password)
        is_network = parts.scheme in ("tcp", "nixl") and plain and parts.path in ("", "/")
        if is_network and parts.hostname and port is not None:
            return cls(host=parts.hostname, port=port, nixl=parts.scheme == "nixl")
        if parts.scheme == "shm" and not parts.netloc and plain and Path(parts.path).is_absolute():
            if len(os.fsencode(parts.path)) > _SOCKET_PATH_BYTES:
                raise ValueError(f"'{text}': the path is too long for a socket; {_SOCKET_PATH_BYTES} bytes are allowed")
            return cls(path=parts.path)
        raise ValueError(unreadable)

    def __str__(self) -> str:
        if self.path is not None:
            return f"shm://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'nixl' if self.nixl else 'tcp'}://{host}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """One to listen on, but nobody can be told to go there."""
        return self.host in _WILDCARDS

    def connect(self, seconds: float) -> socket.socket:
        """Raises OSError. `seconds`: for this, and then for each piece that is sent or received."""
        if self.path is None:
            connection = socket.create_connection((self.host, self.port), timeout=seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(seconds)
        try:
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection

    def listen(self) -> tuple[socket.socket, PeerAddress]:
        """A socket that listens, and the address with the port that it has got. Raises ValueError."""
        try:
            if self.path is None:
                listener = socket.create_server(
                    (self.host, self.port), family=socket.AF_INET6 if ":" in self.host else socket.AF_INET
                )
                return listener, replace(self, port=listener.getsockname()[1])
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            Path(self.path).unlink(missing_ok=True)  # of a process that was killed
            listener.bind(self.path)
            os.chmod(self.path, 0o600)
            listener.listen()
            return listener, self
        except OSError as error:
            raise ValueError(f"cannot listen on {self}: {error.strerror}") from None
