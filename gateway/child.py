"""One child process of the supervisor: start it, keep its log, ask whether it is ready, stop it.

A child leads its own session, so that Ctrl-C reaches only the supervisor, which drains in order; and so that
whatever the child started is ended together with it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.lifeline import Lifeline, command

# Answers whether a process takes requests now; never raises.
Probe = Callable[[], Awaitable[bool]]

_LOG_BYTES = 16 * 1024 * 1024
# A line of a JSON log begins with its time as well.
_HAS_TIME = re.compile(r'(\{"time": ?")?\d{4}-\d\d-\d\d[T ]\d\d:')
_LOG_FILES = 3
_LINE_BYTES = 64 * 1024
_PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. Stages start in order, each when the one before is ready, and stop in the reverse order.

    When an essential process ends before it was ever ready, the whole start has failed; one that is not essential is
    tried again while the others serve. `stop_timeout_s` is how long it may take after SIGTERM before it is killed.
    `notable` picks from the lines of its log what a person at the terminal should know, as a sentence.
    """

    name: str
    argv: tuple[str, ...]
    ready: Probe
    stage: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    essential: bool = True
    stop_timeout_s: float = 10.0
    address: str = ""
    notable: Callable[[str], str | None] | None = None


def http_probe(host: str, port: int, path: str) -> Probe:
    """Ready when `GET path` answers 200."""

    async def probe() -> bool:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return await _answers_200(*await asyncio.open_connection(host, port), path, host)
        except (OSError, TimeoutError):
            return False

    return probe


def http_socket_probe(path: Path, url_path: str) -> Probe:
    """Ready when `GET url_path` over a Unix socket answers 200."""

    async def probe() -> bool:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return await _answers_200(*await asyncio.open_unix_connection(str(path)), url_path, "worker")
        except (OSError, TimeoutError):
            return False

    return probe


async def _answers_200(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, host: str) -> bool:
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        return (await reader.readline()).split()[1:2] == [b"200"]
    finally:
        writer.close()


def socket_probe(path: Path) -> Probe:
    """Ready when a Unix socket takes connections."""

    async def probe() -> bool:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_unix_connection(str(path))
                writer.close()
                return True
        except (OSError, TimeoutError):
            return False

    return probe


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


class LogFile:
    """A child's log: lines that bring no time get one (UTC); old parts are kept as `NAME.log.1` and up.

    A new part has the permissions of the one before, so that a reader who was let in stays so.
    """

    def __init__(self, path: Path, max_bytes: int = _LOG_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.tail: collections.deque[str] = collections.deque(maxlen=20)
        self._max_bytes = max_bytes
        self._file = path.open("ab", buffering=0)
        self._size_bytes = path.stat().st_size

    def write(self, line: str) -> None:
        self.tail.append(line)
        data = f"{line if _HAS_TIME.match(line) else f'{_now()} {line}'}\n".encode(errors="replace")
        if self._size_bytes + len(data) > self._max_bytes:
            self._rotate()
        # A full disk costs log lines, never the processes; `tierline doctor` tells about the disk.
        with contextlib.suppress(OSError):
            self._size_bytes += self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        with contextlib.suppress(OSError):
            for number in range(_LOG_FILES - 1, 0, -1):
                older = self.path.with_name(f"{self.path.name}.{number}")
                if older.exists():
                    older.replace(self.path.with_name(f"{self.path.name}.{number + 1}"))
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            mode = stat.S_IMODE(os.fstat(self._file.fileno()).st_mode)
            self._file.close()
            self._file = self.path.open("ab", buffering=0)
            os.fchmod(self._file.fileno(), mode)
            self._size_bytes = 0


class Child:
    """A process that may be started many times, one at a time."""

    def __init__(self, spec: ProcessSpec, log: LogFile, lifeline: Lifeline) -> None:
        self.spec = spec
        self.log = log
        self.on_line: Callable[[str], None] | None = None
        self._lifeline = lifeline
        self._process: asyncio.subprocess.Process | None = None
        self._reader: _LineReader | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError: the program cannot be run.
        """
        read_fd, write_fd = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command(self.spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.env, **self._lifeline.environment()},
                pass_fds=(self._lifeline.fd,),
                start_new_session=True,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._reader = _LineReader(read_fd, self._take_line)

    async def wait(self) -> int:
        """Wait until the process has ended; what it left running in its session is killed. Returns its exit code."""
        assert self._process is not None
        code = await self._process.wait()
        self._signal(signal.SIGKILL)
        if self._reader:
            self._reader.finish()
        return code

    async def is_ready(self) -> bool:
        return self.pid is not None and await self.spec.ready()

    def terminate(self) -> None:
        """Ask it to finish. It decides how; the supervisor waits `stop_timeout_s`."""
        if self._process and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and everything that it started, now."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process:
            # The group id is the leader's process id; no group of that id is left once all its members are gone.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _take_line(self, line: str) -> None:
        self.log.write(line)
        if self.on_line:
            self.on_line(line)


class _LineReader:
    """Reads a child's output without ever blocking the supervisor; a line without end is cut at 64 KiB."""

    def __init__(self, fd: int, take: Callable[[str], None]) -> None:
        self._fd = fd
        self._take = take
        self._rest = b""
        self._open = True
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def finish(self) -> None:
        """Take what is still in the pipe and close it."""
        while self._open and self._read():
            pass
        self._close()

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, _LINE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._take(line.decode(errors="replace").rstrip("\r"))
        return True

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
            self._rest = b""
