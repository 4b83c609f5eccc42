"""`run`: a command of `tierline` in a process of its own, as a shell would run it, in milliseconds."""

from __future__ import annotations

import atexit
import functools
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}


def run(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What `tierline ARGUMENTS` says in `folder`, 200 columns wide, without colours; killed after 60 s."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
        given.write(stdin.encode())
        given.seek(0)
        request = json.dumps({"folder": str(folder), "arguments": arguments, "timeout_s": 60}).encode()
        streams = (given, output, complaints)
        server = _server()
        socket.send_fds(server, [request], [stream.fileno() for stream in streams])
        code = int(server.recv(16))
        said = []
        for stream in (output, complaints):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(["tierline", *arguments], code, *said)


@functools.cache
def _server() -> socket.socket:
    """The way to this test process's own `tests.command_server`, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.command_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd=ROOT,
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
