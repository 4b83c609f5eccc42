"""Answers that gateway processes share through Redis, so that a request repeated at another process is not run twice.

    begin ─► Lease: this process runs it, and publishes what it answers, at once and as it grows
          └► RemoteAnswer: another does or did; it is read from Redis, from its first byte

A lease lasts `LEASE_S` and is renewed while the request runs; when its process dies, it ends and the next who asks
runs. Nothing waits for a Redis that is away: `begin` says so and the caller does without. Bounds are kept by
`shared.lua` over all processes.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.access.redis_channel import Channel, RedisDown
from gateway.access.redis_shared import RETRY_S, keep_connected
from gateway.http import ASGIMessage
from gateway.idempotency.recording import Broken, Recording, Released, State, TooLarge, Unreachable

logger = logging.getLogger("tierline.idempotency")

SCRIPT: Final = (Path(__file__).parent / "shared.lua").read_text()
LEASE_S: Final = 10.0
RENEW_S: Final = 2.0
# How often a growing answer is written, and read by those who follow it: what both add to its delay.
PUBLISH_S: Final = 0.05
POLL_S: Final = 0.05
# What is read at once: little, because many calls travel together and none may take longer than Redis's time-out.
_READ_BYTES: Final = 64 * 1024
_STOP_S: Final = 2.0

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class _Head(msgspec.Struct, array_like=True):
    """How an answer starts, as text: Redis's MessagePack has no bytes."""

    request_id: str
    status: int
    headers: list[tuple[str, str]]
    keep_alive: str


class Bounds(msgspec.Struct, frozen=True):
    ttl_s: float
    max_entries: int
    max_bytes: int


