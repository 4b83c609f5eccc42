"""The asyncio side of the engine: starts the core process, sends requests, hands out answers, starts the core again.

It promises: every answer ends, with a finish reason or with an `EngineError`, also when the core dies in mid-step; an
answer that nobody wants any more is aborted within one step; a core that dies or hangs is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from engine.adapters.registry import AdapterRegistry
from engine.config import EngineConfig
from engine.core_process import CoreProcess
from engine.exchange import Exchange, ReloadFailed
from engine.kv.page_feed import PageFeed
from engine.messages import (
    Abort,
    AdapterFailed,
    AdapterGone,
    AdapterLoaded,
    Add,
    Fatal,
    FromCore,
    Pages,
    Pong,
    Ready,
    Recall,
    Recalled,
    Rejected,
    Step,
    ToCore,
)
from engine.metrics import EngineMetrics
from engine.pooled_text import PooledText, Turn
from engine.pulse import Health, Pulse
from engine.text.answer import Answer, AnswerAborted, EngineBusy, EngineDown, EngineError, Generation, PromptRejected

log = logging.getLogger("engine.client")

_MIN_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
_STABLE_AFTER_SECONDS = 60.0  # a core that lived this long was healthy: the next back-off starts from the beginning
_PING_INTERVAL_SECONDS = 1.0


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
        self.adapters = AdapterRegistry(adapters, self._send, metrics.adapters)
        self.startup_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.config = config  # of the core that serves, or comes next
        self._core_module = core_module
        self._watchdog_seconds = watchdog_seconds
        self._state = "starting"
        self._detail: str | None = None
        self._answers: dict[int, Answer | PooledText] = {}
        self._ids = itertools.count(1)
        self._pulse = Pulse(self._send)
        self._connection: CoreProcess | None = None
        self._adds: dict[int, Add] = {}  # what was sent for each open answer
        self._answer_closed = asyncio.Event()
        self._exchange: Exchange | None = None  # of the weights, while it lasts
        self._leave = asyncio.Event()  # the core is to make room for another
        self._ready_event = asyncio.Event()
        self._stop_event = asyncio.Event()
        self._supervision: asyncio.Task[None] | None = None

    @property
    def max_answers(self) -> int:
        """How many answers one request can ask for: as many as run and wait at once."""
        return self.config.max_num_seqs + self.config.max_waiting

    @property
    def max_rows(self) -> int:
        """How many sequences run at once."""
        return self.config.max_num_seqs

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
                if self._exchange is not None:
                    self._exchange.end(EngineDown("The engine is being stopped."))
                return
            if self._exchange is not None:
                told = self._exchange.next_config(reason, as_told=self._leave.is_set())
                if told is not None:
                    self._leave.clear()
                    self.config, self._state = told, "reloading"
                    continue
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
        config = msgspec.structs.replace(self.config, adapters=self.adapters.entries())
        self.metrics.on_core_start()
        self._connection = core = await CoreProcess.start(self._core_module, config, self.receive)
        ended = asyncio.create_task(core.wait())
        stopping = asyncio.create_task(self._stop_event.wait())
        leaving = asyncio.create_task(self._leave.wait())
        watchdog = asyncio.create_task(self._watch())
        try:
            any_of: set[asyncio.Future[Any]] = {ended, stopping, leaving, watchdog}
            await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            hung = watchdog.done() and not ended.done()
            deaf = hung or (not ended.done() and not self._ready_event.is_set())  # while it loads, it does not listen
            code = await core.end(at_once=deaf)
        finally:
            for task in (stopping, leaving, watchdog):
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
                await self._pulse.take(self._watchdog_seconds)
            except (TimeoutError, EngineDown):
                return

    def _lose_core(self, reason: str) -> None:
        held = frozenset() if self._exchange is None else self._exchange.lose()
        if self._exchange is None:  # else what it was goes on to be said: the next core will be like it
            self.ready = None
        self._ready_event.clear()
        self.feed.lose()
        self.adapters.lose(EngineDown(reason))
        self._connection = None
        self.metrics.up.set(0)
        lost = EngineDown(f"{reason}; the answer is lost. Send the request again.")
        for answer in [answer for i, answer in self._answers.items() if i not in held]:
            answer.fail(lost, "error")
            self._close(answer)
        self._pulse.lose(reason)

    # --- requests ------------------------------------------------------------------------------------------------

    async def reload(self, model_path: str) -> Ready:
        """Serve the weights at `model_path` from now on. What runs ends on the old ones; what waits, and what comes
        meanwhile, runs on the new ones.

        Raises:
            ReloadFailed: they cannot be loaded, or another exchange is under way; the old ones serve on.
            EngineDown: there is no core, or it was lost meanwhile.
        """
        if self._exchange is not None:
            raise ReloadFailed("The weights are being exchanged already.")
        if self._connection is None or self.ready is None or self._state != "ok":
            raise EngineDown(f"The engine is {self._state}. Try again in a few seconds.")
        self._exchange = Exchange(self.config, msgspec.structs.replace(self.config, model_path=model_path))
        # Whoever asked may leave; the exchange is brought to its end.
        return await asyncio.shield(asyncio.create_task(self._reload(self._exchange)))

    async def _reload(self, exchange: Exchange) -> Ready:
        outcome = "failed"
        try:
            parties = exchange.parties(self._adds)
            self._send(Recall([[request.request_id for request in add.requests] for add in parties]))
            await exchange.take_back(parties)
            while self._answers.keys() - exchange.held_ids:
                self._answer_closed.clear()
                await self._answer_closed.wait()
            self._leave.set()
            ready = await exchange.done
            outcome = "loaded"
            return ready
        finally:
            self.metrics.weight_reloads[outcome].inc()
            self._exchange = None
            for add in exchange.held:
                open_ones = [request for request in add.requests if request.request_id in self._answers]
                if open_ones and self._state == "ok":
                    self._send(Add(open_ones))
                else:
                    lost = EngineDown("The engine was lost while its weights were exchanged. Send the request again.")
                    self._end([self._answers[request.request_id] for request in open_ones], lost, "error")

    def _submit(self, add: Add) -> None:
        """Send requests whose answers are open already; during an exchange of weights they wait for its end."""
        self._adds.update((request.request_id, add) for request in add.requests)
        if self._exchange is None:
            self._send(add)
        elif len(self._exchange.held_ids) + len(add.requests) <= self.max_answers:
            self._exchange.held.append(add)
        else:
            text = f"The weights are being exchanged, and {len(self._exchange.held_ids)} requests wait for it."
            self.receive(Rejected([request.request_id for request in add.requests], text, 2.0))

    def _check_up(self) -> None:
        """Raises EngineDown where nobody could take a request, nor will in a moment."""
        if self._exchange is None and (self._connection is None or self.ready is None):
            raise EngineDown(f"The engine is {self._state}. Try again in a few seconds.")

    def generate(self, generations: Sequence[Generation]) -> list[Answer]:
        """Send requests, all or none of which are admitted. A refusal reaches each answer as its error.

        Raises:
            EngineDown: there is no core to send them to.
        """
        self._check_up()
        adapter_ids = [self.adapters.id_of(generation.adapter) for generation in generations]
        for generation in generations:
            if generation.adapter is not None:
                self.metrics.adapters.asked(generation.adapter)
        answers = [Answer(next(self._ids), generation) for generation in generations]
        self._answers.update((answer.request_id, answer) for answer in answers)
        requests = [
            g.request(answer.request_id, adapter)
            for answer, g, adapter in zip(answers, generations, adapter_ids, strict=True)
        ]
        self._submit(Add(requests))
        return answers

    def pool(self, prompt_token_ids: list[int], turn: Turn = Turn()) -> PooledText:
        """Send a text of which a vector is to be made. A refusal reaches it as its error.

        Raises:
            EngineDown: there is no core to send it to.
        """
        self._check_up()
        text = PooledText(next(self._ids), len(prompt_token_ids))
        self._answers[text.request_id] = text
        self._submit(Add([turn.request(text.request_id, prompt_token_ids)]))
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
        self._adds.pop(answer.request_id, None)
        self._answer_closed.set()
        self.metrics.on_finish(answer.end_reason or "error", answer.seconds_per_token)

    async def health(self, timeout_seconds: float = 5.0) -> Health:
        """Ask the loop itself. A step that takes longer than the time-out reads as stalled."""
        if self._state != "ok":
            return Health(self._state, detail=self._detail)
        return await self._pulse.health(timeout_seconds)

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
            case Pong():
                self._pulse.receive(message)
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
                if self._exchange is not None:
                    self._exchange.on_ready(message)
            case Recalled(request_ids):
                if self._exchange is not None:
                    self._exchange.on_recalled(request_ids)
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
