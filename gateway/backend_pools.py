"""The pools of backends, made from `tierline.yaml`."""

from __future__ import annotations

import os

from backends.dialects import DIALECTS
from backends.hedge import Hedging
from backends.http import HttpClient
from backends.placement.index import PrefixIndex
from backends.pool import Pool, Timeouts
from gateway.settings import Settings


class MissingSecret(ValueError):
    """A backend's key is named in the settings, but the environment does not have it."""


def open_pool(settings: Settings, name: str, client: HttpClient) -> Pool:
    """The pool of backend `name`. Where its replicas tell what they hold, its `feeds` are to be started.

    Raises:
        MissingSecret: its key is not there, or none that could be sent.
    """
    backend = settings.backends[name]
    hedge, placement, zone = backend.hedge, backend.placement, backend.placement.zone()
    prefixes = PrefixIndex(placement.remember_s, placement.remember_tokens) if placement.prefix != "off" else None
    return Pool(
        name,
        settings.base_urls(name),
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
        places=[replica.place(zone) for replica in backend.replicas],
        preferences=placement.preferences(),
        prefixes=prefixes,
        listens=placement.prefix == "events",
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
