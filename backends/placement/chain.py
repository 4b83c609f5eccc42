"""The beginnings of a prompt as digests, each of everything before it: equal digests, equal beginnings.

A digest is taken at fixed places of the text, 256 bytes apart at first and ever farther (an eighth of the way so far),
whatever the text is: so two prompts share their digests up to where they differ, and a megabyte has about a hundred.
They are keyed with a secret of the process, and begin with the tenant's salt: nobody can prepare two texts that look
the same here, and what one tenant sent says nothing about another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

STEP_BYTES = 256  # a shorter prompt has no chain: there is next to nothing to save
MOST_BYTES = 1 << 20  # what comes after it is not looked at
DIGEST_BYTES = 16

# Beginnings, shortest first: digest, and tokens up to there.
Chain = tuple[tuple[bytes, int], ...]


def chained(parts: Iterable[bytes], salt: bytes, key: bytes, tokens: int) -> Chain:
    """The chain of a prompt of about so many `tokens`, given in parts that mean the same only when put together."""
    text = b"".join(parts)
    size = len(text)
    if size < STEP_BYTES:
        return ()
    digest = hashlib.blake2b(salt, key=key, digest_size=DIGEST_BYTES)
    found = []
    view = memoryview(text)
    at = 0
    while (end := at + max(STEP_BYTES, 1 << max(0, at.bit_length() - 4))) <= min(size, MOST_BYTES):
        digest.update(view[at:end])
        found.append((digest.copy().digest(), tokens * end // size))
        at = end
    return tuple(found)
