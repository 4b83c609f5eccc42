"""How far a journal has been stored elsewhere: a place in it, kept in a small file of its own, and what can go wrong.

A lost or torn checkpoint only repeats work: rows are stored under ids, and storing one twice does nothing.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from typing import Final, NamedTuple

logger = logging.getLogger("tierline.ledger")

_CHECKPOINT: Final = struct.Struct("<QQ")


class JournalError(Exception):
    """The journal cannot take a record; the message says why and what to do."""


class JournalFull(JournalError):
    """No disk space is left for a new attempt. Clears by itself when there is space again."""


class JournalFailed(JournalError):
    """The disk failed to write or to sync."""


class JournalBusy(JournalError):
    """Another process has this journal open."""


class Position(NamedTuple):
    """A place between two records: segment number and byte offset."""

    segment: int
    offset: int


def save(descriptor: int, position: Position) -> None:
    """Write the checkpoint, in place: renaming a new file over the old one would wait for the disk.

    Raises:
        JournalFailed: it could not be written.
    """
    payload = _CHECKPOINT.pack(*position)
    try:
        os.pwrite(descriptor, payload + zlib.crc32(payload).to_bytes(4, "little"), 0)
    except OSError as error:
        raise JournalFailed(f"cannot save the journal's checkpoint: {error}") from error


def load(descriptor: int, segments: list[int]) -> Position:
    """The checkpoint, or the beginning of the oldest of these segments if there is none that can be used."""
    first = Position(segments[0] if segments else 0, 0)
    saved = os.pread(descriptor, 64, 0)
    payload, checksum = saved[: _CHECKPOINT.size], saved[_CHECKPOINT.size :]
    if len(payload) < _CHECKPOINT.size or checksum != zlib.crc32(payload).to_bytes(4, "little"):
        if saved:
            logger.warning("the journal's checkpoint is unreadable: everything is stored again, which is harmless")
        return first
    position = Position(*_CHECKPOINT.unpack(payload))
    return position if position.segment in segments else first
