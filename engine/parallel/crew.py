"""The processes of the other ranks, as rank 0 has them: started with it, watched, ended with it.

They cannot outlive rank 0: their socket closes with it, and on Linux the kernel kills them. Nor can it outlive one of
them: `lost` is called, once, with the reason, from a thread of its own, because the main thread may wait for that rank.
A rank that neither ends nor works (stopped, or stuck in a driver) is lost when it has been silent for too long.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.messages import FrameReader
from engine.parallel.layout import Layout, Place
from engine.parallel.reports import ALIVE_SECONDS, Alive, Failed, Loaded, Report

log = logging.getLogger(__name__)

# A part that is not loaded by then will not be: a terabyte takes so long at half a gigabyte per second.
START_SECONDS = 1800.0
# A compiler or a driver may keep a process from saying anything for some seconds, but not for so many.
SILENT_SECONDS = 30.0
_END_SECONDS = 5.0  # a process that has closed its connection ends within
_RECEIVE_BYTES = 1 << 16


class Crew:
    """Ranks 1 and up of `layout`. `meeting`: the file by which all ranks find each other, see `Peers.join`."""

    def __init__(
        self,
        config: EngineConfig,
        layout: Layout,
        lost: Callable[[str], None],
        *,
        module: str = "engine.parallel.follower",
        start_seconds: float = START_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Start `python -m module` for each rank. `config.threads` is what one rank is to use.

        `start_seconds`: for loading; `silent_seconds`: without a word of a rank that has spoken once.
        """
        self.layout = layout
        self._folder = Path(tempfile.mkdtemp(prefix="tierline-ranks-"))  # for this user only
        self.meeting = self._folder / "meeting"
        self._lost = lost
        self._deadline = time.monotonic() + start_seconds
        self._start_seconds = start_seconds
        self._most_silent = silent_seconds
        self._ending = False
        self.sockets: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        text = msgspec.json.encode(config).decode()
        for place in layout.places[1:]:
            self._start(module, place, text)
        atexit.register(self.end)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _start(self, module: str, place: Place, config: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(place.rank), str(self.meeting), config]
            # By the main thread: the kernel kills a child when the thread that started it ends.
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self.sockets.append(ours)
        self.processes.append(process)

    def end(self) -> None:
        """Kill all ranks: they have nothing to save. Safe to call again."""
        self._ending = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        """Read what the ranks say until one of them is lost."""
        decoder = msgspec.msgpack.Decoder(Report)
        loading = {place.rank for place in self.layout.places[1:]}
        # NOTE: silence is counted in turns of this thread and not by the clock: where all processes were stopped for a
        # while, as by Ctrl-Z, none of them has been silent.
        silent: dict[int, int] = {}
        turn_seconds = min(ALIVE_SECONDS, self._most_silent, self._start_seconds)
        next_turn = time.monotonic() + turn_seconds
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self.sockets, 1):
                selector.register(connection, selectors.EVENT_READ, (rank, FrameReader()))
            while not self._ending:
                for key, _ in selector.select(max(0.0, next_turn - time.monotonic())):
                    rank, frames = key.data
                    data = self.sockets[rank - 1].recv(_RECEIVE_BYTES)
                    if not data:
                        return self._lose(f"rank {rank} ended {self._how(rank)}")
                    silent[rank] = 0
                    for payload in frames.feed(data):
                        match decoder.decode(payload):
                            case Alive():
                                pass
                            case Loaded():
                                loading.discard(rank)
                            case Failed(text):
                                return self._lose(f"rank {rank}: {text}")
                if (now := time.monotonic()) < next_turn:
                    continue
                next_turn = now + turn_seconds
                if loading and now >= self._deadline:
                    return self._lose(f"{_names(loading)}: not loaded within {self._start_seconds:g} s")
                silent = {rank: turns + 1 for rank, turns in silent.items()}
                if lost := [rank for rank, turns in silent.items() if turns * turn_seconds > self._most_silent]:
                    return self._lose(f"{_names(lost)}: silent for {self._most_silent:g} s, stopped or stuck")
        return None

    def _how(self, rank: int) -> str:
        try:
            code = self.processes[rank - 1].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "its connection"
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def _lose(self, reason: str) -> None:
        if self._ending:
            return
        log.error("%s: a model in parts cannot go on without it", reason)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lost(reason)


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
