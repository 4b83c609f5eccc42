"""The cache process: embedder, indexes and answers behind a Unix socket.

It listens at once and says `warming` until its model is loaded; meanwhile only the exact cache answers. It ends on
SIGTERM, on SIGINT, and when its parent dies. Run: `python -m cache --socket PATH`, or `tierline cache`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cache import wire
from cache.answering import Answering
from cache.embedding.batcher import Batcher, Overloaded
from cache.embedding.embedder import BackendChoice, Embedder, EmbedderError, Refused, choose
from cache.embedding.http import EmbeddingsApp
from cache.learning import Learning
from cache.notebook import Notebook
from cache.promise.keeper import Keeper
from cache.reembedding import make_vectors
from cache.replicas.opening import open_lessons, open_replica
from cache.stats import CacheStats, Recorder, latency
from cache.store.answers import Store
from cache.store.changes import Purge
from cache.store.cipher import InvalidKeys, parse_keys, sealer
from cache.threads import in_daemon_thread
from cache.words.asking import asked_form
from edge.limits import Limits
from edge.server import Server

if TYPE_CHECKING:
    from cache.replicas.lessons import Lessons
    from cache.replicas.replica import Replica

_log = logging.getLogger(__name__)
_EXPIRE_EVERY_S = 30.0
# What was learned is on disk after so long: the most that a killed process loses of it.
_FLUSH_EVERY_S = 2.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m cache` is told. Sizes in bytes, times as named; `data_dir` None keeps entries in memory only."""

    socket: Path
    embedder: str = "all-MiniLM-L6-v2"
    embedder_backend: BackendChoice = "auto"
    embedders_dir: Path | None = None  # None: the user's cache folder
    max_entries: int = 100_000
    max_bytes: int = 512 * 1024 * 1024
    max_disk_bytes: int = 4 * 1024**3
    encryption_key_env: str | None = None  # None: kept as it is
    max_batch_size: int = 8
    max_wait_ms: float = 0.0
    load_wait_ms: float = 50.0
    threads: int = 1
    data_dir: Path | None = None
    embeddings_host: str = "127.0.0.1"
    embeddings_port: int | None = None  # None: no HTTP
    redis_url: str | None = None  # None: no replicas
    redis_max_bytes: int = 256 * 1024 * 1024


