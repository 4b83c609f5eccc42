"""What only the whole of `tierline.yaml` can tell: names that point nowhere, ports taken twice, bounds that clash."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from policies.yamlfile import Document, Problem

if TYPE_CHECKING:
    from gateway.settings.platform_file import Settings


def conflicts(settings: Settings, document: Document) -> Iterator[Problem]:
    """Every clash, with its position in the file."""
    for name, model in settings.models.items():
        if name == "auto":
            yield document.problem(("models", name), "'auto' lets the policy choose; give the model another name.")
        if model.backend not in settings.backends:
            text = f"backend '{model.backend}' of model '{name}' is not in 'backends'."
            yield document.problem(("models", name, "backend"), text, _close(model.backend, settings.backends))
        elif settings.backends[model.backend].dialect == "anthropic" and model.max_output_tokens is None:
            text = f"model '{name}' needs 'max_output_tokens': Anthropic servers must be told an answer's most tokens."
            yield document.problem(("models", name), text)
    for name, backend in settings.backends.items():
        if backend.engine and backend.engine not in settings.engines:
            text = f"engine '{backend.engine}' of backend '{name}' is not in 'engines'."
            yield document.problem(("backends", name, "engine"), text, _close(backend.engine, settings.engines))
        for number, replica in enumerate(backend.replicas):
            if replica.engine and replica.engine not in settings.engines:
                text = f"engine '{replica.engine}' of backend '{name}' is not in 'engines'."
                place = ("backends", name, "replicas", number, "engine")
                yield document.problem(place, text, _close(replica.engine, settings.engines))
        if backend.embedder and (settings.cache.embeddings_port is None or not settings.cache.enabled):
            text = f"backend '{name}' needs cache.embeddings_port, and the cache enabled: it is the cache's embedder."
            yield document.problem(("backends", name, "embedder"), text)
    if settings.server.workers > 1 and not settings.storage.redis_url:
        text = "more than one worker needs storage.redis_url: they share limits and holds through Redis."
        yield document.problem(("server", "workers"), text)
    if settings.server.max_held_body_bytes < settings.server.max_body_bytes:
        text = (
            f"max_body_bytes ({settings.server.max_body_bytes}) is more than max_held_body_bytes "
            f"({settings.server.max_held_body_bytes}), which holds all bodies."
        )
        yield document.problem(("server", "max_body_bytes"), text)
    taken = {settings.server.port: "the gateway"} if settings.server.port else {}
    if (address := settings.admin.address()) is not None:
        if not 0 < address[1] < 65536:
            yield document.problem(("admin", "listen"), f"there is no port {address[1]}.")
        if address[1] in taken:
            yield document.problem(("admin", "listen"), f"port {address[1]} is taken by {taken[address[1]]}.")
        taken[address[1]] = "the admin API"
    if (port := settings.cache.embeddings_port) is not None:
        if port in taken:
            yield document.problem(("cache", "embeddings_port"), f"port {port} is taken by {taken[port]}.")
        taken[port] = "the embedder"
    for name, engine in settings.engines.items():
        if engine.port in taken:
            text = f"port {engine.port} is taken by {taken[engine.port]}."
            yield document.problem(("engines", name, "port"), text)
        elif engine.port:
            taken[engine.port] = f"engine '{name}'"


def _close(name: str, known: Mapping[str, object]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
