"""`tierline up`: starts the processes in order, restarts what falls, drains and stops everything.

It promises that a stage starts when the one before is ready, that a process that falls is started again with growing
pauses, that a stop asks the gateway first and waits for its running answers, and that nothing is left behind; all of it
also while the disk is full and nobody reads what is reported. What runs is decided in `processes.py`; one process is
`child.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gateway.child import Child, LogFile, ProcessSpec
from gateway.lifeline import Lifeline

Kind = Literal[
    "starting", "waiting", "ready", "up", "exited", "restarting", "stopping", "killed", "stopped", "failed", "said"
]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `process` is empty for the whole; `detail` holds numbers and text for people."""

    kind: Kind
    process: str = ""
    detail: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Pauses and time-outs, in seconds. `backoff_*`: pause before a restart, doubled each time up to the cap, and back
    to the start after `stable_s` of running."""

    poll_s: float = 0.1
    ready_timeout_s: float = 900.0
    waiting_notice_s: float = 10.0
    backoff_start_s: float = 0.5
    backoff_cap_s: float = 30.0
    stable_s: float = 60.0


CANNOT_RUN = 126  # as a shell says it


class StartFailed(Exception):
    """A process that the others need could not be started; the message holds the end of its log."""


class Supervisor:
    """Runs a set of processes until `request_stop`. One instance, one `run`."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        log_dir: Path,
        report: Callable[[Event], None],
        state_file: Path | None = None,
        timing: Timing = Timing(),
    ) -> None:
        self._specs = specs
        self._log_dir = log_dir
        self._report_to = report
        self._state_file = state_file
        self._timing = timing
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._keepers: dict[str, _Keeper] = {}

    def request_stop(self) -> None:
        """Stop in order. Asked a second time, end everything at once."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def run(self) -> None:
        """Start, watch until a stop is requested, stop.

        Raises:
            StartFailed: an essential process ended, or was not ready in time, before it had ever been ready.
        """
        lifeline = Lifeline()
        stop = asyncio.create_task(self._stop.wait())
        start = asyncio.create_task(self._start_stages(lifeline))
        try:
            await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
                await stop
        except StartFailed as error:
            self._report(Event("failed", detail={"message": str(error)}))
            raise
        finally:
            for task in (start, stop):
                task.cancel()
            await asyncio.gather(start, stop, return_exceptions=True)
            await self._stop_stages()
            lifeline.close()
            self._report(Event("stopped"))

    async def _start_stages(self, lifeline: Lifeline) -> None:
        began = time.monotonic()
        for stage in self._stages():
            for spec in stage:
                child = Child(spec, LogFile(self._log_dir / f"{spec.name}.log"), lifeline)
                if spec.notable is not None:
                    child.on_line = functools.partial(self._listen, spec.name, spec.notable)
                self._keepers[spec.name] = _Keeper(child, self._report, self._timing)
            await asyncio.gather(*(self._keepers[spec.name].first_start() for spec in stage))
        self._report(Event("up", detail={"seconds": round(time.monotonic() - began, 1)}))

    async def _stop_stages(self) -> None:
        killer = asyncio.create_task(self._kill_when_asked())
        try:
            for stage in reversed(list(self._stages())):
                running = [self._keepers[spec.name] for spec in stage if spec.name in self._keepers]
                await asyncio.gather(*(keeper.stop() for keeper in running))
        finally:
            killer.cancel()
            for keeper in self._keepers.values():
                keeper.child.kill()
                keeper.child.log.close()

    async def _kill_when_asked(self) -> None:
        await self._kill.wait()
        for keeper in self._keepers.values():
            keeper.child.kill()

    def _stages(self) -> Iterator[list[ProcessSpec]]:
        for stage in sorted({spec.stage for spec in self._specs}):
            yield [spec for spec in self._specs if spec.stage == stage]

    def _listen(self, name: str, notable: Callable[[str], str | None], line: str) -> None:
        said = notable(line)
        if said is not None:  # no state of a process, so nothing for the state file
            with contextlib.suppress(OSError):
                self._report_to(Event("said", name, {"said": said}))

    def _report(self, event: Event) -> None:
        """Say what happened. Never fails: a full disk or a closed pipe costs a line, not a process."""
        if self._state_file:
            with contextlib.suppress(OSError):
                self._write_state(self._state_file, event)
        with contextlib.suppress(OSError):
            self._report_to(event)

    def _write_state(self, path: Path, event: Event) -> None:
        state = {name: keeper.state() for name, keeper in self._keepers.items()}
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps({"pid": os.getpid(), "state": event.kind, "processes": state}, indent=2) + "\n")
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, new)  # whoever was let in to read it stays so
        new.replace(path)


class _Keeper:
    """Keeps one process running."""

    def __init__(self, child: Child, report: Callable[[Event], None], timing: Timing) -> None:
        self.child = child
        self._report = report
        self._timing = timing
        self._name = child.spec.name
        self._status = "stopped"
        self._restarts = 0
        self._stopping = False
        self._settled = asyncio.Event()
        self._failure: StartFailed | None = None
        self._task: asyncio.Task[None] | None = None

    def state(self) -> dict[str, Any]:
        return {"status": self._status, "pid": self.child.pid, "restarts": self._restarts}

    async def first_start(self) -> None:
        """Start and return when the process is ready, or will be tried again while the others serve.

        Raises:
            StartFailed: as `Supervisor.run`.
        """
        self._task = asyncio.create_task(self._keep())
        await self._settled.wait()
        if self._failure:
            raise self._failure

    async def stop(self) -> None:
        """Ask the process to finish, wait, and kill it when it takes too long."""
        self._stopping = True
        if self.child.pid is not None:
            self._set("stopping", {"seconds": self.child.spec.stop_timeout_s})
            self.child.terminate()
        elif self._task:
            self._task.cancel()
        if self._task:
            done, _ = await asyncio.wait({self._task}, timeout=self.child.spec.stop_timeout_s)
            if not done:
                self._set("killed", {"seconds": self.child.spec.stop_timeout_s})
                self.child.kill()
                await asyncio.wait({self._task})
        self._status = "stopped"

    async def _keep(self) -> None:
        failures = 0
        while not self._stopping:
            self._set("starting", {"address": self.child.spec.address})
            began = time.monotonic()
            ready = False
            code = CANNOT_RUN
            try:
                await self.child.start()
            except OSError as error:
                if not self._settled.is_set():
                    self._give_up(f"{self._name} cannot be run: {error}")
                    return
                self.child.log.write(f"cannot be run: {error}")  # no memory, say, or no descriptors: for now
            else:
                exited = asyncio.create_task(self.child.wait())
                ready = await self._until_ready(exited, began)
                ready_at = time.monotonic()
                code = await exited
            if self._stopping or self._failure:
                return
            self._status = "exited"
            tail = list(self.child.log.tail)
            if not self._settled.is_set() and self.child.spec.essential:
                last = "\n".join(f"  {line}" for line in tail)
                self._give_up(f"{self._name} ended with {_exit(code)} before it was ready. The end of its log:\n{last}")
                return
            self._report(Event("exited", self._name, {"code": code, "log": str(self.child.log.path), "tail": tail}))
            self._settled.set()
            stable = ready and time.monotonic() - ready_at >= self._timing.stable_s
            failures = 1 if stable else failures + 1
            pause_s = min(self._timing.backoff_cap_s, self._timing.backoff_start_s * 2 ** (failures - 1))
            self._set("restarting", {"seconds": pause_s})
            await asyncio.sleep(pause_s)
            self._restarts += 1

    async def _until_ready(self, exited: asyncio.Task[int], began: float) -> bool:
        notice = began + self._timing.waiting_notice_s
        while not exited.done():
            if await self.child.is_ready():
                seconds = round(time.monotonic() - began, 1)
                detail = {"seconds": seconds, "address": self.child.spec.address, "pid": self.child.pid}
                self._set("ready", detail)
                self._settled.set()
                return True
            now = time.monotonic()
            if now >= notice:
                notice = now + self._timing.waiting_notice_s
                said = self.child.log.tail[-1] if self.child.log.tail else ""
                self._report(Event("waiting", self._name, {"seconds": round(now - began), "said": said}))
            if now - began > self._timing.ready_timeout_s:
                if not self._settled.is_set() and self.child.spec.essential:
                    self._give_up(f"{self._name} was not ready after {self._timing.ready_timeout_s:.0f} s.")
                self.child.kill()
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(exited), self._timing.poll_s)
        return False

    def _give_up(self, message: str) -> None:
        self._failure = StartFailed(message)
        self._settled.set()

    def _set(self, kind: Kind, detail: dict[str, Any]) -> None:
        self._status = kind
        self._report(Event(kind, self._name, detail))


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
