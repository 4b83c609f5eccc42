"""uvicorn's server with the connections of `connection.py`, a sweep over them, and a drain that clients can see.

    signal → draining: not ready, serves on for `shutdown_delay_s` → listeners close → requests end → the rest is
    cancelled after `drain_s` → the application closes. A second signal ends all of it at once.

While draining, every answer says `connection: close`. Connections that are kept alive are still answered as long as
the process runs, and at least for `GRACE_S`: a request that was already on its way is not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import uvicorn

from edge.connection import Connection
from edge.limits import Limits
from edge.state import State

logger = logging.getLogger("tierline.edge")

GRACE_S = 1.0
_POLL_S = 0.05
_SWEPT_AT_ONCE = 100
_CANCEL_S = 1.5  # how long a cancelled request may take to say so to its client, and then to the books


class Server(uvicorn.Server):
    """Serves `app`, an ASGI application; `options` are uvicorn's (`host`, `port`, `lifespan`, …)."""

    def __init__(self, app: Any, limits: Limits, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(Any, Connection),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # costs as much as everything else here, and nothing asks who the client is
                **options,
            )
        )
        self.limits = limits
        self.server_state: State = State(limits)
        self._sweeper: asyncio.Task[None] | None = None

    def drain(self) -> None:
        """From now on this server is on its way out. Called in a signal handler too: it sets flags, no more."""
        self.server_state.draining = True

    async def serve_beside(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve in a program that handles its signals itself, until this is cancelled or told to stop."""
        await self._serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.drain()
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, without raising them again at the end: being asked to stop is no failure."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.drain()
        for connection in self.connections():
            connection.shutdown()
        await self._until(self.limits.shutdown_delay_s, lambda now: False)
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        grace_ends = asyncio.get_running_loop().time() + GRACE_S
        await self._until(self.limits.drain_s, lambda now: self._drained(now >= grace_ends))
        await self._cancel_requests()
        for connection in self.connections():
            if self.force_exit:
                connection.transport.abort()
            else:
                connection.transport.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()

    def connections(self) -> list[Connection]:
        return cast(list[Connection], list(self.server_state.connections))

    def sweep(self, now: float) -> None:
        """Let each connection end what has taken too long by `now`, on the clock of the event loop."""
        for connection in self.connections():
            connection.sweep(now)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.sweep_interval_s)
            connections = self.connections()
            for start in range(0, len(connections), _SWEPT_AT_ONCE):
                now = loop.time()
                for connection in connections[start : start + _SWEPT_AT_ONCE]:
                    connection.sweep(now)
                await asyncio.sleep(0)  # thousands of streams that all get a sign of life make nobody wait

    async def _until(self, seconds: float, true: Callable[[float], bool]) -> None:
        """Wait until something is true, the time is over, or a second signal says not to."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self.force_exit and (now := loop.time()) < end and not true(now):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _drained(self, grace_is_over: bool) -> bool:
        if self.server_state.tasks:
            return False
        connections = self.connections()
        return not connections or (grace_is_over and not any(connection.is_busy() for connection in connections))

    async def _cancel_requests(self) -> None:
        tasks = list(self.server_state.tasks)
        if not tasks or self.force_exit:
            return
        logger.warning("the time to drain is over: %d requests are cancelled", len(tasks))
        for task in tasks:
            task.cancel()
        _, waiting = await asyncio.wait(tasks, timeout=_CANCEL_S)
        if waiting:  # for clients that do not read
            for connection in self.connections():
                connection.transport.abort()
            await asyncio.wait(waiting, timeout=_CANCEL_S)
