"""The metrics of all gateway workers on one page, whichever of them is asked.

A series of a worker carries a `worker` label, so that a restart resets that worker's counters and nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

from gateway.settings import Settings
from gateway.workers import socket_path

WORKER_UP = "tierline_worker_up"
_TIMEOUT_S = 1.0


async def everybodys_metrics(settings: Settings, worker: int, own: str) -> str:
    """The metrics of all workers, each series with its worker's number; `own` are those of this one."""
    others = [number for number in range(1, settings.server.workers + 1) if number != worker]
    pages = await asyncio.gather(*(_page(socket_path(settings, number)) for number in others))
    found = {number: page for number, page in zip(others, pages, strict=True) if page is not None}
    found[worker] = own
    up = f"# HELP {WORKER_UP} 1 while a gateway worker answers.\n# TYPE {WORKER_UP} gauge\n"
    up += "".join(
        f'{WORKER_UP}{{worker="{number}"}} {1 if number in found else 0}\n'
        for number in range(1, settings.server.workers + 1)
    )
    return merged(found) + up


def merged(pages: Mapping[int, str]) -> str:
    """Pages in Prometheus's text format as one: each family once, with all workers' series."""
    families: dict[str, list[str]] = {}
    for number in sorted(pages):
        family: list[str] = []
        for line in pages[number].splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], [])
            if line.startswith("#"):
                if line not in family[:2]:
                    family.append(line)
            elif line:
                family.append(_labelled(line, number))
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _labelled(sample: str, worker: int) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{worker="{worker}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{worker="{worker}"}} {value}'


async def _page(path: Path) -> str | None:
    """The metrics of the worker that listens there; None if it does not answer in time."""
    request = b"GET /metrics?worker=this HTTP/1.1\r\nhost: worker\r\nconnection: close\r\n\r\n"
    with contextlib.suppress(OSError, TimeoutError, UnicodeDecodeError):
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(request)
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
            return body.decode() if head.split()[1:2] == [b"200"] else None
    return None
