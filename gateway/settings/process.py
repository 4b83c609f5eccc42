"""The gateway process itself: where it listens, its log, its admin API, what it reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.settings.strict import Strict


class LogSettings(Strict):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    prompts: bool = Field(False, description="Write prompts and answers to the log. Off unless you are debugging.")


class ServerSettings(Strict):
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    workers: int = Field(1, ge=1, le=64, description="More than one needs storage.redis_url: they share limits there.")
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024)
    max_held_body_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Of all requests of a process at once; what is over waits or is refused.",
    )
    read_timeout_seconds: float = Field(30.0, gt=0, description="For a request's head, and for a pause in its body.")
    body_timeout_seconds: float = Field(300.0, gt=0, description="Beyond that for a whole body, however large.")
    write_timeout_seconds: float = Field(60.0, gt=0, description="For a client that does not read its answer.")
    keep_alive_seconds: float = Field(
        15.0, ge=0, description="Longest silence of a stream that has begun: then a sign of life is sent; 0: never."
    )
    shutdown_delay_seconds: float = Field(
        0.0, ge=0, description="How long to serve on after SIGTERM, not ready, before the drain begins."
    )
    drain_seconds: float = Field(20.0, ge=0, description="How long running requests may finish after that.")
    log: LogSettings = LogSettings()


class TelemetrySettings(Strict):
    service_name: str = "tierline"
    otlp_endpoint: str | None = Field(None, description="Base URL of an OTLP/HTTP collector; default: no export.")
    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    legacy_token_metric: bool = Field(False, description="Also emit the older gen_ai token counter.")


class AdminSettings(Strict):
    """The admin API, `/admin/v1/…`, which has keys of its own."""

    enabled: bool | None = Field(None, description="Default: only where it listens on a loopback address.")
    listen: str | None = Field(
        None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+):[0-9]{1,5}$",
        description="HOST:PORT of its own; default: beside the models, on server.port.",
    )

    def address(self) -> tuple[str, int] | None:
        """The host and port of `listen`."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)