class Service:
    """Answers requests of any number of connections on one event loop; the model runs on a thread of its own."""

    def __init__(self, config: Config) -> None:
        """Find the model and open the file of entries; the model is loaded by `run`.

        Raises:
            EmbedderError: there is no such model.
            OSError: the data folder cannot be written, or the client of Redis is missing.
            InvalidKeys: the variable for the encryption key holds none.
            ValueError: the URL of Redis makes no sense.
        """
        self._config = config
        self._fingerprint = choose(config.embedder, config.embedder_backend).fingerprint
        self._keys = _keys(config.encryption_key_env)
        self._store = Store(
            config.data_dir,
            self._fingerprint,
            max_entries=config.max_entries,
            max_bytes=config.max_bytes,
            max_disk_bytes=config.max_disk_bytes,
            keys=self._keys,
        )
        self._recorder = Recorder()
        self._state: Literal["warming", "ready", "failed"] = "warming"
        self._error: str | None = None
        self.embedder: Embedder | None = None
        self.batcher: Batcher | None = None
        self._notebook = Notebook(config.data_dir, self._fingerprint)
        self._keeper = Keeper()
        self._learning = Learning(self._keeper, self._notebook, self._recorder)
        self._answering = Answering(self._store, self._learning, self._recorder, load_wait_s=config.load_wait_ms / 1000)
        self._writers: set[asyncio.StreamWriter] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._started = time.monotonic()
        self._replica = self._open_replica()
        self._lessons: Lessons | None = None
        if config.redis_url is not None:
            rate = self._answering.rate
            self._lessons = open_lessons(self._keeper, config.redis_url, embedder=self._fingerprint, rate=rate)
            self._learning.sharing = self._lessons

    def _open_replica(self) -> Replica | None:
        config = self._config
        if config.redis_url is None:
            return None
        return open_replica(
            self._store,
            config.redis_url,
            embedder=self._fingerprint,
            folder=config.data_dir,
            at=config.socket,
            most_bytes=config.redis_max_bytes,
            sealing=sealer(self._keys),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. The socket is readable by its owner only and removed at the end.

        Raises:
            OSError: the socket's folder cannot be made, or another process already listens there.
        """
        path = self._config.socket
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        mask = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(self._connection, path)
        finally:
            os.umask(mask)
        inode = path.stat().st_ino
        tasks = [asyncio.create_task(work) for work in (self._warm_up(), self._expire(), self._learn())]
        if self._replica is not None:
            tasks.append(asyncio.create_task(self._replicate(self._replica)))
        if self._lessons is not None:
            tasks.append(asyncio.create_task(self._share_lessons(self._lessons)))
        if self._config.embeddings_port is not None:
            tasks.append(asyncio.create_task(self._serve_embeddings(self._config.embeddings_port)))
        try:
            await stop.wait()
        finally:
            server.close()
            for task in [*tasks, *self._requests]:
                task.cancel()
            await asyncio.gather(*tasks, *self._requests, return_exceptions=True)
            for writer in self._writers:
                writer.close()
            await self._answering.close()
            if self.batcher:
                await self.batcher.close()
            await self._learning.flush()
            self._notebook.close()
            self._store.close()
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:  # a successor may listen here already
                    path.unlink()

    async def _serve_embeddings(self, port: int) -> None:
        app = EmbeddingsApp(self, self._config.embedder)
        server = Server(app, Limits(), host=self._config.embeddings_host, port=port, lifespan="off")
        try:
            await server.serve_beside()
        except (OSError, SystemExit) as error:  # uvicorn ends the process where a port is taken
            _log.error("cannot serve embeddings on port %d, the cache serves on: %s", port, error)

    async def _warm_up(self) -> None:
        """Load the model off the event loop, then make the vectors that are missing."""
        try:
            self.embedder = await in_daemon_thread(
                lambda: Embedder(
                    self._config.embedder,
                    backend=self._config.embedder_backend,
                    threads=self._config.threads,
                    store=self._config.embedders_dir,
                )
            )
        except (EmbedderError, ImportError) as error:
            self._state, self._error = self._answering.state, _ = "failed", str(error)
            _log.error("semantic look-up is off, the exact cache serves on: %s", error)
        else:
            self.batcher = Batcher(
                self.embedder, max_batch_size=self._config.max_batch_size, max_wait_ms=self._config.max_wait_ms
            )
            self.batcher.start()
            self._answering.batcher = self.batcher
            self._state = self._answering.state = "ready"
            _log.info("ready after %.1f s, %d answers", time.monotonic() - self._started, self._store.size().answers)
        for writer in self._writers:
            writer.write(wire.frame(self._hello()))
        if self.batcher is not None:
            await make_vectors(self._store, self.batcher)

    async def _replicate(self, replica: Replica) -> None:
        try:
            await replica.run()
        except Exception:
            _log.exception("this process shares answers with no other any more")

    async def _share_lessons(self, lessons: Lessons) -> None:
        try:
            await lessons.run()
        except Exception:
            _log.exception("the promises of this process learn from it alone from here on")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            try:
                await self._store.expire()
            except OSError as error:
                _log.debug("what is past its time stays in the file for now: %s", error)
            self._learning.expire()

    async def _learn(self) -> None:
        """Refit what the promises learn from, beside the requests, and bring it to disk."""
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            try:
                await self._learning.refit()
            except Exception:
                # Serving goes on by what was learned before; the next labels are another chance.
                _log.exception("what was learned could not be weighed")
            await self._learning.flush()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        writer.write(wire.frame(self._hello()))
        try:
            while True:
                request = await wire.read_request(reader)
                task = asyncio.create_task(self._answer(request, writer))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        except wire.ProtocolError as error:
            _log.warning("a client was disconnected: %s", error)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: wire.Request, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self._reply(request)
        except Exception as error:
            # One request's fault must not end the process; the client is told, the log has the trace.
            _log.exception("request %d failed", request.id)
            reply = wire.FailureReply(request.id, "internal_error", f"{type(error).__name__}: {error}")
        if not writer.is_closing():
            writer.write(wire.frame(reply))

    async def _reply(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.LookupRequest():
                started = time.perf_counter()
                reply = await self._answering.look_up(request)
                self._recorder.lookup_ms.append((time.perf_counter() - started) * 1000)
                self._recorder.looked_up(reply.outcome, reply.reason, reply.entry)
                return reply
            case wire.StoreRequest():
                return await self._answering.keep(request)
            case wire.VerdictRequest():
                self._answering.judged(request)
                return wire.DoneReply(request.id)
            case wire.FeedbackRequest():
                return await self._feedback(request)
            case wire.SharedRequest():
                self._learning.shared(request.asker, request.answer_of)
                return wire.DoneReply(request.id)
            case wire.StatsRequest():
                return wire.StatsReply(request.id, self._stats())
            case wire.PurgeRequest():
                return await self._purge(request)
            case wire.EmbedRequest():
                return await self._embed(request)

    async def _purge(self, request: wire.PurgeRequest) -> wire.PurgeReply:
        """Forget answers; where there are replicas, those of all, and say which have not followed."""
        purges = [
            Purge(
                scope=scope,
                model=request.model,
                older_than_s=request.older_than_s,
                tag=request.tag,
                policy=request.policy,
                exact=request.exact,
                entry=request.entry,
            )
            for scope in ([None] if request.scopes is None else request.scopes)
        ]
        if self._replica is None:
            return wire.PurgeReply(request.id, sum([await self._store.purge(purge) for purge in purges]))
        done = await self._replica.purge(*purges)
        return wire.PurgeReply(request.id, done.removed, done.confirmed, done.unconfirmed)

    async def _feedback(self, request: wire.FeedbackRequest) -> wire.FeedbackReply:
        """Take a user's word on an answer, also of another process."""
        evicted = self._answering.rate(*(word := (request.request_id, request.team_id, request.good)))
        if evicted is None and self._lessons is not None:
            evicted = await self._lessons.ask_others(*word)
        return wire.FeedbackReply(request.id, evicted is not None, evicted or 0)

    async def _embed(self, request: wire.EmbedRequest) -> wire.Reply:
        if self.batcher is None:
            return wire.FailureReply(request.id, self._state, self._error or "The embedder is being loaded.")
        try:
            texts = [asked_form(text) for text in request.texts] if request.as_questions else request.texts
            waiting = (self.batcher.embed(text, behind=not request.as_questions) for text in texts)
            vectors = await asyncio.gather(*waiting)
        except Refused as refusal:
            return wire.FailureReply(request.id, refusal.reason, str(refusal))
        except Overloaded:
            return wire.FailureReply(request.id, "overloaded", "Too many texts wait for the embedder.")
        return wire.EmbedReply(request.id, [vector.tolist() for vector in vectors])

    def _hello(self) -> wire.Hello:
        scripts = sorted(self.embedder.scripts) if self.embedder else []
        return wire.Hello(0, wire.PROTOCOL_VERSION, self._state, self._fingerprint, scripts, self._error)

    def _stats(self) -> CacheStats:
        recorder, store, batcher = self._recorder, self._store, self.batcher
        size = store.size()
        return CacheStats(
            state=self._state,
            embedder=self._config.embedder,
            fingerprint=self._fingerprint,
            uptime_s=time.monotonic() - self._started,
            entries=size.answers,
            bytes=size.bytes,
            max_entries=store.max_entries,
            max_bytes=store.max_bytes,
            questions=size.questions,
            disk_bytes=size.disk_bytes,
            max_disk_bytes=store.max_disk_bytes,
            waiting_vectors=size.waiting_vectors,
            unwritten=size.unwritten,
            unreadable=size.unreadable,
            storage_error=size.error,
            indexes=size.places,
            vectors=size.vectors,
            lookups=recorder.lookups,
            exact_hits=recorder.exact_hits,
            semantic_hits=recorder.semantic_hits,
            misses=dict(recorder.misses),
            stores=recorder.stores,
            refused_stores=dict(recorder.refused_stores),
            evictions=size.evictions,
            expirations=size.expirations,
            purged=size.purged,
            embedded_texts=batcher.texts if batcher else 0,
            embedded_batches=batcher.batches if batcher else 0,
            saved_nanousd=recorder.saved_nanousd,
            lookup=latency(recorder.lookup_ms),
            embedding=latency(batcher.embedding_ms if batcher else deque()),
            audits=recorder.audits,
            shadow_hits=recorder.shadow_hits,
            judged=dict(recorder.judged),
            unjudged=dict(recorder.unjudged),
            feedback=dict(recorder.feedback),
            aliases_made=recorder.aliases_made,
            promises=self._learning.standings(),
            replication=None if self._replica is None else self._replica.stats(),
        )


def _keys(variable: str | None) -> list[bytes]:
    """The keys that an environment variable holds.

    Raises:
        InvalidKeys: it holds none.
    """
    if variable is None:
        return []
    try:
        return parse_keys(os.environ.get(variable, ""))
    except InvalidKeys as error:
        raise InvalidKeys(f"cache.encryption_key_env: {variable} holds no key: {error}") from None


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that is gone; refuse to take the place of one that lives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise OSError(f"another cache process listens on {path}")
