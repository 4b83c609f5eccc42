"""A rank other than 0: loads its part, then does what rank 0 announces until the connection closes.

`python -m engine.parallel.follower FD PARENT_PID RANK MEETING CONFIG_JSON` is started by `crew.py`. It knows no
requests and samples nothing.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.lifeline import die_with_parent
from engine.messages import encode_frame
from engine.parallel.errors import PeersLost
from engine.parallel.layout import Layout, Place
from engine.parallel.reports import ALIVE_SECONDS, Alive, Failed, Loaded, Report

if TYPE_CHECKING:
    from engine.parallel.calls import Call
    from engine.runner import ModelRunner


def follow(runner: ModelRunner, calls: Iterable[Call]) -> None:
    """Do this rank's share of every call. Raises PeersLost, and RuntimeError, torch's own, when memory runs out."""
    import torch

    from engine.parallel.calls import CopyPages, Forward, Logits, longs

    with torch.inference_mode():
        for call in calls:
            match call:
                case Forward():
                    runner.forward(longs(call.token_ids), call.step(), longs(call.wanted))
                case Logits(rows):
                    runner.answer_logits(rows)
                case CopyPages(copies):
                    runner.copy_pages(copies)


class Reporter:
    """Tells rank 0 how this rank is doing: that it is there, from a thread of its own, until the connection closes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        threading.Thread(target=self._live, name="alive", daemon=True).start()

    def tell(self, report: Report) -> None:
        """Raises OSError where rank 0 is gone."""
        with self._lock:
            self.connection.sendall(encode_frame(report))

    def _live(self) -> None:
        pause = threading.Event()
        with contextlib.suppress(OSError):  # the main thread sees it, too, and knows what to do
            while not pause.wait(ALIVE_SECONDS):
                self.tell(Alive())


def run(place: Place, config: EngineConfig, threads: int, meeting: Path, reporter: Reporter) -> None:
    """Be the rank at `place` from its loading to its end. Raises as `open_runner` and `follow`."""
    from engine.loader import open_model
    from engine.open_runner import open_runner
    from engine.parallel.peers import Peers, calls, choose_device

    model = open_model(config.model_path)
    peers = Peers.join(place, choose_device(config.device, place), meeting)
    runner = open_runner(config, model, threads=threads, peers=peers)
    reporter.tell(Loaded())
    follow(runner, calls(reporter.connection))


def main(arguments: list[str]) -> int:
    """Exit code 0 when rank 0 has no more to do, 1 for a fault, which it is told."""
    descriptor, parent_pid, rank, meeting, config_json = arguments
    die_with_parent(int(parent_pid))
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # either may reach the whole group; rank 0 decides
        signal.signal(signal_number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s %(name)s: rank {rank}: %(message)s")
    reporter = Reporter(socket.socket(fileno=int(descriptor)))
    config = msgspec.json.decode(config_json, type=EngineConfig)
    layout = Layout(config.tensor_parallel, config.pipeline_parallel)
    try:
        from engine import kernel_caches, threads

        num_threads = threads.configure(config.threads)  # before anything imports torch
        kernel_caches.bound()
        run(Place(layout, int(rank)), config, num_threads, Path(meeting), reporter)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # rank 0 went away
    except Exception as error:
        if isinstance(error, PeersLost):  # who lost us knows more
            return 1
        logging.getLogger(__name__).exception("this rank ends")
        reporter.tell(Failed(str(error) or type(error).__name__))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
