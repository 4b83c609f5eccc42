"""The bundled engines' metrics, shown on the gateway's own page with an `engine` label.

So one page tells the whole story on one machine. Engines that do not answer in time are left out; names that the
gateway counts itself (`llm_ttft_seconds`, …) are not repeated, because a series must have one source.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from backends.connection import Origin
from backends.http import HttpFailure

if TYPE_CHECKING:
    from gateway.services import Services

TIMEOUT_S = 1.0
MAX_BYTES = 4 * 1024 * 1024
_PREFIXES = ("tierline_engine_", "llm_")


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


async def engine_metrics(services: Services) -> bytes:
    """Metrics of all bundled engines in the text format; empty if there are none."""
    settings = services.settings
    engines = list(dict.fromkeys(engine for backend in settings.backends.values() for engine in backend.engines))
    pages = await asyncio.gather(*(_fetch(services, engine) for engine in engines))
    own = {metric.name for metric in services.metrics.registry.collect()}
    merged: dict[str, Metric] = {}
    for engine, page in zip(engines, pages, strict=True):
        for family in text_string_to_metric_families(page):
            if family.name in own or not family.name.startswith(_PREFIXES):
                continue
            target = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                target.add_sample(sample.name, {**sample.labels, "engine": engine}, sample.value)
    if not merged:
        return b""
    registry = CollectorRegistry()
    registry.register(_Families(list(merged.values())))
    return generate_latest(registry)


async def _fetch(services: Services, engine: str) -> str:
    base_url = services.settings.engine_url(engine)
    origin = Origin(base_url.removesuffix("/v1"))
    request = f"GET {origin.path}/metrics HTTP/1.1\r\nhost: {origin.authority}\r\nconnection: close\r\n\r\n".encode()
    try:
        exchange = await services.http.send(origin, request, connect_s=TIMEOUT_S, deadline=time.monotonic() + TIMEOUT_S)
        try:
            return (await exchange.read_all(MAX_BYTES)).decode()
        finally:
            exchange.close()
    except (HttpFailure, UnicodeDecodeError):
        return ""
