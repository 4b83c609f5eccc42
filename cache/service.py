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
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from cache import wire
from cache.answering import Answering
from cache.embedding.batcher import Batcher, Overloaded
from cache.embedding.embedder import BackendChoice, Embedder, EmbedderError, Refused, choose
from cache.embedding.http import EmbeddingsApp
from cache.learning import Learning
from cache.notebook import Notebook
from cache.promise.keeper import Keeper
from cache.replicas.opening import open_replica
from cache.stats import CacheStats, Recorder, latency
from cache.store.answers import Purge, Store
from cache.store.cipher import sealer
from cache.store.disk import Disk
from edge.limits import Limits
from edge.server import Server

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
# Neighbours that are verified: the nearest may fail a guard where the next one does not.
_NEIGHBOURS = 8
_EXPIRE_EVERY_S = 30.0
# Answers that came while the model was loading and get their vectors afterwards; more than that stay exact.
_MAX_WITHOUT_VECTOR = 1000
_RESTORE_CHUNK = 500


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m cache` is told. Sizes in bytes, times as named; `data_dir` None keeps entries in memory only."""

    socket: Path
    embedder: str = "all-MiniLM-L6-v2"
    embedder_backend: BackendChoice = "auto"
    embedders_dir: Path | None = None  # None: the user's cache folder
    max_entries: int = 100_000
    max_bytes: int = 512 * 1024 * 1024
    max_batch_size: int = 8
    max_wait_ms: float = 2.0
    threads: int = 1
    data_dir: Path | None = None
    embeddings_host: str = "127.0.0.1"
    embeddings_port: int | None = None  # None: no HTTP


class Service:
    """Answers requests of any number of connections on one event loop; the model runs on a thread of its own."""

    def __init__(self, config: Config) -> None:
        """Find the model and open the file of entries; the model is loaded by `run`.

        Raises:
            EmbedderError: there is no such model.
            OSError: the data folder cannot be written, or the client of Redis is missing.
            ValueError: the URL of Redis makes no sense.
        """
        self._config = config
        self._fingerprint = choose(config.embedder, config.embedder_backend).fingerprint
        self._disk = None if config.data_dir is None else Disk(config.data_dir, self._fingerprint)
        self._store = Store(max_entries=config.max_entries, max_bytes=config.max_bytes, disk=self._disk)
        self._recorder = Recorder()
        self._state: Literal["warming", "ready", "failed"] = "warming"
        self._error: str | None = None
        self.embedder: Embedder | None = None
        self.batcher: Batcher | None = None
        self._without_vector: list[CacheKey] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._started = time.monotonic()

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
        tasks = [asyncio.create_task(self._warm_up()), asyncio.create_task(self._expire())]
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
            if self.batcher:
                await self.batcher.close()
            if self._disk:
                self._disk.close()
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
        """Bring back the entries on disk, then load the model; both off the event loop."""
        try:
            await self._restore()
            self._restored.set()
            self.embedder = await _in_daemon_thread(
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
            self._state = "ready"
            _log.info("ready after %.1f s, %d entries", time.monotonic() - self._started, len(self._store))
        for writer in self._writers:
            writer.write(wire.frame(self._hello()))
        await self._add_vectors()

    async def _add_vectors(self) -> None:
        """Embed the questions of the answers that were stored before the model was loaded."""
        if self.batcher is None:
            return
        for key in self._without_vector:
            with contextlib.suppress(Refused, Overloaded):
                self._store.add_vector(key, await self.batcher.embed(asked_form(key.text), behind=True))
        self._without_vector.clear()

    async def _restore(self) -> None:
        if self._disk is None:
            return
        disk = self._disk
        rows = await _in_daemon_thread(lambda: list(disk.rows()))
        for i, row in enumerate(rows):
            self._store.restore(row)
            if i % _RESTORE_CHUNK == 0:
                await asyncio.sleep(0)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_EVERY_S)
            self._store.expire()

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
                reply = await self._lookup(request)
                self._recorder.lookup_ms.append((time.perf_counter() - started) * 1000)
                self._count(reply)
                return reply
            case wire.StoreRequest():
                reason = await self._keep(request)
                if reason is None:
                    self._recorder.stores += 1
                else:
                    self._recorder.refused_stores[reason] += 1
                return wire.StoreReply(request.id, reason)
            case wire.StatsRequest():
                return wire.StatsReply(request.id, self._stats())
            case wire.PurgeRequest():
                purge = Purge(scope=request.scope, model=request.model, older_than_s=request.older_than_s)
                removed = await self._store.purge(purge)
                return wire.PurgeReply(request.id, removed)
            case wire.EmbedRequest():
                return await self._embed(request)

    async def _lookup(self, request: wire.LookupRequest) -> wire.LookupReply:
        """Exact, then the same words written otherwise, then nearest neighbours; these two checked by the guards."""
        key = request.key
        same = self._store.get_exact(key, ttl_s=request.ttl_s)
        if same is not None:
            self._store.used(same.answer_id)
            return wire.LookupReply(request.id, "exact", 1.0, same.entry)
        if request.mode == "exact":
            return wire.LookupReply(request.id, "miss", reason="no_entry")
        found = self._store.get_folded(key, ttl_s=request.ttl_s)
        if found is not None and objection(key.text, found.question) is None:
            self._store.used(found.answer_id)
            return wire.LookupReply(request.id, "semantic", 1.0, found.entry)
        if self.batcher is None:
            return wire.LookupReply(request.id, "miss", reason=self._state)
        try:
            vector = await self.batcher.embed(asked_form(key.text))
        except Refused as refusal:
            return wire.LookupReply(request.id, "miss", reason=refusal.reason)
        except Overloaded:
            return wire.LookupReply(request.id, "miss", reason="overloaded")
        nearest = await self._store.nearest(key, vector, _NEIGHBOURS, ttl_s=request.ttl_s)
        if not nearest:
            return wire.LookupReply(request.id, "miss", reason="no_entry")
        reason: str | None = "below_threshold"
        for rank, near in enumerate(nearest):
            if near.cosine < lowest_cosine(request.threshold):
                break
            verdict = verify(key.text, near.question, near.cosine, request.threshold)
            if verdict.accepted:
                self._store.used(near.answer_id)
                return wire.LookupReply(request.id, "semantic", min(near.cosine, 1.0), near.entry)
            if rank == 0:
                reason = verdict.reason
        return wire.LookupReply(request.id, "miss", score=nearest[0].cosine, reason=reason)

    async def _keep(self, request: wire.StoreRequest) -> str | None:
        """Store an answer; with a vector if it may be found by other words, else for the same words only."""
        vector = None
        if request.mode == "semantic" and self.batcher is None and self._state == "warming":
            if len(self._without_vector) < _MAX_WITHOUT_VECTOR:
                self._without_vector.append(request.key)
        elif request.mode == "semantic" and self.batcher is not None:
            with contextlib.suppress(Refused, Overloaded):
                vector = await self.batcher.embed(asked_form(request.key.text))
        return self._store.put(request.key, request.entry, vector).reason

    async def _embed(self, request: wire.EmbedRequest) -> wire.Reply:
        if self.batcher is None:
            return wire.FailureReply(request.id, self._state, self._error or "The embedder is being loaded.")
        try:
            vectors = await asyncio.gather(*(self.batcher.embed(text, behind=True) for text in request.texts))
        except Refused as refusal:
            return wire.FailureReply(request.id, refusal.reason, str(refusal))
        except Overloaded:
            return wire.FailureReply(request.id, "overloaded", "Too many texts wait for the embedder.")
        return wire.EmbedReply(request.id, [vector.tolist() for vector in vectors])

    def _count(self, reply: wire.LookupReply) -> None:
        self._recorder.lookups += 1
        if reply.entry is None:
            self._recorder.misses[reply.reason or "no_entry"] += 1
            return
        self._recorder.saved_nanousd += reply.entry.cost_nanousd
        if reply.outcome == "exact":
            self._recorder.exact_hits += 1
        else:
            self._recorder.semantic_hits += 1

    def _hello(self) -> wire.Hello:
        scripts = sorted(self.embedder.scripts) if self.embedder else []
        return wire.Hello(0, wire.PROTOCOL_VERSION, self._state, self._fingerprint, scripts, self._error)

    def _stats(self) -> CacheStats:
        recorder, store, batcher = self._recorder, self._store, self.batcher
        return CacheStats(
            state=self._state,
            embedder=self._config.embedder,
            fingerprint=self._fingerprint,
            uptime_s=time.monotonic() - self._started,
            entries=len(store),
            bytes=store.bytes,
            max_entries=store.max_entries,
            max_bytes=store.max_bytes,
            indexes=store.indexes,
            vectors=store.vectors,
            lookups=recorder.lookups,
            exact_hits=recorder.exact_hits,
            semantic_hits=recorder.semantic_hits,
            misses=dict(recorder.misses),
            stores=recorder.stores,
            refused_stores=dict(recorder.refused_stores),
            evictions=store.evictions,
            expirations=store.expirations,
            purged=store.purged,
            embedded_texts=batcher.texts if batcher else 0,
            embedded_batches=batcher.batches if batcher else 0,
            saved_nanousd=recorder.saved_nanousd,
            lookup=latency(recorder.lookup_ms),
            embedding=latency(batcher.embedding_ms if batcher else deque()),
        )


async def _in_daemon_thread(work: Callable[[], _Result]) -> _Result:
    """Run slow work beside the event loop. Unlike the loop's own threads, it never holds up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        if not future.done():
            settle()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # handed to whoever awaits
            settle = partial(future.set_exception, error)
        else:
            settle = partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
            loop.call_soon_threadsafe(finish, settle)

    threading.Thread(target=run, daemon=True).start()
    return await future


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that is gone; refuse to take the place of one that lives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise OSError(f"another cache process listens on {path}")
