"""The admin API on an address of its own (`admin.listen`), so that it need not be reachable where the models are."""

from __future__ import annotations

import asyncio
import socket

from edge.limits import Limits
from edge.server import Server
from gateway.admin import routes
from gateway.app import Handler, answer
from gateway.http import Exchange, Receive, Scope, Send
from gateway.services import Services


async def listen_for_admins(services: Services) -> None:
    """Serve the admin API on `admin.listen` until the services close. Of several workers the first one does.

    Raises:
        OSError: the address cannot be used.
    """
    address = services.settings.admin.address()
    if address is None or services.admin is None or services.worker != 1:
        return
    listener = _bound(*address)
    server = Server(_application(services), Limits(), lifespan="off")
    task = asyncio.create_task(server.serve_beside([listener]), name="admin-listener")

    async def stop() -> None:
        server.should_exit = True
        await task

    services.at_close(stop)


def _application(services: Services) -> object:
    def find(exchange: Exchange) -> Handler:
        return routes.serve

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(services, Exchange(scope, receive, send), find)

    return application


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
