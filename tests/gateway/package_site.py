"""A file server on a local port, as a package index has one, whose faults the tests choose."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gateway.models.download import fetch
from gateway.models.index import PipNetwork

WEIGHTS = b"GGUF" + bytes(range(256)) * 12_000  # 3 MB: several chunks


@dataclass
class Site:
    """A file server with byte ranges whose faults the tests choose. `requests` lists (path, range header)."""

    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    ignore_ranges: bool = False
    url: str = ""

    def downloads(self) -> list[str | None]:
        return [span for path, span in self.requests if path.endswith(".whl")]


@contextmanager
def served() -> Iterator[Site]:
    """A running one."""
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers.get("range")))
            body = state.files.get(self.path)
            if self.path.endswith(".whl") and state.statuses:
                return self._send(state.statuses.pop(0), b"")
            if body is None:
                return self._send(404, b"")
            span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or "")
            if not span or state.ignore_ranges:
                return self._send(200, body)
            start, total = int(span[1]), len(body)
            if start >= total:
                return self._send(416, b"", f"bytes */{total}")
            return self._send(206, body[start:], f"bytes {start}-{total - 1}/{total}")

        def _send(self, status: int, body: bytes, content_range: str | None = None) -> None:
            self.send_response(status)
            self.send_header("content-type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            self.send_header("content-length", str(len(body)))
            if content_range:
                self.send_header("content-range", content_range)
            self.end_headers()
            if self.path.endswith(".whl") and state.cut_after and body:
                body = body[: state.cut_after.pop(0)]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """The requests are in `Site.requests`; standard error stays clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def no_progress(done: int, total: int | None) -> None:
    """A pull without a progress bar."""


def fetch_quickly(url: str, target: Path, sha256: str) -> None:
    fetch(url, target, sha256=sha256, network=PipNetwork(), progress=no_progress, retry_delay_s=0.0)
