"""A KV page on its way: a header that says what it is, and the bytes of its keys and values, exactly as computed.

The header has the version of the layout, the model, the data type and shape, and a checksum. The checksum is keyed with
the secret of those who share pages and covers header, name and content: a page that is damaged, cut off, of another
model or layout, under a wrong name, or written by somebody without the secret is refused, never used.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

# To be raised when the order of numbers within a page changes, or the header.
VERSION = 1
_MAGIC = b"TLKV"
_HEADER = struct.Struct("<4sH32s32sQ32s")  # magic, version, model, layout, bytes of content, checksum
_CHECKSUM_BYTES = 32


class PageRefused(Exception):
    """What was found is not the page that was asked for."""


@dataclass(frozen=True, slots=True)
class PageName:
    """Which page: its digest in the chain, the one before it, and its tokens, packed."""

    digest: bytes
    parent: bytes
    tokens: bytes


class PageFormat:
    """Packs and unpacks the pages of one model in one layout."""

    def __init__(self, *, model_digest: bytes, layout: str, page_bytes: int, secret: bytes) -> None:
        """`layout`: data type and shape of a page, in words. `secret`: shared by all who exchange pages."""
        self.page_bytes = page_bytes
        self.value_bytes = _HEADER.size + page_bytes
        self._model = hashlib.blake2b(model_digest, digest_size=32).digest()
        self._layout = hashlib.blake2b(layout.encode(), digest_size=32).digest()
        self._secret = secret

    @property
    def space(self) -> bytes:
        """A name of what stored pages have in common: pages of other spaces are not to be found under this one's."""
        text = b"space" + VERSION.to_bytes(2, "little") + self._model + self._layout
        return hashlib.blake2b(text, key=self._secret, digest_size=16).digest()

    def pack(self, name: PageName, content: bytes) -> bytes:
        """The value to store. Raises ValueError where `content` is not one page."""
        if len(content) != self.page_bytes:
            raise ValueError(f"a page has {self.page_bytes} bytes, not {len(content)}")
        header = _HEADER.pack(
            _MAGIC, VERSION, self._model, self._layout, len(content), self._checksum(name, memoryview(content))
        )
        return header + content

    def unpack(self, name: PageName, value: bytes) -> memoryview:
        """The content of the page that `name` says.

        Raises:
            PageRefused: with what is wrong.
        """
        if len(value) < _HEADER.size:
            raise PageRefused(f"{len(value)} bytes are no page")
        magic, version, model, layout, length, checksum = _HEADER.unpack_from(value)
        content = memoryview(value)[_HEADER.size :]
        if magic != _MAGIC:
            raise PageRefused("no page")
        if version != VERSION:
            raise PageRefused(f"layout version {version}, not {VERSION}")
        if model != self._model:
            raise PageRefused("another model's page")
        if layout != self._layout:
            raise PageRefused("another data type or shape")
        if length != self.page_bytes or len(content) != length:
            raise PageRefused(f"{len(content)} of {self.page_bytes} bytes")
        if not hmac.compare_digest(checksum, self._checksum(name, content)):
            raise PageRefused("the checksum does not fit")
        return content

    def _checksum(self, name: PageName, content: memoryview) -> bytes:
        checksum = hashlib.blake2b(key=self._secret, digest_size=_CHECKSUM_BYTES)
        checksum.update(VERSION.to_bytes(2, "little") + self._model + self._layout)
        for part in (name.digest, name.parent, name.tokens):
            checksum.update(len(part).to_bytes(8, "little") + part)
        checksum.update(content)
        return checksum.digest()
