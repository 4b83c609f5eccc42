"""What a child process has about it: its log file, the probe that asks it, and the lock on its data."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.child import LogFile, http_probe
from gateway.lock import AlreadyLocked, FileLock


def test_a_full_log_is_put_aside_and_three_old_ones_are_kept(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", max_bytes=200)
    for number in range(40):
        log.write(f"line {number} {'x' * 50}")
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert all(path.stat().st_size <= 200 for path in tmp_path.iterdir())
    assert "line 39" in (tmp_path / "x.log").read_text()
    reopened = LogFile(tmp_path / "x.log", max_bytes=200)
    reopened.write("after a restart")
    reopened.close()
    assert "line 39" in "".join(path.read_text() for path in tmp_path.iterdir()), "a restart overwrites nothing"


async def test_the_http_probe_wants_a_200(free_port: int) -> None:
    status = b"503 Service Unavailable"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    probe = http_probe("127.0.0.1", free_port, "/health")
    assert not await probe()
    async with await asyncio.start_server(answer, "127.0.0.1", free_port):
        assert not await probe()
        status = b"200 OK"
        assert await probe()


def test_the_lock_is_exclusive_says_who_holds_it_and_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "run/up.lock"
    code = f"""
import pathlib, time
from gateway.lifeline import LIFELINE_FD
from gateway.lock import FileLock
with FileLock(pathlib.Path({str(path)!r}), note="the other one"):
    print("locked", flush=True); time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(AlreadyLocked, match="the other one"), FileLock(path):
            pass
        other.kill()
        other.wait()
    with FileLock(path, note="me"):
        assert path.read_text() == "me"
    with contextlib.ExitStack() as stack:
        stack.enter_context(FileLock(path))
