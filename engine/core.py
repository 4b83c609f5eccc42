"""The engine's loop, in a process of its own: drain the input, schedule, run, update, emit.

It promises: an abort takes effect before the next step; a fault of one step ends the requests of that step and not the
process, unless it repeats; a health echo passes through the loop itself, so an answer means the loop turns; when the
HTTP process goes, the core goes. `python -m engine.core FD PARENT_PID CONFIG_JSON` is started by `client.py`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine.adapters.store import AdapterStore, no_adapters
from engine.admission import Admission
from engine.assembly import build_scheduler, build_tiers
from engine.config import EngineConfig
from engine.grammar.compiling import Compiler, Grammars, Vocabulary
from engine.kernels.jit_monitor import monitor as jit_monitor
from engine.kv.block_pool import PoolCorrupt
from engine.lifeline import die_with_parent
from engine.limits import MicroBatching
from engine.loader.errors import ModelFileError
from engine.memory import EngineMemoryError
from engine.messages import (
    Abort,
    Add,
    Fatal,
    FrameReader,
    FromCore,
    LoadAdapter,
    Pages,
    Ping,
    Pong,
    Ready,
    Recall,
    Recalled,
    Rejected,
    Stats,
    Step,
    ToCore,
    UnloadAdapter,
    encode_frame,
    to_core_decoder,
)
from engine.models.pooling import choose_task
from engine.parallel.errors import LayoutError
from engine.parallel.settings import check_settings
from engine.scheduling.scheduler import Scheduler
from engine.snapshot import snapshot
from engine.spec.loading import load_speculator, open_draft
from engine.stepper import Done, Stepper
from engine.trace import trace
from engine.transfer.tiers import Tiers
from engine.types import Runner

log = logging.getLogger("engine.core")

# A fault that hits this many steps in a row is not one request's fault.
MAX_CONSECUTIVE_FAILURES = 3
_RECEIVE_BYTES = 1 << 18


class EngineCore:
    """Runs one model for one HTTP process, single-threaded, until the connection closes."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        connection: socket.socket,
        grammars: Grammars,
        batching: MicroBatching = MicroBatching(),
        adapters: AdapterStore[Any] | None = None,
        tiers: Tiers | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        """`batching`: of texts to be pooled. `adapters`: the runner and the scheduler know those loaded. `tiers`: where
        pages are kept beyond the scheduler's cache. `overlap`: begin each step before the one before it is over; with
        a runner that cannot, tell of a step while the device works on the next."""
        self._stepper = Stepper(runner, scheduler, tiers, ahead=overlap)
        self._tells_later = overlap and not self._stepper.is_ahead
        self._held: list[FromCore] = []  # what is still to be told of the last step
        self._batching = batching
        self._runner = runner
        self._scheduler = scheduler
        self._admission = Admission(scheduler, grammars, tiers)
        self._adapters: AdapterStore[Any] = adapters or no_adapters()
        self._tiers = tiers
        self._connection = connection
        self._frames = FrameReader()
        self._stats_changed = False
        self._failures_in_a_row = 0
        self._held_up = False  # all there is waits for pages from elsewhere
        self._steps = 0
        self._step_failures = 0
        self._last_step_end: float | None = None

    def run(self) -> None:
        """Serve until the HTTP process closes the connection.

        Raises:
            RuntimeError: steps keep failing.
            PoolCorrupt, SchedulerStalled, ValueError: a bug; nothing that this process still says could be trusted.
        """
        while self._drain(self._patience()) and self._gather():
            self._admit()
            self._tell_of_adapters()
            self._expire()
            if self._scheduler.has_work:
                self._step()
            elif self._stats_changed:
                self._send(Step([], self.stats()))
            self._stats_changed = False

    def close(self) -> None:
        """Save what is still to be saved. Not after an error: then nothing is known of the pages."""
        trace.stop()
        if self._tiers is not None:
            self._tiers.close()

    def ready(self, digest: bytes, load_seconds: float) -> Ready:
        """What the HTTP process must know of a loaded model."""
        geometry, cache = self._runner.geometry, self._scheduler.cache
        return Ready(
            pid=os.getpid(),
            max_total_tokens=self._scheduler.max_total_tokens,
            num_blocks=geometry.num_blocks,
            block_size=geometry.block_size,
            bytes_per_token=geometry.bytes_per_token,
            model_digest=digest.hex(),
            load_seconds=load_seconds,
            page_space=cache.space.hex() if cache.enabled else "",
            offered_at="" if self._tiers is None else self._tiers.offered_at,
        )

    def announce(self, ready: Ready) -> None:
        """Tell the other side that requests may come. The first snapshot goes ahead, so its metrics are true then."""
        self._send(Step([], self.stats()))
        self._tell_of_adapters()
        self._send(ready)

    def _tell_of_adapters(self) -> None:
        """Between two steps, adapters come and go."""
        for news in self._adapters.news(self._admission.adapters):
            self._send(news)

    # --- input ---------------------------------------------------------------------------------------------------

    def _gather(self) -> bool:
        """Give texts to be pooled some time to come in company; False when the other side has closed.

        None of them runs yet, so whoever waits does so for `max_wait_ms` at most, and for nothing else.
        """
        scheduler, batching = self._scheduler, self._batching
        if scheduler.pooling is None or scheduler.num_running:
            return True
        end = time.monotonic() + batching.max_wait_ms / 1000
        while 0 < scheduler.num_waiting < batching.max_batch_size and (left := end - time.monotonic()) > 0:
            if not self._drain(left):
                return False
        return True

    def _patience(self) -> float | None:
        """For how many seconds there is nothing to do unless something arrives; None: for ever."""
        if self._scheduler.has_work and not self._held_up:
            return 0.0
        return None if self._tiers is None else self._tiers.seconds_left()

    def _drain(self, seconds: float | None) -> bool:
        """Handle everything that has arrived; False when the other side has closed.

        `seconds`: how long to wait for it where there is nothing yet; None: as long as it takes.
        """
        if seconds != 0:
            sources = (self._connection, self._admission.anteroom, self._adapters, self._tiers)
            select.select([source.fileno() for source in sources if source is not None], [], [], seconds)
        while True:
            try:
                data = self._connection.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            for payload in self._frames.feed(data):
                self._handle(to_core_decoder.decode(payload))
            # What arrives from now on waits for the next turn, so that nobody can hold up the steps by talking.
            if len(data) < _RECEIVE_BYTES:
                return True

    def _handle(self, message: ToCore) -> None:
        match message:
            case Add(requests):
                self._stats_changed = True
                for refusal in self._admission.enter(requests):
                    self._send(refusal)
            case Abort(request_ids, stopped):
                self._stats_changed = True
                self._admission.leave(request_ids, stopped=stopped)
            case Recall(parties):
                self._stats_changed = True
                recalled = [i for party in parties if self._admission.give_back(party) for i in party]
                self._send(Recalled(recalled))
            case LoadAdapter(entry):
                self._adapters.ask(entry)
            case UnloadAdapter(adapter_id):
                self._adapters.leave(adapter_id)
            case Ping(number):
                age = None if self._last_step_end is None else time.monotonic() - self._last_step_end
                self._send(Pong(number, age))

    def _admit(self) -> None:
        """Let on who has what it waited for."""
        waiting = len(self._admission)
        for news in self._admission.advance():
            self._send(news if isinstance(news, Rejected) else Step(news, self.stats()))
        self._stats_changed |= len(self._admission) != waiting

    def _expire(self) -> None:
        """Tell those who are too late before the next step, so that they take none of it."""
        if late := self._scheduler.expire(time.monotonic()):
            self._send(Step(late, self.stats()))

    # --- one step ------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        finished = self._stepper.step(self._tell)
        self._held_up = not finished and not self._stepper.is_flying
        if self._held_up:
            self._tell()
        else:
            self._last_step_end = time.monotonic()
        for done in finished:
            self._take(done)

    def _take(self, done: Done) -> None:
        """Count a step that is over, and tell of it."""
        self._steps += 1
        self._step_failures += done.has_failed
        self._failures_in_a_row = self._failures_in_a_row + 1 if done.has_failed else 0
        self._admission.finished(time.monotonic(), sum(output.finish_reason is not None for output in done.outputs))
        self._check_idle()
        if (news := self._scheduler.cache.news()) is not None:  # first: who has an answer finds its pages told
            self._held.append(Pages(*news))
        self._held.append(Step(done.outputs, self.stats(), done.seconds))
        # NOTE: while requests run, the next step comes at once: it is held until that step's kernels have started.
        if not (self._tells_later and self._scheduler.num_running) or self._failures_in_a_row:
            self._tell()
        if self._failures_in_a_row >= MAX_CONSECUTIVE_FAILURES:
            raise RuntimeError(f"{self._failures_in_a_row} steps in a row failed")

    def _check_idle(self) -> None:
        """Without work, no page may be held: the cheap form of the law, in production too."""
        pool = self._scheduler.cache.pool
        if not self._scheduler.has_work and (pool.num_used or pool.num_free + pool.num_cached != pool.total):
            raise PoolCorrupt(
                f"idle, but pages free {pool.num_free} + cached {pool.num_cached} + used {pool.num_used}, "
                f"total {pool.total}"
            )

    def stats(self) -> Stats:
        """A snapshot of pages, queue and counters."""
        stats = snapshot(self._scheduler, self._tiers)
        stats.waiting += len(self._admission)
        stats.steps, stats.step_failures = self._steps, self._step_failures
        stats.late_kernels = jit_monitor.late_compilations
        return stats

    def _send(self, message: FromCore) -> None:
        """After what is held: nothing overtakes it."""
        self._held.append(message)
        self._tell()

    def _tell(self) -> None:
        """Send what is held."""
        held, self._held = self._held, []
        for message in held:
            # Blocking on purpose: the HTTP process always reads and merges, so what is in flight stays bounded.
            self._connection.sendall(encode_frame(message))


