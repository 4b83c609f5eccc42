"""How the gateway asks the cache process: never slower than its time limit, never an error in the request path.

Whatever happens to the process (not started, killed, hung, speaking garbage), a look-up is a miss that says why, and
the client reconnects in the background. One connection carries any number of requests at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from cache import wire
from cache.eligibility import ENGLISH_ALPHABET
from cache.entry import Entry
from cache.key import CacheKey
from cache.promise.rule import Rule
from cache.replicas.standing import Purged
from cache.stats import CacheStats
from cache.wire import NOBODY, Asker, Case, Judge, LookupMode, Outcome

_log = logging.getLogger(__name__)
_RECONNECT_FROM_S, _RECONNECT_TO_S = 0.05, 1.0
# Storing, statistics and purging happen beside the request path and may wait for the model.
_PATIENT_S = 10.0
# Of a million answers the file is rewritten in some twenty seconds.
_PURGE_S = 120.0
# Replies come in any order, so a slow reader must not make the gateway hold endless requests.
_MAX_UNSENT_BYTES = 32 * 1024 * 1024

_ReplyType = TypeVar("_ReplyType", bound=wire.Message)


class CacheUnavailable(RuntimeError):
    """The cache process cannot answer now. `reason` is a stable word, such as `unavailable` or `timeout`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Lookup(msgspec.Struct, frozen=True):
    """What a look-up found.

    `score` is the cosine similarity of the question whose answer is given, or of the nearest one on a miss, where there
    was one. `reason` says why a miss was a miss: no_entry, below_threshold, below_bar, a guard's name (see
    `guards.objection`), narrowed, too_long, script_not_covered, warming, failed, overloaded, unavailable, timeout,
    internal_error. `p`, `age_s` and `entry_id` are of the answer that was found, given or not. `ticket`: the fresh
    answer is to be handed in with it (`hand_in`), or to be given up (`verdict`). `found_for`: the request that found or
    made the answer, where others waited for it.
    """

    outcome: Outcome
    score: float | None = None
    entry: Entry | None = None
    reason: str | None = None
    p: float | None = None
    age_s: float | None = None
    entry_id: str | None = None
    ticket: int = 0
    found_for: str = ""


class Stored(msgspec.Struct, frozen=True):
    """What became of an answer: `reason` says why it was not kept (see `CacheClient.store`); None: it was.

    `case`: a model is to compare it with an earlier one; then send the verdict.
    """

    reason: str | None = None
    stored_as: str | None = None
    case: Case | None = None


class Feedback(msgspec.Struct, frozen=True):
    """`known`: the cache has the request on record. `evicted`: answers that it has forgotten for it."""

    known: bool
    evicted: int = 0


