"""The engine's HTTP server: how it ends."""

from __future__ import annotations

import asyncio
import socket

from edge.limits import Limits
from edge.server import Server
from engine.client import EngineClient
from engine.server.app import create_app
from engine.server.lanes import Lanes
from engine.server.model import Model

_DRAIN_SECONDS = 10


class DrainingServer(Server):
    """Once it is told to stop, ends the requests that are not done in time with an error event."""

    def __init__(self, client: EngineClient, model: Model, lanes: Lanes) -> None:
        drain_s = _DRAIN_SECONDS + 2  # time to send what `end_all` has to say
        super().__init__(create_app(model, client, lanes), Limits(drain_s=drain_s), log_level="warning")
        self._client = client

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._client.feed.close()
        message = "The engine is being stopped. Send the request again."
        timer = asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self._client.end_all, message)
        await super().shutdown(sockets)
        timer.cancel()
