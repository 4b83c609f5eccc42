"""The way to Redis: the script, and reads of many answers at once. Slow, gone or refusing, it is one thing: away.

Two pools of connections: one waits for changes, the other does the rest, so that neither holds up the other. Whoever
catches `RedisAway` calls `close` and `open` again: no connection is used after an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, NoScriptError, RedisError, ResponseError

SCRIPT: Final = (Path(__file__).parent / "shared.lua").read_text()
PREFIX: Final = "{tierline}:cache"
# How long Redis may take: nobody waits for it on the way of a request.
TIMEOUT_S: Final = 2.0
# How often to look for a Redis that is away.
RETRY_S: Final = 0.5
_BLOCK_MS: Final = 500
_CHANGES_AT_ONCE: Final = 200
_IDS_AT_ONCE: Final = 500
_CANCEL_AGAIN_S: Final = 0.05

_Result = TypeVar("_Result")
Hash = dict[bytes, bytes]


class RedisAway(Exception):
    """Redis did not do what it was asked, in time or at all. Whether that took effect is not known."""


class RedisFull(Exception):
    """Redis has no memory left for an answer."""


class DatasetLost(Exception):
    """Redis holds other data than it did: it was emptied, or another has taken its place."""


class Change(msgspec.Struct, frozen=True):
    """One element of the stream. `n` counts them without a gap; `retraction` is packed."""

    place: str
    n: int
    by: str
    kind: str
    id: str = ""
    number: int = 0
    retraction: bytes = b""


class Told(msgspec.Struct, frozen=True):
    """One element of the stream of lessons, which are counted by `n` without a gap. `meaning`: see `lessons.py`."""

    n: int
    by: str
    meaning: str
    kind: str
    value: bytes


class Joined(msgspec.Struct, frozen=True):
    """What `join` found: see `shared.lua`. `run_id` is of the Redis server, another after each of its starts."""

    dataset: str
    n: int
    place: str
    epoch: int
    oldest_retraction: int
    run_id: str


class Link:
    """`dataset` is what the calls are meant for, once `join` was called."""

    def __init__(self, url: str, password: str | None = None, *, prefix: str = PREFIX) -> None:
        """`password` counts where the URL has none. Raises ValueError when the URL makes no sense."""
        self._url = url
        self._password = password
        self._prefix = prefix
        self._node: dict[str, Any] = {}
        self._clients: list[Redis] = []
        self._sha = ""
        self.dataset = ""
        self.run_id = ""
        self._client()  # a URL that makes no sense is found out now

    def _client(self) -> Redis:
        client = Redis.from_url(
            self._url,
            password=self._password,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            protocol=2,
            driver_info=None,
        )
        client.connection_pool.connection_kwargs.update(self._node)
        return client

    async def open(self) -> None:
        """Connect and load the script; in a cluster, at the node that has our keys.

        Raises:
            RedisAway: it is not there, or does not let us in.
        """
        for _ in range(3):
            await self.close()
            self._clients = [self._client(), self._client()]
            commands = self._clients[0]
            try:
                self.run_id = (await _asked(commands.info("server")))["run_id"]
                await _asked(commands.exists(self._prefix))
                self._sha = await _asked(commands.script_load(SCRIPT))
            except RedisAway as error:
                if not isinstance(moved := error.__cause__, MovedError):
                    self._node = {}
                    raise
                self._node = {"host": moved.host, "port": moved.port}
            else:
                return
        raise RedisAway("the cluster's nodes send us from one to another")

    async def close(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            with suppress(RedisError, OSError, TimeoutError):
                await client.aclose()

    async def join(self, new_dataset: str, known: int) -> Joined:
        dataset, n, place, epoch, oldest = await self._script("join", new_dataset, known)
        self.dataset = dataset.decode()
        return Joined(self.dataset, n, place.decode(), epoch, oldest, self.run_id)

    async def call(self, operation: str, *arguments: str | int | bytes) -> list[Any]:
        """Run an operation of the script: what it returns behind its first word, which comes first.

        Raises:
            RedisAway, RedisFull, DatasetLost: see there.
        """
        word, *rest = await self._script(operation, *arguments)
        if word == b"lost":
            raise DatasetLost
        return [word.decode(), *rest]

    async def _script(self, operation: str, *arguments: str | int | bytes) -> list[Any]:
        client = self._commands()
        given = (1, self._prefix, operation, self.dataset, *arguments)
        try:
            return list(await _asked(client.evalsha(self._sha, *given)))
        except NoScriptError:  # SCRIPT FLUSH
            return list(await _asked(client.eval(SCRIPT, *given)))

    async def changes(self, after: str) -> list[Change]:
        """What comes behind a place in the stream; empty after half a second without any."""
        if not self._clients:
            raise RedisAway("not connected")
        stream = f"{self._prefix}:changes"
        found = await _asked(self._clients[1].xread({stream: after}, count=_CHANGES_AT_ONCE, block=_BLOCK_MS))
        return [_change(place, fields) for _, elements in found or () for place, fields in elements]

    async def lessons(self, after: int) -> list[Told]:
        """What promises have learned since a number; empty after half a second without any."""
        if not self._clients:
            raise RedisAway("not connected")
        stream = f"{self._prefix}:lessons"
        found = await _asked(self._clients[1].xread({stream: f"{after}-0"}, count=_CHANGES_AT_ONCE, block=_BLOCK_MS))
        return [_told(place, fields) for _, elements in found or () for place, fields in elements]

    async def all_ids(self) -> AsyncIterator[list[str]]:
        """The ids of all answers, some at a time; of those that come or go meanwhile, some."""
        cursor: int | None = None
        while cursor != 0:
            cursor, found = await _asked(
                self._commands().zscan(f"{self._prefix}:ends", cursor or 0, count=_IDS_AT_ONCE)
            )
            yield [id.decode() for id, _ in found]

    async def answers(self, ids: Sequence[str]) -> list[Hash]:
        """Answers by id, as Redis has them; an empty one is there no more."""
        return await self._many("HGETALL", ids)

    async def field_counts(self, ids: Sequence[str]) -> list[int]:
        return await self._many("HLEN", ids)

    async def retractions(self, after: int) -> list[tuple[int, bytes]]:
        """What was forgotten since a number, oldest first."""
        key = f"{self._prefix}:retractions"
        found = await _asked(self._commands().zrangebyscore(key, f"({after}", "+inf", withscores=True))
        return [(int(number), packed) for packed, number in found]

    async def _many(self, command: str, ids: Iterable[str]) -> list[Any]:
        pipeline = self._commands().pipeline(transaction=False)
        for id in ids:
            pipeline.execute_command(command, f"{self._prefix}:answer:{id}")
        return list(await _asked(pipeline.execute()))

    def _commands(self) -> Redis:
        if not self._clients:
            raise RedisAway("not connected")
        return self._clients[0]


async def _asked(reply: Awaitable[_Result]) -> _Result:
    """What Redis says, in a task of its own: the client's calls are known to go on when they are cancelled."""
    task = asyncio.ensure_future(reply)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_look_at)
        raise
    try:
        return task.result()
    except NoScriptError:
        raise
    except ResponseError as error:
        if "OOM" in str(error):
            raise RedisFull(str(error)) from error
        raise RedisAway(str(error)) from error
    except (RedisError, OSError, TimeoutError) as error:
        raise RedisAway(str(error) or type(error).__name__) from error


def _look_at(task: asyncio.Future[Any]) -> None:
    """Its failure is of no interest any more."""
    if not task.cancelled():
        task.exception()


def _change(place: bytes, fields: Hash) -> Change:
    return Change(
        place=place.decode(),
        n=int(fields[b"n"]),
        by=fields[b"by"].decode(),
        kind=fields[b"kind"].decode(),
        id=fields.get(b"id", b"").decode(),
        number=int(fields.get(b"number", 0)),
        retraction=fields.get(b"retraction", b""),
    )


def _told(place: bytes, fields: Hash) -> Told:
    return Told(
        n=int(place.partition(b"-")[0]),
        by=fields[b"by"].decode(),
        meaning=fields[b"meaning"].decode(),
        kind=fields[b"kind"].decode(),
        value=fields[b"value"],
    )


async def until_one_fails(*work: Coroutine[Any, Any, None]) -> None:
    """Do all of it until some fails, or this is cancelled; then none of it runs any more. Raises what failed."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        outcomes = await _ended(tasks)
    for error in outcomes:
        if isinstance(error, Exception):
            raise error


async def _ended(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    """Cancel tasks and wait for them: more than once, because the client of Redis may swallow a cancellation."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
    return await asyncio.gather(*tasks, return_exceptions=True)
