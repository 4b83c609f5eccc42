"""Everything that is not a model's answer: models, health, metrics, the API's description."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import generate_latest

from gateway import openapi as openapi_document
from gateway.admission import authenticate
from gateway.dialects.errors import NotAllowed, NotFound
from gateway.engine_metrics import engine_metrics
from gateway.http import JSON_TYPE, Exchange
from gateway.permissions import usable_models
from gateway.services import Services
from gateway.worker_metrics import everybodys_metrics

_encoder = msgspec.json.Encoder()


async def _json(exchange: Exchange, document: Any, status: int = 200) -> None:
    request_id = exchange.request_id.encode()
    headers = [JSON_TYPE, (b"x-request-id", request_id)]
    if exchange.has(b"anthropic-version"):
        headers.append((b"request-id", request_id))
    await exchange.respond(status, headers, _encoder.encode(document))


async def models(services: Services, exchange: Exchange) -> None:
    """`GET /v1/models`: the models that this key may use, and `auto` if it can lead to one of them.

    One list for clients of either dialect: what the one does not know it passes over.
    """
    principal = await authenticate(services, exchange)
    names = usable_models(services, principal)
    ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
    data = [_describe(services, name) for name in names]
    await _json(exchange, {"object": "list", "data": data, "has_more": False, **ends})


async def model(services: Services, exchange: Exchange) -> None:
    """`GET /v1/models/{model}`."""
    principal = await authenticate(services, exchange)
    name = exchange.scope["path"].removeprefix("/v1/models/")  # decoded by the server
    if name != "auto" and name not in services.settings.models:
        raise NotFound(f"The model '{name[:100]}' does not exist here.", code="model_not_found", param="model")
    if name not in usable_models(services, principal):
        raise NotAllowed(f"This key may not use the model '{name}'.", code="model_not_allowed")
    await _json(exchange, _describe(services, name))


def _describe(services: Services, name: str) -> dict[str, Any]:
    described: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "tierline"}
    described |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's names
    settings = services.settings.models.get(name)
    if settings is not None:
        described["tierline"] = {
            "kind": settings.kind,
            "tier": settings.tier,
            "backend": settings.backend,
            "context_length": settings.context_length,
            "capabilities": sorted(settings.capabilities),
        }
    return described


async def live(services: Services, exchange: Exchange) -> None:
    """`GET /health/live`: the process runs and its event loop turns."""
    await _json(exchange, {"status": "live"})


async def ready(services: Services, exchange: Exchange) -> None:
    """`GET /health/ready`: whether this process should get traffic, and the state of what it depends on."""
    reasons: list[str] = []
    degraded = ["Redis is away: limits are this process's share"] if services.limiter.degraded else []
    if services.draining:
        reasons.append("draining")
    if services.journal.error:
        reasons.append("the ledger's journal cannot be written")
    backends = {name: [state.state for state in pool.snapshot()] for name, pool in services.pools.items()}
    document = {
        "status": "not ready" if reasons else ("degraded" if degraded else "ready"),
        "reasons": reasons + degraded,
        "backends": backends,
        "cache": "off" if services.cache is None else ("connected" if services.cache.connected else "not connected"),
        "ledger_lag_rows": services.writer.lag_rows,
        "policies": {
            "version": services.policies.current.version,
            "problems": len(services.policies.problems),
            "rolled_back": [
                {"policy": row.policy, "version": row.version, "reason": row.reason}
                for row in services.rollouts.rolled_back()
            ],
        },
    }
    await _json(exchange, document, 503 if reasons else 200)


async def metrics(services: Services, exchange: Exchange) -> None:
    """`GET /metrics`: the gateway's own (of all its workers), and those of the bundled engines behind it."""
    text = generate_latest(services.metrics.registry)
    if exchange.scope["query_string"] != b"worker=this":
        if services.settings.server.workers > 1:
            text = (await everybodys_metrics(services.settings, services.worker, text.decode())).encode()
        text += await engine_metrics(services)
    await exchange.respond(200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], text)


async def openapi(services: Services, exchange: Exchange) -> None:
    """`GET /openapi.json`."""
    await _json(exchange, openapi_document.document())
