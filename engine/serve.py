"""The HTTP process from its start to its end.

The core takes longest to be ready. So it is started first, and what the HTTP side needs is imported and read while it
loads.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.flags import with_flags
from engine.metrics import EngineMetrics

if TYPE_CHECKING:
    from engine.server.http import DrainingServer
    from engine.server.model import Model


class CannotServe(Exception):
    """The model cannot be served as it was asked for; the message says why."""


async def serve(
    load: Callable[[], Model],
    config: EngineConfig,
    adapters: Mapping[str, str],
    listener: socket.socket,
    watchdog_seconds: float,
) -> int:
    """Serve until a signal ends it; returns the exit code.

    `load`: reads what the HTTP side needs of the model, in a thread; it may raise CannotServe. `adapters`: folders by
    name.
    """
    metrics = EngineMetrics(config.served_name)
    client = EngineClient(config, metrics, watchdog_seconds=watchdog_seconds, adapters=adapters)
    client.start()
    try:
        server = await _prepare(client, await asyncio.to_thread(load))
    except CannotServe as error:
        await client.stop()
        print(f"error: {with_flags(str(error))}", file=sys.stderr)
        return 1

    def stop_if_the_model_cannot_be_loaded(failure: asyncio.Future[str]) -> None:
        if not failure.cancelled():
            server.should_exit = True

    client.startup_failure.add_done_callback(stop_if_the_model_cannot_be_loaded)
    host, port = listener.getsockname()[:2]
    print(f"engine for '{config.served_name}' listens on http://{host}:{port}", flush=True)
    await server.serve(sockets=[listener])
    if client.startup_failure.done():
        print(f"error: the model could not be loaded: {with_flags(client.startup_failure.result())}", file=sys.stderr)
        return 1
    return 0


async def _prepare(client: EngineClient, model: Model) -> DrainingServer:
    """The server, and the process of the chat template up. Raises CannotServe for a template that is broken."""
    from engine.server.http import DrainingServer
    from engine.server.lanes import Lanes
    from engine.text.chat_template import ChatTemplateError

    lanes = Lanes(model.template)
    try:
        await lanes.start()
    except ChatTemplateError as error:
        await lanes.stop()
        raise CannotServe(str(error)) from error
    return DrainingServer(client, model, lanes)
