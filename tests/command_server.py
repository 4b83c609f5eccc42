"""Runs commands of `tierline` as a shell does, without the second of imports that each start costs.

    python -m tests.command_server DESCRIPTOR

A process that has imported the command line forks for every request, and the child becomes the command: its own folder,
arguments, streams and exit. `tests.command_line` asks; a request is a JSON object with the three streams beside it, the
answer the exit code. What a start itself does is left to the tests that start `python -m gateway.cli`.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import traceback

import gateway.cli

# What commands import when they run.
LATER = (
    "aiosqlite",
    "gateway.ledger.database",
    "gateway.ledger.reports",
    "gateway.simulating.run",
    "markdown_it",
    "policies.check",
    "policies.examples",
    "policies.simulation.thresholds",
    "sqlalchemy.dialects.sqlite.aiosqlite",
)


def serve(requests: socket.socket) -> None:
    """Answer one request after another until the other side closes; returns in each child, too, to run the command."""
    while True:
        message, streams, _, _ = socket.recv_fds(requests, 1 << 18, 3)
        if not message:
            sys.exit(0)
        child = os.fork()
        if child == 0:
            break
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())
    requests.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    request = json.loads(message)
    signal.alarm(request["timeout_s"])
    os.chdir(request["folder"])
    sys.argv = ["tierline", *request["arguments"]]


def become_the_command() -> None:
    """Run it and end as the interpreter would, but leave what was imported lying: to take it apart costs the most."""
    code: object = None
    try:
        gateway.cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    for module in pkgutil.iter_modules(gateway.cli.__path__, "gateway.cli."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    for name in LATER:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
    become_the_command()