# Builds the core of a model; tests put a runner without a model behind it.
Load = Callable[[EngineConfig, socket.socket], tuple[EngineCore, Ready]]


def load_model(config: EngineConfig, connection: socket.socket) -> tuple[EngineCore, Ready]:
    """Load the weights and build the core around them."""
    from engine import kernel_caches, threads

    num_ranks = config.tensor_parallel * config.pipeline_parallel
    num_threads = threads.configure(config.threads, ranks=num_ranks)  # before anything imports torch
    kernel_caches.bound()
    from engine.adapters.opening import open_adapters
    from engine.loader import open_model
    from engine.open_runner import open_runner
    from engine.parallel.leader import LeadingRunner, lead
    from engine.text.tokenizer import Tokenizer, end_ids
    from engine.transfer.page_memory import TensorPages

    if config.trace_path is not None:
        trace.start(Path(config.trace_path))
    start = time.monotonic()
    model = open_model(config.model_path)
    digest = model.digest()
    end_token_ids = end_ids(model.info.tokenizer)
    draft = open_draft(config, model)
    pooling = choose_task(config.task, model.info.pooling)
    check_settings(config, model.spec, adapters=bool(config.adapters))
    peers = lead(config, num_threads, partial(_end, connection))
    runner = open_runner(config, model, threads=num_threads, draft=draft, peers=peers)
    adapters = open_adapters(config, runner)
    speculator = load_speculator(config, runner, draft, threads=num_threads)
    grammars = Grammars(lambda: Compiler(Vocabulary.of(Tokenizer(model.info), model.spec.vocab_size)))
    scheduler = build_scheduler(config, runner, digest, end_token_ids, speculator, pooling, adapters.loaded)
    batching = MicroBatching(config.max_batch_size, config.max_wait_ms)
    pages, on_gpu = TensorPages(runner.attention.kv_cache), runner.attention.config.device.type == "cuda"
    tiers = build_tiers(config, scheduler.cache, pages, digest, on_gpu=on_gpu)
    leading = runner if peers is None else LeadingRunner(runner)
    parts = (scheduler, connection, grammars, batching, adapters, tiers)
    core = EngineCore(leading, *parts, overlap=config.overlap)
    return core, core.ready(digest, time.monotonic() - start)


