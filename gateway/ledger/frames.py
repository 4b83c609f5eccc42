"""How journal records lie in a segment file: framed, checksummed, and found again behind a damaged place.

    segment := "TLJOURN1" salt:u32 frame*          frame := "\\xf5TLR" length:u32 crc32:u32 payload

All numbers are little-endian. The checksum starts from the segment's random salt, so that bytes which a client chose
can never pass for a frame. Segments are preallocated: zeros after the last frame are its normal end.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

_SEGMENT: Final = struct.Struct("<8sI")
_FRAME: Final = struct.Struct("<4sII")
_SEGMENT_MAGIC: Final = b"TLJOURN1"
_FRAME_MAGIC: Final = b"\xf5TLR"

HEADER_BYTES: Final = _SEGMENT.size
FRAME_OVERHEAD_BYTES: Final = _FRAME.size


class Frame(NamedTuple):
    """A payload and where it lies; None stands for a stretch of bytes that is damaged."""

    payload: bytes | None
    start: int
    end: int


def new_salt() -> int:
    return int.from_bytes(os.urandom(4), "little")


def segment_header(salt: int) -> bytes:
    return _SEGMENT.pack(_SEGMENT_MAGIC, salt)


def read_salt(header: bytes) -> int | None:
    """The salt, or None when these bytes do not begin a segment (its creation was cut short)."""
    if len(header) < HEADER_BYTES:
        return None
    magic, salt = _SEGMENT.unpack_from(header)
    return int(salt) if magic == _SEGMENT_MAGIC else None


def pack(payload: bytes, salt: int) -> bytes:
    return _FRAME.pack(_FRAME_MAGIC, len(payload), zlib.crc32(payload, salt)) + payload


def unpack(buffer: bytes, salt: int, base: int = 0) -> Iterator[Frame]:
    """All frames in `buffer`, whose first byte lies at offset `base` of the segment, and the damage between them."""
    at = 0
    while at < len(buffer):
        payload = _frame_at(buffer, at, salt)
        if payload is not None:
            end = at + FRAME_OVERHEAD_BYTES + len(payload)
            yield Frame(payload, base + at, base + end)
            at = end
            continue
        found = buffer.find(_FRAME_MAGIC, at + 1)
        while found != -1 and _frame_at(buffer, found, salt) is None:
            found = buffer.find(_FRAME_MAGIC, found + 1)
        end = len(buffer) if found == -1 else found
        if buffer[at:end].strip(b"\x00"):
            yield Frame(None, base + at, base + end)
        at = end


def _frame_at(buffer: bytes, at: int, salt: int) -> bytes | None:
    start = at + FRAME_OVERHEAD_BYTES
    if start > len(buffer):
        return None
    magic, length, checksum = _FRAME.unpack_from(buffer, at)
    if magic != _FRAME_MAGIC or start + length > len(buffer):
        return None
    payload = buffer[start : start + length]
    return payload if zlib.crc32(payload, salt) == checksum else None
