"""Ask a replica whether it is up, without asking it for an answer."""

from __future__ import annotations

import time

from backends.endpoint import Endpoint
from backends.http import HttpClient, HttpFailure

PROBE_TIMEOUT_S = 2.0


async def alive(client: HttpClient, endpoint: Endpoint) -> str | None:
    """None if it is up, else what is wrong.

    GET /health; where there is no such page, GET /models, where any answer that is not 5xx will do.
    """
    root = endpoint.origin.path.removesuffix("/v1")
    try:
        status = await _get(client, endpoint, f"{root}/health")
        if status in (401, 403, 404, 405):
            status = await _get(client, endpoint, f"{endpoint.origin.path}/models")
            return None if status < 500 else f"/models answers a probe with status {status}"
        return None if status < 300 else f"/health answers a probe with status {status}"
    except HttpFailure as failure:
        return str(failure)


async def _get(client: HttpClient, endpoint: Endpoint, path: str) -> int:
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    exchange = await client.send(endpoint.origin, endpoint.get(path), connect_s=PROBE_TIMEOUT_S, deadline=deadline)
    try:
        await exchange.read_all(1 << 20)
    finally:
        exchange.close()
    return exchange.status
