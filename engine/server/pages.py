"""`GET /v1/kv_events`: the pages of the prefix cache as server-sent events, everything once and then what changes.

    event: snapshot   {"space", "page_tokens", "sequence", "pages": [[page, page before it], …], "more"}
    event: change     {"after", "sequence", "removed": [page, …], "stored": [[page, page before it], …]}

A reader whose last `sequence` is not the `after` of a change has missed something and asks anew. One that is too slow,
and every reader when the core was started again, gets a snapshot in the middle. `page_feed.py` keeps what is told.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive, Scope, Send

from engine.client import EngineClient
from engine.kv.page_feed import Reader, Snapshot
from engine.server.errors import ApiError
from engine.server.respond import send_error

_encode = msgspec.json.Encoder().encode
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class PageEvents:
    """The ASGI endpoint."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ready = self._client.ready
        if ready is not None and not ready.page_space:
            error = ApiError(404, "This engine runs without a prefix cache: it has no pages.", code="no_prefix_cache")
            return await send_error(error, "", send)
        reader = self._client.feed.read()
        if reader is None:
            error = ApiError(503, "Too many read the events of this engine already.", code="too_many_readers")
            return await send_error(error, "", send)
        telling = asyncio.create_task(_tell(reader, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((telling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
        finally:
            self._client.feed.leave(reader)
            for task in (telling, leaving):
                task.cancel()


async def _tell(reader: Reader, send: Send) -> None:
    start = {"type": "http.response.start", "status": 200, "headers": _HEADERS, "tierline.keep_alive": b": idle\n\n"}
    await send(start)
    while (event := await reader.next()) is not None:
        name = b"snapshot" if isinstance(event, Snapshot) else b"change"
        body = b"event: " + name + b"\ndata: " + _encode(event) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
