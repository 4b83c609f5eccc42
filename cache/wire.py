"""The protocol between the gateway and the cache process: length-prefixed MessagePack over a Unix socket.

A frame is four bytes of length (big-endian) and one message. Requests carry an id, replies repeat it and may come in
any order. The server speaks first with a `Hello`, and again when its state changes (id 0).
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from cache.entry import Entry
from cache.key import CacheKey
from cache.stats import CacheStats

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024

LookupMode = Literal["exact", "semantic"]
Outcome = Literal["miss", "exact", "semantic"]


class ProtocolError(Exception):
    """The other side sent something that is not this protocol; the connection is of no more use."""


class Message(msgspec.Struct, tag=True, omit_defaults=True, array_like=True):
    """Base of all messages. `id` pairs a reply with its request."""

    id: int


class LookupRequest(Message):
    key: CacheKey
    mode: LookupMode
    threshold: float
    ttl_s: float | None = None


class StoreRequest(Message):
    key: CacheKey
    entry: Entry
    mode: LookupMode


class StatsRequest(Message):
    pass


class PurgeRequest(Message):
    scope: str | None = None
    model: str | None = None
    older_than_s: float | None = None


class EmbedRequest(Message):
    texts: list[str]


class Hello(Message):
    """Who serves: `state` is `warming` until the embedder is loaded, then `ready`, or `failed` with `error`."""

    version: int
    state: Literal["warming", "ready", "failed"]
    fingerprint: str
    scripts: list[str]
    error: str | None = None


class LookupReply(Message):
    outcome: Outcome
    score: float | None = None
    entry: Entry | None = None
    reason: str | None = None


class StoreReply(Message):
    reason: str | None = None


class StatsReply(Message):
    stats: CacheStats


class PurgeReply(Message):
    removed: int


class EmbedReply(Message):
    vectors: list[list[float]]


class FailureReply(Message):
    """The request was understood but could not be served; `reason` is a stable word."""

    reason: str
    message: str


Request = LookupRequest | StoreRequest | StatsRequest | PurgeRequest | EmbedRequest
Reply = Hello | LookupReply | StoreReply | StatsReply | PurgeReply | EmbedReply | FailureReply

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """One message as it goes over the socket.

    Raises:
        ProtocolError: the message is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request; `asyncio.IncompleteReadError` at the end of the stream, `ProtocolError` on garbage."""
    return _decode_request(await _read_body(reader))


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The next reply; `asyncio.IncompleteReadError` at the end of the stream, `ProtocolError` on garbage."""
    return _decode_reply(await _read_body(reader))


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


def _decode_request(body: bytes) -> Request:
    try:
        return _requests.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a request of this protocol: {error}") from error


def _decode_reply(body: bytes) -> Reply:
    try:
        return _replies.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a reply of this protocol: {error}") from error
