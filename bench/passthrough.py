"""The least that a gateway in Python can do: parse the body, forward it by our own HTTP client, relay what comes.

No keys, no limits, no ledger, no routing, and a chunk is whatever the socket delivers: what `tierline` costs more than
this is the price of its features. Part of `bench/gateway.py`, which runs it by `python -m bench.passthrough URL PORT`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import uvicorn

from backends.http import HttpClient, Origin

Message = MutableMapping[str, Any]


class Passthrough:
    """The ASGI application. `base_url` is the upstream's."""

    def __init__(self, base_url: str) -> None:
        self.client, self.origin = HttpClient(), Origin(base_url)
        head = f"POST {self.origin.path}/chat/completions HTTP/1.1\r\nhost: {self.origin.authority}\r\n"
        self.head = (head + "content-type: application/json\r\ncontent-length: ").encode()

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        msgspec.json.decode(body)
        request = self.head + b"%d\r\n\r\n" % len(body) + body
        exchange = await self.client.send(self.origin, request, connect_s=5, deadline=time.monotonic() + 600)
        try:
            kind = exchange.headers["content-type"]
            headers = [(b"content-type", kind.encode())]
            if "content-length" in exchange.headers:
                headers.append((b"content-length", exchange.headers["content-length"].encode()))
            await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
            while piece := await exchange.read():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            exchange.close()


if __name__ == "__main__":
    uvicorn.run(
        Passthrough(sys.argv[1]),
        port=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="error",
        access_log=False,
    )
