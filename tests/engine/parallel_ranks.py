"""Ranks of small models for tests: processes that are started once and take part in one model after the other.

`python -m tests.engine.parallel_ranks FD` is such a process. It gets jobs over the socket FD, each with a socket of its
own, and does what a rank's own process does between its start and its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.lifeline import die_with_parent
from engine.loader import open_model
from engine.open_runner import open_runner
from engine.parallel.follower import Reporter, run
from engine.parallel.layout import Layout, Place
from engine.parallel.peers import Peers
from engine.runner import ModelRunner


class Pool:
    """The other ranks' processes, up to `size` ranks with this process, which is rank 0 of every model."""

    def __init__(self, size: int) -> None:
        self._controls: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for _ in range(size - 1):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())]
                self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            self._controls.append(ours)

    @contextlib.contextmanager
    def runner(self, config: EngineConfig, meeting: Path) -> Iterator[ModelRunner]:
        """The runner of rank 0; `meeting`: a path where nothing is."""
        layout = Layout(config.tensor_parallel, config.pipeline_parallel)
        sockets = []
        for rank, control in zip(range(1, layout.num_ranks), self._controls, strict=False):
            ours, theirs = socket.socketpair()
            with theirs:
                job = json.dumps([rank, str(meeting), msgspec.json.encode(config).decode()])
                socket.send_fds(control, [job.encode()], [theirs.fileno()])
            sockets.append(ours)
        peers = Peers.join(Place(layout, 0), torch.device("cpu"), meeting, sockets)
        try:
            yield open_runner(config, open_model(config.model_path), threads=1, peers=peers)
        finally:
            for one in sockets:
                one.close()
            peers.leave()

    def close(self) -> None:
        for control, process in zip(self._controls, self._processes, strict=True):
            control.close()
            assert process.wait(20) == 0


def main(descriptor: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    control = socket.socket(fileno=descriptor)
    while True:
        job, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not job:
            return
        rank, meeting, text = json.loads(job)
        config = msgspec.json.decode(text, type=EngineConfig)
        layout = Layout(config.tensor_parallel, config.pipeline_parallel)
        with socket.socket(fileno=descriptors[0]) as connection:
            run(Place(layout, rank), config, 1, Path(meeting), Reporter(connection))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()
    main(int(sys.argv[1]), int(sys.argv[2]))