class SharedAnswers:
    """One connection's worth of `shared.lua`. `evicted`: answers that this process's calls made room with."""

    def __init__(self, channel: Channel, bounds: Bounds, *, lease_s: float = LEASE_S) -> None:
        self._channel = channel
        self._bounds = msgspec.structs.asdict(bounds)
        self._lease_s = lease_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self.evicted = 0

    async def start(self) -> None:
        """Connect, and keep connected. A Redis that is away is no reason not to start."""
        with suppress(RedisDown):
            await self._channel.connect()
        keeping = keep_connected(
            self._channel,
            lambda: self.call("ping", {}),
            logger,
            back="idempotency keys are shared through Redis again",
            away="each process knows only the idempotency keys it has seen",
        )
        self._keeper = asyncio.create_task(keeping, name="idempotency-redis")

    async def stop(self) -> None:
        """Write what has just ended, then disconnect."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        tasks = [*self._tasks, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.aclose()

    async def begin(self, id: str, fingerprint: str) -> tuple[Lease | None, RemoteAnswer | None]:
        """Who runs the request with this key: this process, by a lease, or another, which gives or gave an answer.
        Neither: Redis is away."""
        token = uuid.uuid4().hex
        request = {"id": id, "fingerprint": fingerprint, "token": token, "lease_s": self._lease_s, **self._bounds}
        try:
            (state, *rest), _ = await self.call("begin", request)
        except RedisDown:
            return None, None
        except asyncio.CancelledError:
            self.in_background(self._give_back(Lease(self, id, token)))  # it may have been taken, for nobody
            raise
        if state == "lead":
            self.evicted += rest[0]
            return Lease(self, id, token), None
        return None, RemoteAnswer(self, id, state, *rest)

    async def _give_back(self, lease: Lease) -> None:
        with suppress(RedisDown):
            await self.put(lease, "gone", 0, b"", None)

    async def put(self, lease: Lease, state: State, start: int, data: bytes, head: str | None) -> tuple[str, float]:
        """Publish the bytes from position `start` on. Returns `ok` or `stolen`, and when somebody read it, if ever."""
        request = {"id": lease.id, "token": lease.token, "state": state, "from": start, "head": head}
        request |= {"lease_s": self._lease_s, **self._bounds}
        (result, *rest), _ = await self.call("put", request, data)
        if result != "ok":
            return result, float("-inf")
        seconds, evicted = rest
        self.evicted += evicted
        return result, time.monotonic() - seconds if seconds >= 0 else float("-inf")

    async def call(self, operation: str, arguments: dict[str, Any], data: bytes = b"") -> tuple[list[Any], bytes]:
        """Run an operation of the script. Raises RedisDown."""
        said = _encode(arguments)
        reply = await self._channel.call(operation, struct.pack(">I", len(said)) + said + data)
        (length,) = struct.unpack_from(">I", reply)
        return _decode(reply[4 : 4 + length]), reply[4 + length :]

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an answer could not be shared: %s: %s", type(error).__name__, error)


class Lease:
    """The right to run the request of a key, for as long as it is renewed."""

    def __init__(self, shared: SharedAnswers, id: str, token: str) -> None:
        self._shared = shared
        self.id = id
        self.token = token

    def publish(self, recording: Recording) -> None:
        """Write a recording to Redis while it is made, in the background; that renews the lease."""
        self._shared.in_background(self._publish(recording))

    async def _publish(self, recording: Recording) -> None:
        position = size = 0
        give_up_at = float("inf")
        told_head = False
        if recording.start is None and recording.running:
            await recording.changed(RENEW_S)
        while True:
            data, behind = recording.take(position)
            nothing_more = not recording.take(behind)[0]
            # Its end is published with the last piece of it, never before.
            state: State = recording.state if nothing_more else "running"
            if recording.refused:
                state = "refused"
            start = recording.start
            head = None if told_head or start is None else _head(recording.request_id, start)
            try:
                result, recording.watched_at = await self._shared.put(self, state, size, data, head)
            except RedisDown:
                if not recording.running:
                    give_up_at = min(give_up_at, time.monotonic() + LEASE_S)
                if time.monotonic() >= give_up_at:
                    return
                await asyncio.sleep(RETRY_S)
                continue
            if result != "ok" or state not in ("running", "lost"):
                return
            position, size, told_head = behind, size + len(data), told_head or head is not None
            if nothing_more and recording.state == state:
                if not recording.take(position)[0]:
                    await recording.changed(RENEW_S)
                if recording.running:
                    await asyncio.sleep(PUBLISH_S)


class RemoteAnswer:
    """An answer that another process gives or gave. As a `Recording`, for one who follows it."""

    def __init__(self, shared: SharedAnswers, id: str, state: State, token: str, fingerprint: str) -> None:
        self._shared = shared
        self._id = id
        self._token = token
        self.fingerprint = fingerprint
        self._state: State | str = state
        self._first = b""  # what was read of the body while waiting for the head
        self._size = 0
        self.request_id = ""

    @property
    def running(self) -> bool:
        return self._state in ("running", "lost")

    def joined(self) -> AbstractContextManager[None]:
        return nullcontext()  # the other process learns it from the reading

    async def begun(self) -> ASGIMessage:
        """Status and headers, once they are known.

        Raises:
            Released, TooLarge, Unreachable: see there.
        """
        while True:
            head, self._first = await self._read(0)
            if self._state in ("none", "gone"):
                raise Released
            if self._state in ("lost", "too_large"):
                raise TooLarge
            if head is not None:
                said = msgspec.json.decode(head, type=_Head)
                self.request_id = said.request_id
                return _start(said)
            await asyncio.sleep(POLL_S)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body from its first byte: what is there at once, the rest as it comes.

        Raises:
            Broken, TooLarge, Unreachable: see there.
        """
        data = self._first
        position = 0
        while True:
            if data:
                position += len(data)
                yield data
            elif self._state == "running":
                await asyncio.sleep(POLL_S)
            elif self._state in ("lost", "too_large"):
                raise TooLarge
            elif self._state in ("whole", "failed"):
                if position >= self._size:
                    return
            else:
                raise Broken
            _, data = await self._read(position)

    async def _read(self, position: int) -> tuple[str | None, bytes]:
        request = {"id": self._id, "token": self._token, "from": position, "count": _READ_BYTES}
        try:
            (self._state, head, self._size), data = await self._shared.call("read", request)
        except RedisDown as error:
            raise Unreachable(str(error)) from error
        return head or None, data


def _head(request_id: str, start: ASGIMessage) -> str:
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
    keep_alive = start.get("tierline.keep_alive", b"").decode("latin-1")
    return msgspec.json.encode(_Head(request_id, start["status"], headers, keep_alive)).decode()


def _start(head: _Head) -> ASGIMessage:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers]
    start: ASGIMessage = {"type": "http.response.start", "status": head.status, "headers": headers}
    if head.keep_alive:
        start["tierline.keep_alive"] = head.keep_alive.encode("latin-1")
    return start