class CacheClient:
    """A connection to the cache process that mends itself. Use within one event loop.

    Attributes:
        connected: whether the process answers now.
        fingerprint: of its embedder, once it was connected. Kept while disconnected.
        state: `warming`, `ready` or `failed`, as the process said last; None before it was ever connected.
        scripts: scripts that its embedder covers; Latin until it has said so.
    """

    def __init__(self, socket_path: Path, *, timeout_ms: float) -> None:
        self._path = socket_path
        self._timeout_s = timeout_ms / 1000
        self._pending: dict[int, asyncio.Future[wire.Reply]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._last_id = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self.fingerprint: str | None = None
        self.state: str | None = None
        self.scripts: frozenset[str] = ENGLISH_ALPHABET

    async def start(self) -> None:
        """Begin to connect in the background; returns at once, whether or not the process is there."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_connected(), name="cache-client")

    async def close(self) -> None:
        """Disconnect; requests under way are misses."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._disconnect()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until the process answers; False when that takes too long."""
        return await self._wait_for(lambda: self.connected, timeout_s)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the process answers and its embedder is loaded or has failed; False when that takes too long."""
        return await self._wait_for(lambda: self.connected and self.state in ("ready", "failed"), timeout_s)

    async def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def lookup(
        self,
        key: CacheKey,
        mode: LookupMode,
        threshold: float,
        ttl_s: float | None = None,
        *,
        rule: Rule | None = None,
        judge: Judge = "embedding",
        asker: Asker = NOBODY,
        auditable: bool = True,
        larger: Sequence[CacheKey] = (),
    ) -> Lookup:
        """Find an answer to the request of `key`. Never raises, never takes longer than the time limit.

        Args:
            mode: `exact` for the same words only.
            threshold: cosine similarity that other words must reach (see `guards.verify`), in (0, 1]; without a rule.
            ttl_s: accept no answer older than this, whatever its own limit.
            rule: the promise that semantic hits are given under; `judge` compares answers for it.
            asker: whose request it is.
            auditable: a fresh answer can follow; False gives a hit that was to be audited.
            larger: keys of the same request to larger models, whose answers will do as well.
        """
        try:
            request = wire.LookupRequest(
                self._next_id(), key, mode, threshold, ttl_s, rule, judge, asker, auditable, list(larger)
            )
            reply = await self._ask(request, wire.LookupReply, self._timeout_s)
        except CacheUnavailable as fault:
            return Lookup("miss", reason=fault.reason)
        return Lookup(
            reply.outcome,
            reply.score,
            reply.entry,
            reply.reason,
            reply.p,
            reply.age_s,
            reply.entry_id,
            reply.ticket,
        )

    async def store(self, key: CacheKey, entry: Entry, mode: LookupMode) -> str | None:
        """Keep an answer. Never raises.

        Returns: None when it was kept, else why not: expired, too_large, unavailable, timeout, internal_error.
        """
        return (await self.hand_in(key, entry, mode)).reason

    async def hand_in(
        self, key: CacheKey, entry: Entry, mode: LookupMode, *, asker: Asker = NOBODY, ticket: int = 0
    ) -> Stored:
        """Keep an answer, and have it compared where the look-up before it gave a ticket. Never raises."""
        try:
            request = wire.StoreRequest(self._next_id(), key, entry, mode, asker, ticket)
            reply = await self._ask(request, wire.StoreReply, _PATIENT_S)
        except CacheUnavailable as fault:
            return Stored(fault.reason)
        return Stored(reply.reason, reply.stored_as, reply.case)

    async def verdict(self, ticket: int, same: bool | None, why: str = "lost") -> None:
        """Say whether the two answers of a ticket say the same; None: nobody will say, for a reason. Never raises."""
        try:
            await self._ask(wire.VerdictRequest(self._next_id(), ticket, same, why), wire.DoneReply, _PATIENT_S)
        except CacheUnavailable as fault:
            _log.info("the verdict on ticket %d is lost: %s", ticket, fault)

    async def shared(self, asker: Asker, answer_of: str) -> None:
        """Note that `asker` got the answer of the request `answer_of`. Never raises."""
        try:
            await self._ask(wire.SharedRequest(self._next_id(), asker, answer_of), wire.DoneReply, _PATIENT_S)
        except CacheUnavailable as fault:
            _log.info("who shared the answer of %s is not on record: %s", answer_of, fault)

    async def feedback(self, request_id: str, team_id: str, good: bool) -> Feedback:
        """What somebody of the team thinks of the answer to a request: a bad one is forgotten, and both teach.

        Raises:
            CacheUnavailable: the process cannot answer now.
        """
        request = wire.FeedbackRequest(self._next_id(), request_id, team_id, good)
        reply = await self._ask(request, wire.FeedbackReply, _PATIENT_S)
        return Feedback(reply.known, reply.evicted)

    async def stats(self) -> CacheStats:
        """Counts of the process.

        Raises:
            CacheUnavailable: it cannot answer now.
        """
        return (await self._ask(wire.StatsRequest(self._next_id()), wire.StatsReply, _PATIENT_S)).stats

    async def purge(
        self,
        scopes: list[str] | None = None,
        *,
        model: str | None = None,
        older_than_s: float | None = None,
        tag: str | None = None,
        policy: str | None = None,
        exact: str | None = None,
        entry: str | None = None,
    ) -> Purged:
        """Forget the entries that meet every condition given, all when none is; in every replica of the process.

        Args:
            scopes: those of any of these owners.
            exact: the answer to the request with this exact key.
            entry: the answer with this id.

        Raises:
            CacheUnavailable: the process cannot answer now.
        """
        request = wire.PurgeRequest(self._next_id(), scopes, model, older_than_s, tag, policy, exact, entry)
        reply = await self._ask(request, wire.PurgeReply, _PURGE_S)
        return Purged(reply.removed, reply.confirmed, reply.unconfirmed)

    async def embed(self, texts: list[str], *, as_questions: bool = False) -> list[list[float]]:
        """Unit vectors of the texts, by the cache's embedder.

        Args:
            as_questions: those by which a look-up of these questions searches: it, or the vector's other user, whoever
                comes second, finds them embedded. They wait no longer than a look-up.

        Raises:
            CacheUnavailable: the process cannot answer now, or a text is refused (`too_long`, `script_not_covered`).
        """
        request = wire.EmbedRequest(self._next_id(), texts, as_questions)
        patience_s = self._timeout_s if as_questions else _PATIENT_S
        return (await self._ask(request, wire.EmbedReply, patience_s)).vectors

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _ask(self, request: wire.Request, expected: type[_ReplyType], timeout_s: float) -> _ReplyType:
        writer = self._writer
        if writer is None or writer.is_closing():
            raise CacheUnavailable("unavailable", f"No cache process answers on {self._path}.")
        if writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise CacheUnavailable("overloaded", "The cache process does not read its requests.")
        try:
            data = wire.frame(request)
        except wire.ProtocolError as error:
            raise CacheUnavailable("too_large", str(error)) from error
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = future
        try:
            writer.write(data)
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            raise CacheUnavailable("timeout", f"The cache process did not answer within {timeout_s} s.") from None
        finally:
            self._pending.pop(request.id, None)
        if isinstance(reply, wire.FailureReply):
            raise CacheUnavailable(reply.reason, reply.message)
        if not isinstance(reply, expected):
            raise CacheUnavailable("internal_error", f"The cache process answered with {type(reply).__name__}.")
        return reply

    async def _keep_connected(self) -> None:
        delay = _RECONNECT_FROM_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _RECONNECT_TO_S)
                continue
            try:
                await self._converse(reader, writer)
                delay = _RECONNECT_FROM_S
            except (asyncio.IncompleteReadError, OSError):
                delay = _RECONNECT_FROM_S
                _log.warning("the cache process on %s is gone; serving without it until it is back", self._path)
            except (wire.ProtocolError, TimeoutError) as error:
                _log.warning("the cache process on %s is not understood (%s); reconnecting", self._path, error)
            finally:
                self._disconnect()
                writer.close()
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RECONNECT_TO_S)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand every reply to whoever asked, until the connection ends."""
        async with asyncio.timeout(_PATIENT_S):
            hello = await wire.read_reply(reader)
        if not isinstance(hello, wire.Hello) or hello.version != wire.PROTOCOL_VERSION:
            raise wire.ProtocolError("it speaks another version of the protocol")
        await self._greet(hello, writer)
        while True:
            reply = await wire.read_reply(reader)
            if isinstance(reply, wire.Hello):
                await self._greet(reply, writer)
                continue
            future = self._pending.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply)

    async def _greet(self, hello: wire.Hello, writer: asyncio.StreamWriter) -> None:
        self.fingerprint = hello.fingerprint
        self.state = hello.state
        if hello.state == "ready":
            self.scripts = frozenset(hello.scripts)
        self._writer = writer
        async with self._changed:
            self._changed.notify_all()

    def _disconnect(self) -> None:
        """Nobody answers any more: whoever waits gets a miss now, not at its time limit."""
        self._writer = None
        for id, future in self._pending.items():
            if not future.done():
                future.set_result(wire.FailureReply(id, "unavailable", "The cache process went away."))
