"""The gateway's HTTP server: the shared edge with the limits of `tierline.yaml`, around the application."""

from __future__ import annotations

from edge.limits import Limits
from edge.server import Server as EdgeServer
from gateway.app import App
from gateway.settings import ServerSettings


class Server(EdgeServer):
    """Tells the services that it drains as soon as it is asked to stop: from then on it is not ready."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        limits = Limits(
            read_timeout_s=settings.read_timeout_seconds,
            body_timeout_s=settings.body_timeout_seconds,
            write_timeout_s=settings.write_timeout_seconds,
            stream_keep_alive_s=settings.keep_alive_seconds,
            shutdown_delay_s=settings.shutdown_delay_seconds,
            drain_s=settings.drain_seconds,
        )
        super().__init__(app, limits, host=settings.host, port=settings.port, lifespan="on")
        self._app = app

    def drain(self) -> None:
        super().drain()
        if self._app.services is not None:
            self._app.services.draining = True
