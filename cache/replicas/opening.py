"""Make what a cache process shares with others, answers and lessons, from its settings."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from cache.store.answers import Store

if TYPE_CHECKING:
    from cache.promise.keeper import Keeper
    from cache.replicas.lessons import Lessons, Rate
    from cache.replicas.records import Sealing
    from cache.replicas.replica import Replica

PASSWORD = "TIERLINE_REDIS_PASSWORD"


class MissingRedis(OSError):
    """Redis is configured, but its client is not installed."""


def open_replica(
    store: Store, url: str, *, embedder: str, folder: Path | None, at: Path, most_bytes: int, sealing: Sealing
) -> Replica:
    """A replica that listens to `store`; `run` brings it in step. `at` is the process's socket, which names it.

    Raises:
        OSError: its file cannot be made, or the client of Redis is not installed.
        ValueError: the URL makes no sense.
    """
    try:
        from cache.replicas.link import Link
        from cache.replicas.notes import Notes
        from cache.replicas.replica import Replica
    except ModuleNotFoundError as error:
        raise MissingRedis(f"storage.redis_url needs {error.name}: pip install 'tierline[redis]'") from error
    replica = Replica(
        store,
        Link(url, os.environ.get(PASSWORD)),
        Notes(folder),
        embedder=embedder,
        label=f"{socket.gethostname()}:{at}",
        most_bytes=most_bytes,
        sealing=sealing,
    )
    store.listener = replica.listener
    return replica


def open_lessons(keeper: Keeper, url: str, *, embedder: str, rate: Rate) -> Lessons:
    """What shares the promises of `keeper`; `run` brings them in step. `rate`: see there.

    Raises:
        OSError: the client of Redis is not installed.
        ValueError: the URL makes no sense.
    """
    try:
        from cache.replicas.lessons import Lessons
        from cache.replicas.link import Link
    except ModuleNotFoundError as error:
        raise MissingRedis(f"storage.redis_url needs {error.name}: pip install 'tierline[redis]'") from error
    return Lessons(keeper, Link(url, os.environ.get(PASSWORD)), meaning=f"{embedder} {keeper.meaning}", rate=rate)