def _end(connection: socket.socket, reason: str) -> None:
    """End this process at once: its main thread may wait for something that will not come."""
    with contextlib.suppress(OSError):
        connection.sendall(encode_frame(Fatal(reason)))
    os._exit(1)


def main(arguments: list[str], load: Load = load_model) -> int:
    """Load the model, report `Ready` or `Fatal` on the inherited socket, serve until it closes."""
    descriptor, parent_pid, config_json = arguments
    die_with_parent(int(parent_pid))
    # Ctrl-C reaches the whole process group, and so does what `timeout` and systemd send; the HTTP process decides
    # when the core ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection = socket.socket(fileno=int(descriptor))
    connection.setblocking(True)
    try:
        core, ready = load(msgspec.json.decode(config_json, type=EngineConfig), connection)
        # The model lives as long as the process: the garbage collector need not look at it again.
        gc.collect()
        gc.freeze()
        core.announce(ready)
        core.run()
        core.close()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the HTTP process went away in mid-sentence
    except (ModelFileError, EngineMemoryError, LayoutError) as refusal:  # for people: a traceback would add nothing
        connection.sendall(encode_frame(Fatal(str(refusal))))
        return 1
    except Exception as error:
        log.exception("the engine core ends")
        connection.sendall(encode_frame(Fatal(f"{type(error).__name__}: {error}")))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
