"""A core process as the client has it: started with its configuration, spoken to over a socket, ended."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from engine.config import EngineConfig
from engine.messages import FrameReader, FromCore, ToCore, encode_frame, from_core_decoder

_STOP_GRACE_SECONDS = 5.0


class CoreProcess(asyncio.Protocol):
    """One process, from `start` to `end`. Each of its messages is given to `receive`."""

    def __init__(self, process: asyncio.subprocess.Process, receive: Callable[[FromCore], None]) -> None:
        self._process = process
        self._receive = receive
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def start(cls, module: str, config: EngineConfig, receive: Callable[[FromCore], None]) -> CoreProcess:
        """Run `python -m module` with this configuration. Raises OSError where it cannot be run."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(theirs.fileno()),
                str(os.getpid()),
                msgspec.json.encode(config).decode(),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        core = cls(process, receive)
        await asyncio.get_running_loop().create_connection(lambda: core, sock=ours)
        return core

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's without being derived from them.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._receive(from_core_decoder.decode(payload))

    def send(self, message: ToCore) -> None:
        """Dropped where the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    async def wait(self) -> int:
        """The exit code, when the process has ended."""
        return await self._process.wait()

    async def end(self, *, at_once: bool) -> int:
        """Close the connection, which is the order to end, and kill what does not. Returns the exit code."""
        if self._transport is not None:
            self._transport.abort()
        ended = asyncio.ensure_future(self._process.wait())
        if not at_once:
            await asyncio.wait({ended}, timeout=_STOP_GRACE_SECONDS)
        if not ended.done():
            self._process.kill()
        return await ended
