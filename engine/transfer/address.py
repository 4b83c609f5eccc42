"""Where the Redis is that engines share pages through. In the environment: an address may hold a password, and anybody
can read command lines."""

from __future__ import annotations

import importlib.util
import os

from engine.kv.page_seed import VARIABLE as SEED_VARIABLE
from engine.kv.page_seed import page_seed

VARIABLE = "TIERLINE_KV_REDIS_URL"
_SCHEMES = ("redis://", "rediss://", "unix://")


def redis_url() -> str | None:
    """The address, or None where pages are not shared.

    Raises:
        ValueError: it is none, or what sharing needs is missing.
    """
    url = os.environ.get(VARIABLE)
    if not url:
        return None
    if not url.startswith(_SCHEMES):
        raise ValueError(f"{VARIABLE} must begin with {', '.join(_SCHEMES[:-1])} or {_SCHEMES[-1]}")
    if page_seed() is None:
        raise ValueError(
            f"pages in Redis are named and sealed by {SEED_VARIABLE}: set it to the same 64 hexadecimal digits for all "
            "engines that share them (openssl rand -hex 32)"
        )
    if importlib.util.find_spec("redis") is None:
        raise ValueError("pages in Redis need the redis package: pip install 'tierline[redis]'")
    return url
