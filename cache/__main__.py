"""`python -m cache`: run the cache process until SIGTERM, SIGINT, or the death of its parent."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

from cache.embedding.embedder import BACKENDS, EmbedderError
from cache.service import Config, Service

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after a requested stop, 1 when it cannot start, 2 for wrong arguments."""
    config = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s cache: %(message)s", stream=sys.stderr)
    parent = os.getppid()
    _die_with_parent()
    try:
        asyncio.run(_serve(config, parent))
    except (EmbedderError, OSError, ValueError) as error:
        print(f"cache: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: Config, parent: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watch = asyncio.create_task(_watch_parent(parent, stop))
    try:
        await Service(config).run(stop)
    finally:
        watch.cancel()


def _die_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent ends; elsewhere, and if that fails, `_watch_parent` sees it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _watch_parent(parent: int, stop: asyncio.Event) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110 - the kernel offers no event for a new parent
        await asyncio.sleep(_PARENT_CHECK_S)
    stop.set()


def _parse(arguments: list[str] | None) -> Config:
    parser = argparse.ArgumentParser(prog="python -m cache", description="The exact and semantic answer cache.")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2", help="sentence-transformers model: name or folder")
    parser.add_argument("--embedder-backend", choices=BACKENDS, default="auto", help="what computes the vectors")
    parser.add_argument("--embedders-dir", type=Path, help="of ONNX files; default: the user's cache folder")
    parser.add_argument("--max-entries", type=_positive, default=100_000)
    parser.add_argument("--max-bytes", type=_positive, default=512 * 1024 * 1024)
    parser.add_argument("--max-disk-bytes", type=_positive, default=4 * 1024**3)
    parser.add_argument("--encryption-key-env", metavar="NAME", help="environment variable with the keys of the file")
    parser.add_argument("--max-batch-size", type=_positive, default=8, help="texts embedded at once")
    parser.add_argument("--max-wait-ms", type=_not_negative, default=0.0, help="how long a batch waits for company")
    parser.add_argument("--load-wait-ms", type=_not_negative, default=50.0, help="of a look-up, for unread questions")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of the embedder")
    parser.add_argument("--data-dir", type=Path, help="keep entries here over restarts; default: in memory only")
    parser.add_argument("--embeddings-host", default="127.0.0.1")
    parser.add_argument("--embeddings-port", type=_positive, help="serve /v1/embeddings over HTTP; default: do not")
    # From the environment where it may hold a password: command lines can be read by others.
    parser.add_argument("--redis-url", default=os.environ.get("TIERLINE_CACHE_REDIS_URL"), help="share answers there")
    parser.add_argument("--redis-max-bytes", type=_positive, default=256 * 1024 * 1024, help="of all answers in Redis")
    found = parser.parse_args(arguments)
    return Config(**vars(found))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Everything is closed by now, but the model may still be loading on its thread: do not wait for it.
    os._exit(status)
