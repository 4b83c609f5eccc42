"""One connection to Redis that runs one script: calls made meanwhile travel together, and no call waits for long.

    call ─┐                       ┌─► one write, many EVALSHA ─► replies in order
    call ─┼─► waiting ─► pump ────┘
    call ─┘     (what arrives while a batch is on its way goes with the next one)

It promises that a Redis which does not answer in time is found out, whatever it or the network does, and every call
then raises `RedisDown`; that a call whose caller went away is still sent; and that a connection is never used again
after an error, so that no reply can reach the wrong caller. It opens no connection by itself: `connect` does, so that
no request waits for one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha1
from typing import Any, Final, NamedTuple

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, NoScriptError, RedisError, ResponseError

logger = logging.getLogger("tierline.access")

CONNECT_TIMEOUT_S: Final = 1.0
# A reply that was there when the time was over counts: the event loop gets this long to read it.
_GRACE_S: Final = 0.005
# Calls per write, and what each adds to the time that their replies may take. Few, because Redis answers the calls of
# other processes in between.
_BATCH: Final = 32
_PER_CALL_S: Final = 0.0005


class RedisDown(Exception):
    """Redis did not do what it was asked, in time or at all. Whether the call took effect is not known."""


class Channel:
    """Runs `script`, which gets the key `prefix`, an operation and its arguments."""

    def __init__(self, url: str, script: str, prefix: str, timeout_s: float, password: str | None = None) -> None:
        """`password` counts where the URL has none. Raises ValueError when the URL makes no sense."""
        self._pool = ConnectionPool.from_url(
            url,
            password=password,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,  # the calls have their own
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            protocol=2,
            driver_info=None,
        )
        self._script = script
        self._sha = sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._waiting: list[_Call] = []
        self._sent: list[_Call] = []
        self._pump: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._node: tuple[str, int] | None = None
        self.run_id = ""  # of the server: a new one after each of its starts

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def connect(self) -> None:
        """Connect and load the script; follow a cluster to the node that has our keys.

        Raises:
            RedisDown: it is not there, or does not let us in.
        """
        self.close()
        for _ in range(3):
            connection = self._pool.make_connection()
            if self._node is not None:
                connection.host, connection.port = self._node
            opening = asyncio.create_task(self._open(connection))
            opening.add_done_callback(look_at)
            try:
                # Not cancelled and waited for: the client's code has been seen to go on after a cancellation.
                done, _ = await asyncio.wait({opening}, timeout=CONNECT_TIMEOUT_S)
                if not done:
                    raise TimeoutError(f"no answer within {CONNECT_TIMEOUT_S} s")
                self.run_id = opening.result()
            except MovedError as moved:
                self._drop(connection)
                self._node = (moved.host, moved.port)
                continue
            except (RedisError, OSError) as error:
                opening.cancel()
                self._drop(connection)
                self._node = None
                raise RedisDown(str(error)) from error
            except BaseException:
                opening.cancel()
                self._drop(connection)
                raise
            self._connection = connection
            return
        raise RedisDown("the cluster's nodes send us from one to another")

    async def _open(self, connection: AbstractConnection) -> str:
        """Connect and load the script. Returns the server's run id."""
        await connection.connect()
        await _send(connection, "SCRIPT", "LOAD", self._script)
        info: bytes = await _send(connection, "INFO", "server")
        await _send(connection, "EXISTS", self._prefix)  # a cluster's other nodes say where it is
        return info.decode().partition("run_id:")[2].partition("\r")[0]

    async def call(self, operation: str, arguments: bytes) -> bytes:
        """Run the script. The call is on its way when this first suspends, and stays so if the caller is cancelled.

        Raises:
            RedisDown: not connected, no answer in time, or an error as the answer.
        """
        if self._connection is None:
            raise RedisDown("not connected")
        call = _Call(operation, arguments, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(self._connection), name="redis")
        return await call.reply

    def close(self, error: Exception | None = None) -> None:
        """Drop the connection; every call that has no reply yet gets `RedisDown`."""
        connection, self._connection = self._connection, None
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
        unanswered = [*self._sent, *self._waiting]
        self._sent, self._waiting = [], []
        for call in unanswered:
            call.fail(error)
        if connection is not None:
            self._drop(connection)

    async def aclose(self) -> None:
        """Close, and wait until the connection is gone."""
        self.close()
        await asyncio.gather(*self._closing)

    def _drop(self, connection: AbstractConnection) -> None:
        closing = asyncio.get_running_loop().create_task(_disconnect(connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _run(self, connection: AbstractConnection) -> None:
        """Send what waits and give out the replies, until nothing waits or the connection has been closed."""
        try:
            while self._waiting and self._connection is connection:
                self._sent, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                allowed_s = self._timeout_s + len(self._sent) * _PER_CALL_S
                with _deadline(allowed_s, partial(self._late, connection, allowed_s)):
                    await self._exchange(connection, self._sent)
            problem = None
        except Exception as error:
            problem = error
        if self._connection is connection:
            self._pump = None  # this task, which shall not cancel itself
            if problem is not None:
                self.close(problem)

    def _late(self, connection: AbstractConnection, allowed_s: float) -> None:
        if self._connection is connection:
            self.close(TimeoutError(f"no answer within {allowed_s * 1000:.0f} ms"))

    async def _exchange(self, connection: AbstractConnection, calls: list[_Call]) -> None:
        commands = [("EVALSHA", self._sha, 1, self._prefix, call.operation, call.arguments) for call in calls]
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        forgotten = []
        for call in calls:
            try:
                reply = await connection.read_response(disable_decoding=True)
            except NoScriptError:
                forgotten.append(call)
            except MovedError:
                raise
            except ResponseError as error:
                logger.error("Redis refused a call: %s", error)
                call.fail(error)
            else:
                call.answer(reply)
        if forgotten:
            await _send(connection, "SCRIPT", "LOAD", self._script)
            await self._exchange(connection, forgotten)


class _Call(NamedTuple):
    operation: str
    arguments: bytes
    reply: asyncio.Future[bytes]

    def answer(self, reply: bytes) -> None:
        if not self.reply.done():  # the caller may be gone
            self.reply.set_result(reply)

    def fail(self, error: Exception | None) -> None:
        if not self.reply.done():
            self.reply.set_exception(RedisDown(str(error) if error else "the connection was closed"))


@contextmanager
def _deadline(seconds: float, late: Callable[[], None]) -> Iterator[None]:
    """Call `late` when the time is over, and the grace in which the event loop reads what has come meanwhile."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    timers.append(loop.call_later(seconds, lambda: timers.append(loop.call_later(_GRACE_S, late))))
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def look_at(task: asyncio.Task[Any]) -> None:
    """For a task whose end may come when nobody waits any more: then its failure is of no interest."""
    if not task.cancelled():
        task.exception()


async def _send(connection: AbstractConnection, *command: str) -> Any:
    await connection.send_command(*command, check_health=False)
    return await connection.read_response(disable_decoding=True)


async def _disconnect(connection: AbstractConnection) -> None:
    with suppress(RedisError, OSError, TimeoutError):
        await connection.disconnect(nowait=True)
