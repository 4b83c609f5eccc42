"""Several gateway processes on one port: where each of them listens, and what it calls its own.

Each worker listens on the shared port (SO_REUSEPORT: the kernel spreads the connections) and on a Unix socket of its
own, where the supervisor asks whether this one is ready, and where the others get its metrics.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from gateway.settings import Settings


def name(settings: Settings, worker: int) -> str:
    """What a worker's process, log and socket are called."""
    return "gateway" if settings.server.workers == 1 else f"gateway-{worker}"


def socket_path(settings: Settings, worker: int) -> Path:
    return settings.run_path(f"{name(settings, worker)}.sock")


def journal_path(settings: Settings, worker: int) -> Path:
    """Two processes never append to one journal. The first worker's is where a single gateway's is."""
    journal = settings.storage.data_dir / "journal"
    return journal if worker == 1 else journal / f"worker-{worker}"


def left_journals(settings: Settings, worker: int) -> list[Path]:
    """Journals of workers that are no longer configured. The first worker takes them over."""
    if worker != 1:
        return []
    configured = {journal_path(settings, number) for number in range(1, settings.server.workers + 1)}
    return [path for path in sorted(journal_path(settings, 1).glob("worker-*")) if path not in configured]


def listeners(settings: Settings, worker: int) -> list[socket.socket]:
    """Bound sockets of one of several workers, for the server to listen on once it is ready.

    Raises:
        OSError: the port or the path cannot be used.
    """
    host, port = settings.server.host, settings.server.port
    shared = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    own = socket.socket(socket.AF_UNIX)
    try:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind((host, port))
        path = socket_path(settings, worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        own.bind(str(path))
        os.chmod(path, 0o600)
    except BaseException:
        shared.close()
        own.close()
        raise
    for one in (shared, own):
        one.setblocking(False)
    return [shared, own]
