"""Pages in Redis, shared by engines that have the same model, layout and secret: one goes on where another has been.

What is there is bounded by bytes and by time. All values are of one size, so a sorted set of the keys by their last
use is all the book-keeping: who writes beyond the bound removes the least recently used. Redis 6.2 or later, or Valkey.
Needs the `redis` package.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from redis import Redis, RedisError, ResponseError
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import AskError, ClusterDownError
from redis.retry import Retry

from engine.transfer.store import StoreFailed

_TIMEOUT_S = 1.0  # of each answer
_CONNECT_TIMEOUT_S = 0.5
_BATCH_BYTES = 4 << 20
_ORDER = 1e-6  # seconds by which a page counts as used later than the one behind it: the end of a chain goes first


class RedisStore:
    """`PageStore` on a server that others use, too."""

    name = "redis"

    def __init__(self, url: str, *, space: bytes, value_bytes: int, capacity_bytes: int, ttl_s: int) -> None:
        """`space`: of the keys, see `PageFormat`. `ttl_s`: seconds after its last use that a value is kept.

        Does not connect. Raises ValueError for a URL that makes no sense, or a bound below one value.
        """
        self._most = capacity_bytes // value_bytes
        if self._most < 1:
            raise ValueError(f"{capacity_bytes:,} bytes hold no page: one takes {value_bytes:,}")
        self.batch = max(1, _BATCH_BYTES // value_bytes)
        self._prefix = b"tierline:kv:" + space.hex().encode() + b":"
        self._recent = self._prefix + b"recent"
        self._ttl_s = ttl_s
        self._redis = Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            protocol=2,
            driver_info=None,
        )
        parts = urlsplit(url)
        self.where = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a password

    def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        pipe = self._redis.pipeline(transaction=False)
        for key in keys:
            pipe.getex(self._prefix + key, ex=self._ttl_s)
        pipe.zadd(self._recent, self._scores(keys), xx=True)
        names = [*(self._prefix + key for key in keys), self._recent]
        try:
            return cast("list[bytes | None]", self._replies(pipe, names)[: len(keys)])
        except (RedisError, OSError) as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> StoreFailed:
        # What nodes of a cluster say of keys that belong to others, and as long as some belong to none.
        if isinstance(error, AskError) or type(error) is ClusterDownError:
            return StoreFailed(f"{self.where}: pages are not kept in a Redis Cluster; name a single server ({error})")
        return StoreFailed(f"{self.where}: {error}")

    def _replies(self, pipe: Pipeline, names: Sequence[bytes]) -> list[Any]:
        """What the commands gave, one per name. What is of another type, under a name of ours, is nobody's: it is
        removed, and reads as None. Raises the first other error."""
        replies: list[Any] = pipe.execute(raise_on_error=False)
        foreign = set()
        for place, reply in enumerate(replies):
            if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
                foreign.add(names[place])
                replies[place] = None
            elif isinstance(reply, Exception):
                raise reply
        if foreign:
            self._redis.unlink(*foreign)
        return replies

    def save(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        keys = [key for key, _ in values]
        try:
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.expire(self._prefix + key, self._ttl_s)
            known = pipe.execute()
            for (key, value), there in zip(values, known, strict=True):
                if not there:  # one at a time: a time-out is for one value
                    self._redis.set(self._prefix + key, value, ex=self._ttl_s)
            pipe = self._redis.pipeline(transaction=False)
            pipe.zadd(self._recent, self._scores(keys))
            pipe.zremrangebyscore(self._recent, "-inf", time.time() - self._ttl_s)  # they are gone by themselves
            pipe.expire(self._recent, self._ttl_s)
            pipe.zcard(self._recent)
            too_many = (self._replies(pipe, [self._recent] * 4)[-1] or 0) - self._most
            if too_many > 0:
                oldest = cast("list[tuple[bytes, float]]", self._redis.zpopmin(self._recent, too_many))
                self._redis.unlink(*(self._prefix + key for key, _ in oldest))
        except (RedisError, OSError) as error:
            raise self._failed(error) from None

    def _scores(self, keys: Sequence[bytes]) -> dict[bytes, float]:
        now = time.time()
        return {key: now - place * _ORDER for place, key in enumerate(keys)}

    def discard(self, key: bytes) -> None:
        try:
            self._redis.unlink(self._prefix + key)
            self._redis.zrem(self._recent, key)
        except (RedisError, OSError) as error:
            raise self._failed(error) from None

    def holds(self, key: bytes) -> bool:
        return False  # only the server knows

    def close(self) -> None:
        self._redis.close()
