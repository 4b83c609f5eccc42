"""Micro-batching: many look-ups at once become few calls of the model, on one worker thread.

A lone text is embedded at once. While the model is busy texts gather; after a busy spell the batcher also waits up to
`max_wait_ms` for company. Long texts gain nothing by company, so they are not made to wait for each other. What was
embedded lately is remembered, so that storing after a miss costs nothing.

Look-ups hold up an answer, other texts (`behind=True`) do not. So look-ups go first: one waits for at most one small
batch of the others, however many of these there are. And the others go on however many look-ups there are.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from cache.embedding.embedder import Embedder, Refused

_REMEMBERED_TEXTS = 2048
_MAX_QUEUED_TEXTS = 4096  # of either kind
# Characters of a batch, unless one text alone has more. Company saves a third of the work at 10 tokens a text, a tenth
# at 30 and nothing at 60 and more, where the first of a batch would only wait for the last.
_MAX_CHARS_AHEAD = 600
_MAX_CHARS_BEHIND = 1000  # a batch that look-ups may have to wait for
_AHEAD_IN_A_ROW = 8  # batches of look-ups, while others wait

Vector = NDArray[np.float32]


class Overloaded(Exception):
    """More texts wait for the model than it can embed in useful time."""


class Batcher:
    """Embeds texts for coroutines; `start` before use, `close` after. Batches never exceed `max_batch_size`."""

    def __init__(self, embedder: Embedder, *, max_batch_size: int, max_wait_ms: float) -> None:
        self._embedder = embedder
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_ms / 1000
        self._waiting: dict[str, asyncio.Future[Vector]] = {}
        self._behind: dict[str, asyncio.Future[Vector]] = {}
        self._ahead_in_a_row = 0
        self._recent: OrderedDict[str, Vector] = OrderedDict()
        self._arrived = asyncio.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="embedder")
        self._task: asyncio.Task[None] | None = None
        self.texts = 0
        self.batches = 0
        self.embedding_ms: deque[float] = deque(maxlen=2048)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="batcher")

    async def close(self) -> None:
        """Stop; whoever still waits gets a CancelledError."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for future in (*self._waiting.values(), *self._behind.values()):
            future.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def embed(self, text: str, *, checked: bool = False, behind: bool = False) -> Vector:
        """The unit vector of a text, [dimension] float32.

        Args:
            checked: its length is known to fit; take it as it is.
            behind: look-ups go first, and it is not remembered in place of their texts.

        Raises:
            Refused: the model cannot embed this text faithfully.
            Overloaded: too many texts wait.
        """
        known = self._recent.get(text)
        if known is not None:
            self._recent.move_to_end(text)
            return known
        future = self._waiting.get(text)
        if future is None and (future := self._behind.get(text)) is not None and not behind:
            self._waiting[text] = self._behind.pop(text)
        if future is None:
            if not checked:
                self._embedder.check(text)
            queue = self._behind if behind else self._waiting
            if len(queue) >= _MAX_QUEUED_TEXTS:
                raise Overloaded
            future = queue[text] = asyncio.get_running_loop().create_future()
            self._arrived.set()
        return await asyncio.shield(future)

    async def _run(self) -> None:
        company = False
        while True:
            self._arrived.clear()
            if not self._waiting and not self._behind:
                await self._arrived.wait()
                self._arrived.clear()
            if company and self._waiting:
                await self._gather_company()
            if self._waiting and not (self._behind and self._ahead_in_a_row >= _AHEAD_IN_A_ROW):
                batch = self._piece(self._waiting, _MAX_CHARS_AHEAD)
                company = len(batch) > 1
                self._ahead_in_a_row += 1
            else:
                batch = self._piece(self._behind, _MAX_CHARS_BEHIND)
                self._ahead_in_a_row = 0
            await self._embed_batch(batch)

    def _piece(self, queue: Iterable[str], most_chars: int) -> list[str]:
        """The next texts of those that wait: as many as are worth each other's company."""
        piece: list[str] = []
        chars = 0
        for text in itertools.islice(queue, self._max_batch_size):
            chars += len(text)
            if piece and chars > most_chars:
                break
            piece.append(text)
        return piece

    async def _gather_company(self) -> None:
        """Wait until a batch is full or `max_wait_ms` have passed."""
        deadline = time.monotonic() + self._max_wait_s
        while len(self._waiting) < self._max_batch_size and (left := deadline - time.monotonic()) > 0:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    async def _embed_batch(self, batch: list[str]) -> None:
        started = time.perf_counter()
        try:
            vectors = await asyncio.get_running_loop().run_in_executor(self._worker, self._embedder.embed, batch)
        except Exception as error:  # whatever the model raises goes to those who asked, and the batcher lives on
            for text in batch:
                self._settle(text).set_exception(error)
            return
        self.embedding_ms.append((time.perf_counter() - started) * 1000)
        self.texts += len(batch)
        self.batches += 1
        for text, vector in zip(batch, vectors, strict=True):
            if text in self._waiting:
                self._remember(text, vector)
            future = self._settle(text)
            if not future.done():
                future.set_result(vector)

    def _settle(self, text: str) -> asyncio.Future[Vector]:
        # Whoever stood behind may have been asked for by a look-up meanwhile.
        return (self._waiting if text in self._waiting else self._behind).pop(text)

    def _remember(self, text: str, vector: Vector) -> None:
        self._recent[text] = vector
        if len(self._recent) > _REMEMBERED_TEXTS:
            self._recent.popitem(last=False)


__all__ = ["Batcher", "Overloaded", "Refused", "Vector"]
