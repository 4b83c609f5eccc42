"""The seed of the digests of pages that several engines share. In the environment: anybody can read command lines."""

from __future__ import annotations

import os

VARIABLE = "TIERLINE_PAGE_SEED"
SEED_BYTES = 32


def page_seed() -> bytes | None:
    """The seed, or None where there is none: then each process makes its own.

    Raises:
        ValueError: it is not 32 bytes in hexadecimal.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        seed = bytes.fromhex(text)
    except ValueError:
        seed = b""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"{VARIABLE} must hold {2 * SEED_BYTES} hexadecimal digits (openssl rand -hex {SEED_BYTES})")
    return seed
