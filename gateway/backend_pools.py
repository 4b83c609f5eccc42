"""The pools of backends, made from `tierline.yaml`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from backends.dialects import DIALECTS
from backends.hedge import Hedging
from backends.http import HttpClient
from backends.placement.index import PrefixIndex
from backends.placement.place import Place
from backends.pool import Pool, Timeouts
from backends.prefilling import Prefilling
from gateway.settings import Settings
from gateway.settings.serving import BackendSettings


class MissingSecret(ValueError):
    """A backend's key is named in the settings, but the environment does not have it."""


def open_pool(settings: Settings, name: str, client: HttpClient) -> Pool:
    """The pool of backend `name`. Where its replicas tell what they hold, its `feeds` are to be started.

    Raises:
        MissingSecret: its key is not there, or none that could be sent.
    """
    backend, placement = settings.backends[name], settings.backends[name].placement
    urls, zone = settings.base_urls(name), placement.zone()
    if not backend.replicas:
        return _pool(backend, name, urls, (), client)
    replicas = list(zip(urls, backend.replicas, strict=True))
    prefilling = None
    if computing := [url for url, replica in replicas if replica.role == "prefill"]:
        places = [replica.place(zone) for _, replica in replicas if replica.role == "prefill"]
        pool = _pool(backend, name, computing, places, client)
        prefilling = Prefilling(pool, placement.prefill_from_tokens, placement.prefill_timeout_s)
    answering = [url for url, replica in replicas if replica.role != "prefill"]
    places = [replica.place(zone) for _, replica in replicas if replica.role != "prefill"]
    return _pool(backend, name, answering, places, client, prefilling)


def _pool(
    backend: BackendSettings,
    name: str,
    urls: Sequence[str],
    places: Sequence[Place],
    client: HttpClient,
    prefilling: Prefilling | None = None,
) -> Pool:
    """A pool of some of a backend's replicas; `places`: of each, or none."""
    hedge, placement = backend.hedge, backend.placement
    prefixes = PrefixIndex(placement.remember_s, placement.remember_tokens) if placement.prefix != "off" else None
    return Pool(
        name,
        urls,
        client=client,
        api_key=_api_key(name, backend.api_key_env),
        headers=backend.headers,
        timeouts=Timeouts(**backend.timeouts.model_dump()),
        max_outstanding=backend.max_outstanding,
        max_queued=backend.max_queued,
        queue_timeout_s=backend.queue_timeout_s,
        attempts=backend.attempts,
        retry_share=backend.retry_share,
        hedging=None if hedge is None else Hedging(hedge.after_quantile, hedge.max_share, hedge.min_delay_s),
        dialect=DIALECTS[backend.dialect],
        places=places,
        preferences=placement.preferences(),
        prefixes=prefixes,
        listens=placement.prefix == "events",
        prefilling=prefilling,
    )


def _api_key(name: str, variable: str | None) -> str | None:
    if not variable:
        return None
    api_key = os.environ.get(variable)
    if not api_key:
        raise MissingSecret(
            f"backend '{name}' takes its key from the environment variable {variable}, which is not set."
        )
    if not (api_key.isascii() and api_key.isprintable()) or api_key != api_key.strip():
        raise MissingSecret(
            f"backend '{name}' takes its key from the environment variable {variable}, whose value "
            "holds a line break, a blank around it, or other characters that no header can carry."
        )
    return api_key
