"""The asyncio side of the engine: starts the core process, sends requests, hands out answers, starts the core again.

It promises: every answer ends, with a finish reason or with an `EngineError`, also when the core dies in mid-step; an
answer that nobody wants any more is aborted within one step; a core that dies or hangs is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import msgspec

from engine.adapters.registry import AdapterRegistry
from engine.answer import Answer, AnswerAborted, EngineBusy, EngineDown, EngineError, Generation, PromptRejected
from engine.config import EngineConfig
from engine.messages import (
    Abort,
    AdapterFailed,
    AdapterGone,
    AdapterLoaded,
    Add,
    Fatal,
    FrameReader,
    FromCore,
    NewRequest,
    Pages,
    Ping,
    Pong,
    Ready,
    Rejected,
    Step,
    ToCore,
    encode_frame,
    from_core_decoder,
)
from engine.metrics import EngineMetrics
from engine.page_feed import PageFeed
from engine.pooled_text import PooledText
from engine.types import SamplingParams

log = logging.getLogger("engine.client")

_MIN_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
_STABLE_AFTER_SECONDS = 60.0  # a core that lived this long was healthy: the next back-off starts from the beginning
_PING_INTERVAL_SECONDS = 1.0
_STOP_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Health:
    """`state`: ok, starting, restarting, stalled or stopped."""

    state: str
    last_step_age_seconds: float | None = None
    detail: str | None = None


class _Connection(asyncio.Protocol):
    """The socket to one core process."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's without being derived from them.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._client.receive(from_core_decoder.decode(payload))

    def send(self, message: ToCore) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class EngineClient:
    """Owns the core process. `start`, then `generate`; `stop` at the end."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        *,
        core_module: str = "engine.core",
        watchdog_seconds: float = 120.0,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`core_module`: what `python -m` runs as the core. `watchdog_seconds`: a loop that does not answer for so
        long is killed and started again. `adapters`: the folders of those that are there from the start, by name."""
        self.metrics = metrics
        self.ready: Ready | None = None
        self.feed = PageFeed()
        self.adapters = AdapterRegistry(adapters, self._send)
        self.startup_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._core_module = core_module
        self._watchdog_seconds = watchdog_seconds
        self._state = "starting"
        self._detail: str | None = None
        self._answers: dict[int, Answer | PooledText] = {}
        self._ids = itertools.count(1)
        self._pings: dict[int, asyncio.Future[Pong]] = {}
        self._connection: _Connection | None = None
        self._ready_event = asyncio.Event()
        self._stop_event = asyncio.Event()
        self._supervision: asyncio.Task[None] | None = None

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in a request's texts, a predicted answer among them."""
        return self._config.speculative == "ngram"

    @property
    def loads_adapters(self) -> bool:
        """Whether adapters can come and go while the engine runs."""
        return self._config.lora_dir is not None

    @property
    def max_answers(self) -> int:
        """How many answers one request can ask for: as many as run and wait at once."""
        return self._config.max_num_seqs + self._config.max_waiting

    @property
    def max_rows(self) -> int:
        """How many sequences run at once."""
        return self._config.max_num_seqs

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load the model; returns at once."""
        self._supervision = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> Ready:
        """Wait until the core has loaded the model (or loaded it again).

        Raises:
            EngineDown: the first start failed.
        """
        waiting = asyncio.create_task(self._ready_event.wait())
        either: set[asyncio.Future[Any]] = {waiting, self.startup_failure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.ready is None:
            raise EngineDown(self.startup_failure.result())
        return self.ready

    async def stop(self) -> None:
        """End the core; answers that are still open fail."""
        self._stop_event.set()
        if self._supervision is not None:
            await self._supervision

    async def _supervise(self) -> None:
        failures = 0
        was_ready = False
        while True:
            started = time.monotonic()
            try:
                reason = await self._run_core()
            except OSError as error:
                reason = f"The engine core could not be started: {error}"
            was_ready = was_ready or self.ready is not None
            self._lose_core(reason)
            if self._stop_event.is_set():
                self._state = "stopped"
                return
            if not was_ready:
                # Nothing has ever worked: the same start would fail again. Whoever started us must know.
                self._state = "stopped"
                self.startup_failure.set_result(reason)
                return
            failures = 1 if time.monotonic() - started > _STABLE_AFTER_SECONDS else failures + 1
            delay = min(_MAX_BACKOFF_SECONDS, _MIN_BACKOFF_SECONDS * 2 ** (failures - 1))
            log.error("%s; starting the core again in %.1f s", reason, delay)
            self._state = "restarting"
            self.metrics.core_restarts.inc()
            try:
                await asyncio.wait_for(self._stop_event.wait(), delay)
            except TimeoutError:
                continue

    async def _run_core(self) -> str:
        """Start one core process and wait for its end; returns why it ended."""
        self._detail = None
        config = msgspec.structs.replace(self._config, adapters=self.adapters.entries())
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._core_module,
                str(theirs.fileno()),
                str(os.getpid()),
                msgspec.json.encode(config).decode(),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        self.metrics.on_core_start()
        connection = _Connection(self)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
        self._connection = connection
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stop_event.wait())
        watchdog = asyncio.create_task(self._watch())
        try:
            any_of: set[asyncio.Future[Any]] = {ended, stopping, watchdog}
            await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            hung = watchdog.done() and not ended.done()
            connection.close()
            if not hung:
                # The closed connection is the order to end.
                await asyncio.wait({ended}, timeout=_STOP_GRACE_SECONDS)
            if not ended.done():
                process.kill()
            code = await ended
        finally:
            for task in (stopping, watchdog):
                task.cancel()
        if hung:
            return f"The engine core did not answer for {self._watchdog_seconds:.0f} s"
        return self._detail or f"The engine core ended with exit code {code}"

    async def _watch(self) -> None:
        """Return when the loop of the core has not answered for too long."""
        await self._ready_event.wait()
        while True:
            await asyncio.sleep(_PING_INTERVAL_SECONDS)
            try:
                await self._ping(self._watchdog_seconds)
            except (TimeoutError, EngineDown):
                return

    def _lose_core(self, reason: str) -> None:
        self.ready = None
        self._ready_event.clear()
        self.feed.lose()
        self.adapters.lose(EngineDown(reason))
        self._connection = None
        self.metrics.up.set(0)
        lost = EngineDown(f"{reason}; the answer is lost. Send the request again.")
        for answer in list(self._answers.values()):
            answer.fail(lost, "error")
            self._close(answer)
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(EngineDown(reason))
        self._pings.clear()

    # --- requests ------------------------------------------------------------------------------------------------

    def generate(self, generations: Sequence[Generation]) -> list[Answer]:
        """Send requests, all or none of which are admitted. A refusal reaches each answer as its error.

        Raises:
            EngineDown: there is no core to send them to.
        """
        if self._connection is None or self.ready is None:
            raise EngineDown(f"The engine is {self._state}. Try again in a few seconds.")
        adapter_ids = [self.adapters.id_of(generation.adapter) for generation in generations]
        answers = [Answer(next(self._ids), generation) for generation in generations]
        self._answers.update((answer.request_id, answer) for answer in answers)
        requests = [
            g.request(answer.request_id, adapter)
            for answer, g, adapter in zip(answers, generations, adapter_ids, strict=True)
        ]
        self._connection.send(Add(requests))
        return answers

    def pool(self, prompt_token_ids: list[int], cache_salt: str | None = None) -> PooledText:
        """Send a text of which a vector is to be made. A refusal reaches it as its error.

        Raises:
            EngineDown: there is no core to send it to.
        """
        if self._connection is None or self.ready is None:
            raise EngineDown(f"The engine is {self._state}. Try again in a few seconds.")
        text = PooledText(next(self._ids), len(prompt_token_ids))
        self._answers[text.request_id] = text
        self._connection.send(Add([NewRequest(text.request_id, prompt_token_ids, SamplingParams(), cache_salt)]))
        return text

    def abort(self, answers: Iterable[Answer | PooledText]) -> None:
        """Give answers up: their pages are free before the next step. Harmless for those that have ended."""
        self._end(answers, AnswerAborted("The answer was aborted."), "abort")

    def end_all(self, message: str) -> None:
        """End every open answer with `EngineDown` and tell its reader why."""
        self._end(self._answers.values(), EngineDown(message), "error")

    def _end(self, answers: Iterable[Answer | PooledText], error: EngineError, end_reason: str) -> None:
        open_answers = [answer for answer in answers if answer.end_reason is None]
        if open_answers:
            self._send(Abort([answer.request_id for answer in open_answers]))
        for answer in open_answers:
            answer.fail(error, end_reason)
            self._close(answer)

    def _close(self, answer: Answer | PooledText) -> None:
        """Forget an answer that has ended. Outputs that still arrive for it are dropped."""
        del self._answers[answer.request_id]
        self.metrics.on_finish(answer.end_reason or "error", answer.seconds_per_token)

    async def health(self, timeout_seconds: float = 5.0) -> Health:
        """Ask the loop itself. A step that takes longer than the time-out reads as stalled."""
        if self.ready is None:
            return Health(self._state, detail=self._detail)
        try:
            pong = await self._ping(timeout_seconds)
        except TimeoutError:
            return Health("stalled", detail=f"the loop did not answer within {timeout_seconds:.0f} s")
        except EngineDown as error:
            return Health("restarting", detail=str(error))
        return Health("ok", pong.last_step_age_seconds)

    async def _ping(self, timeout_seconds: float) -> Pong:
        number = next(self._ids)
        future = self._pings[number] = asyncio.get_running_loop().create_future()
        self._send(Ping(number))
        try:
            return await asyncio.wait_for(future, timeout_seconds)
        finally:
            self._pings.pop(number, None)

    def _send(self, message: ToCore) -> None:
        if self._connection is not None:
            self._connection.send(message)

    # --- news from the core --------------------------------------------------------------------------------------

    def receive(self, message: FromCore) -> None:
        """Handle one message of the core."""
        match message:
            case Step():
                self._on_step(message)
            case Rejected(request_ids, text, retry_after_seconds):
                error: EngineError
                if retry_after_seconds is None:
                    error = PromptRejected(text)
                else:
                    error = EngineBusy(text, retry_after_seconds)
                for request_id in request_ids:
                    answer = self._answers.get(request_id)
                    if answer is not None:
                        answer.fail(error, "rejected")
                        self._close(answer)
            case Pong(number):
                future = self._pings.get(number)
                if future is not None and not future.done():
                    future.set_result(message)
            case AdapterLoaded() | AdapterFailed() | AdapterGone():
                self.adapters.receive(message)
            case Pages():
                self.feed.apply(message)
            case Ready():
                self.feed.begin(message.page_space, message.block_size)
                log.info("model loaded in %.1f s", message.load_seconds)
                self.ready = message
                self._state = "ok"
                self.metrics.up.set(1)
                self._ready_event.set()
            case Fatal(text):
                self._detail = text

    def _on_step(self, step: Step) -> None:
        self.metrics.on_step(step.stats, step.step_seconds)
        stopped: list[int] = []
        for output in step.outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:  # aborted meanwhile
                continue
            is_first = answer.num_generated_tokens == 0
            if answer.take(output):
                stopped.append(answer.request_id)
            if is_first and answer.seconds_to_first_token is not None:
                self.metrics.on_first_token(answer.seconds_to_first_token)
            if answer.end_reason is not None:
                self._close(answer)
        if stopped:
            self._send(Abort(stopped, stopped=True))
