"""A process for work that may never end: it answers one question after the other, and the kernel ends it.

`python -m MODULE FD PARENT_PID CPU_SECONDS` is started with the first question, and again after it was killed. It has
two sides: `BoundedProcess` asks, on the event loop; `answer_all` is what MODULE calls. Questions and answers are frames
(`messages.py`); the first frame is a greeting, what the process needs for all the others, and it is answered, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable

import msgspec

from engine.lifeline import die_with_parent
from engine.messages import FrameReader, encode_frame

MEMORY_BYTES = 1 << 30
_RECEIVE_BYTES = 1 << 18
_END_SECONDS = 5.0  # a process that has closed its connection ends within


class OutOfTime(Exception):
    """The question took more processor time than one may; the process was killed."""


class Ended(Exception):
    """The process ended in mid-sentence, with exit code `code`; `greeted`: after it had answered its greeting."""

    def __init__(self, code: int | None, *, greeted: bool = True) -> None:
        super().__init__(f"exit code {code}")
        self.code = code
        self.greeted = greeted


class BoundedProcess:
    """One process; questions wait for each other."""

    def __init__(
        self,
        module: str,
        cpu_seconds: int,
        greeting: Callable[[], Awaitable[msgspec.Struct]],
        check: Callable[[bytes], None],
    ) -> None:
        """`cpu_seconds`: what one question may take, rounded up to the next second of the process. `greeting` is asked
        for at each start; `check` raises what callers get where the answer to it is a bad one."""
        self.cpu_seconds = cpu_seconds
        self._module = module
        self._greeting = greeting
        self._check = check
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._killed: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Have the process up and greeted. Raises Ended where it ends with that, and what `check` raises."""
        async with self._lock:
            await self._connected()

    async def ask(self, question: msgspec.Struct) -> bytes:
        """The answer to a question.

        Raises:
            OutOfTime: it takes too long.
            Ended: the process ended with it, or with its greeting; or what `check` raises.
        """
        frame = encode_frame(question)
        async with self._lock:
            answer = await self._exchange(await self._connected(), frame)
            if answer is None:
                if await self._ended() == -signal.SIGXCPU:
                    raise OutOfTime
                # Somebody else ended it, perhaps long ago: that says nothing about this question.
                answer = await self._exchange(await self._connected(), frame)
            if answer is None:
                raise Ended(await self._ended())
            return answer

    async def stop(self) -> None:
        """End the process."""
        self._drop()
        await self._reap()

    def _drop(self) -> None:
        """Kill the process if it still runs; the next question starts another."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._killed.append(self._process)
        self._process = self._socket = None

    async def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        await self._reap()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(theirs.fileno()),
                str(os.getpid()),
                str(self.cpu_seconds),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        ours.setblocking(False)
        self._socket = ours
        answer = await self._exchange(ours, encode_frame(await self._greeting()))
        if answer is None:
            raise Ended(await self._ended(), greeted=False)
        try:
            self._check(answer)
        except Exception:
            self._drop()
            raise
        return ours

    async def _exchange(self, connection: socket.socket, frame: bytes) -> bytes | None:
        """The answer, or None if the process ends instead."""
        loop = asyncio.get_running_loop()
        frames = FrameReader()
        try:
            await loop.sock_sendall(connection, frame)
            while data := await loop.sock_recv(connection, _RECEIVE_BYTES):
                for payload in frames.feed(data):
                    return payload
        except (BrokenPipeError, ConnectionResetError):
            pass
        except asyncio.CancelledError:
            self._drop()  # its answer would be taken for the next one's
            raise
        return None

    async def _ended(self) -> int | None:
        """Wait for the end of a process that has closed its connection; returns its exit code."""
        process, connection = self._process, self._socket
        self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        self._killed.append(process)
        # Not killed first: a signal to a process that has just ended would take its exit code away from who waits here.
        try:
            return await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            return await process.wait()

    async def _reap(self) -> None:
        while self._killed:
            await self._killed[-1].wait()
            self._killed.pop()


def answer_all(arguments: list[str], answer: Callable[[bytes], msgspec.Struct]) -> int:
    """The other side: answer every frame until the connection closes, within bounds of time and memory.

    `arguments` are those of the command line. Work that takes more processor time than it may ends the process; where
    it takes more than `MEMORY_BYTES`, `answer` gets a MemoryError.
    """
    descriptor, parent_pid, cpu_seconds = arguments
    die_with_parent(int(parent_pid))
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group; the HTTP process decides
        signal.signal(number, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(ValueError, OSError):  # not every system has this one
        _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    connection = socket.socket(fileno=int(descriptor))
    frames = FrameReader()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the HTTP process went away
        while data := connection.recv(_RECEIVE_BYTES):
            for payload in frames.feed(data):
                _allow_cpu_seconds(int(cpu_seconds))
                connection.sendall(encode_frame(answer(payload)))
    return 0


def _allow_cpu_seconds(seconds: int) -> None:
    """From now on; the signal of the limit ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
