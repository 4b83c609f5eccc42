"""Processes for the supervisor to start that note what happens to them, and the events that it reports of them."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from gateway.child import ProcessSpec, socket_probe
from gateway.supervisor import Event, Supervisor, Timing

QUICK = Timing(poll_s=0.01, ready_timeout_s=30, backoff_start_s=0.02, backoff_cap_s=0.1, stable_s=30)

# A process that listens on a Unix socket, appends what happens to a journal, and ends as it is told.
CHILD = textwrap.dedent(
    """
    import os, pathlib, signal, socket, subprocess, sys, time
    name, folder, behaviour = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    def note(what):
        with (folder / "journal").open("a") as file:
            file.write(f"{name} {what} {os.getpid()}\\n")
    def term(number, frame):
        note("term")
        if behaviour == "stubborn":
            return
        if behaviour == "drains":
            while not (folder / "drained").exists():
                time.sleep(0.005)
        note("end")
        sys.exit(0)
    signal.signal(signal.SIGTERM, term)
    signal.signal(signal.SIGINT, lambda *_: note("interrupted"))
    note("start")
    if behaviour == "never_ready":
        print("no weights found")
        sys.exit(3)
    if behaviour == "with_grandchild":
        code = "from gateway import lifeline; import time; assert lifeline.watch(); time.sleep(600)"
        helper = subprocess.Popen([sys.executable, "-c", code], close_fds=False)
        with (folder / "journal").open("a") as file:
            file.write(f"grandchild start {helper.pid}\\n")
    (folder / name).unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / name))
    server.listen()
    print("listening", flush=True)
    if behaviour == "falls":
        server.accept()
        print("falling", end="")
        sys.exit(1)
    while True:
        time.sleep(600)
    """
)


class Stage:
    """A folder with a journal, the specs over it, and the events that the supervisor reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self._waiters: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []
        (folder / "child.py").write_text(CHILD)

    def spec(self, name: str, behaviour: str = "serves", **options: object) -> ProcessSpec:
        argv = (sys.executable, str(self.folder / "child.py"), name, str(self.folder), behaviour)
        return ProcessSpec(name, argv, socket_probe(self.folder / name), **options)  # type: ignore[arg-type]

    def supervisor(self, *specs: ProcessSpec, timing: Timing = QUICK) -> Supervisor:
        return Supervisor(
            specs,
            log_dir=self.folder / "log",
            report=self._report,
            state_file=self.folder / "state.json",
            timing=timing,
        )

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return [line.rsplit(" ", 1)[0] for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self) -> set[int]:
        return {int(line.rsplit(" ", 1)[1]) for line in (self.folder / "journal").read_text().splitlines()}

    def seen(self, kind: str) -> list[str]:
        return [event.process for event in self.events if event.kind == kind]

    async def event(self, wanted: Callable[[Event], bool]) -> Event:
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiters.append((wanted, future))
        return await asyncio.wait_for(future, 30)

    async def up(self) -> Event:
        return await self.event(lambda event: event.kind == "up")

    def _report(self, event: Event) -> None:
        self.events.append(event)
        for wanted, future in self._waiters:
            if not future.done() and wanted(event):
                future.set_result(event)


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other processes do, which sends no event here."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def run_until_up(stage: Stage, supervisor: Supervisor) -> asyncio.Task[None]:
    up = asyncio.create_task(stage.up())
    await asyncio.sleep(0)
    task = asyncio.create_task(supervisor.run())
    done, _ = await asyncio.wait({up, task}, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        up.cancel()
        task.result()
    return task
