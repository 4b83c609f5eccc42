"""Values as they are kept outside this process: with a checksum, or encrypted where keys are configured.

A value is bound to what it belongs to, such as the id of its row: a value that was damaged, or put in the place of
another, does not open. Encryption is AES-256-GCM with a random nonce; of several keys the first encrypts and each
decrypts, so a key is changed by putting the new one in front and taking the old one out when its answers have expired.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import zlib
from collections.abc import Sequence
from typing import Protocol

_KEY_BYTES = 32
_KEY_ID_BYTES = 4
_NONCE_BYTES = 12
_CHECKSUM_BYTES = 4


class Unreadable(ValueError):
    """A value does not open: it is damaged, belongs elsewhere, or was encrypted with a key that is not configured."""


class InvalidKeys(ValueError):
    """The text does not name keys. The message never shows it."""


class Sealer(Protocol):
    """Closes values for keeping and opens them again. Used from several threads at once."""

    encrypts: bool

    def seal(self, value: bytes, bound_to: bytes) -> bytes: ...

    def unseal(self, sealed: bytes, bound_to: bytes) -> bytes:
        """The value again.

        Raises:
            Unreadable: it is not what was sealed for `bound_to`.
        """
        ...


class Checksums:
    """No secret: four bytes of CRC-32 before the value."""

    encrypts = False

    def seal(self, value: bytes, bound_to: bytes) -> bytes:
        return zlib.crc32(value, zlib.crc32(bound_to)).to_bytes(_CHECKSUM_BYTES, "big") + value

    def unseal(self, sealed: bytes, bound_to: bytes) -> bytes:
        value = sealed[_CHECKSUM_BYTES:]
        if sealed[:_CHECKSUM_BYTES] != zlib.crc32(value, zlib.crc32(bound_to)).to_bytes(_CHECKSUM_BYTES, "big"):
            raise Unreadable("a value in the cache's file is damaged")
        return value


class Encryption:
    """AES-256-GCM. A sealed value is the id of its key (4 bytes), nonce (12), ciphertext with tag (16)."""

    encrypts = True

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Take keys of 32 bytes each, the one that encrypts first."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        derived = [hashlib.blake2b(key, digest_size=_KEY_BYTES, person=b"cache values").digest() for key in keys]
        ids = [hashlib.blake2b(key, digest_size=_KEY_ID_BYTES, person=b"cache key id").digest() for key in keys]
        self._first = ids[0]
        self._ciphers = {id: AESGCM(key) for id, key in zip(ids, derived, strict=True)}

    def seal(self, value: bytes, bound_to: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return self._first + nonce + self._ciphers[self._first].encrypt(nonce, value, bound_to)

    def unseal(self, sealed: bytes, bound_to: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        cipher = self._ciphers.get(sealed[:_KEY_ID_BYTES])
        if cipher is None:
            raise Unreadable("a value in the cache's file was encrypted with a key that is not configured")
        nonce, rest = sealed[_KEY_ID_BYTES:][:_NONCE_BYTES], sealed[_KEY_ID_BYTES + _NONCE_BYTES :]
        try:
            return cipher.decrypt(nonce, rest, bound_to)
        except (InvalidTag, ValueError) as error:  # ValueError: too short to hold a nonce and a tag
            raise Unreadable("a value in the cache's file is damaged or was tampered with") from error


def sealer(keys: Sequence[bytes]) -> Sealer:
    """Encryption where there is a key, checksums where there is none."""
    return Encryption(keys) if keys else Checksums()


def parse_keys(text: str) -> list[bytes]:
    """Keys as configured: base64 of 32 random bytes each (`openssl rand -base64 32`), joined by commas.

    Raises:
        InvalidKeys: there is no key, or one is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    keys = [_decode(part) for part in parts if part]
    if not keys or any(key is None for key in keys):
        raise InvalidKeys(
            "it must hold base64 of 32 random bytes (openssl rand -base64 32); several keys are joined by commas, "
            "the one to encrypt with first"
        )
    found = [key for key in keys if key is not None]
    return list(dict.fromkeys(found))


def _decode(text: str) -> bytes | None:
    try:
        key = base64.b64decode(text.translate(str.maketrans("-_", "+/")), validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == _KEY_BYTES else None
