"""What gateway processes tell each other about a flight: who follows it, its events as they come, and how it ended."""

from __future__ import annotations

import msgspec

from cache.client import Lookup


class Landing(msgspec.Struct, frozen=True):
    """What a flight came to: `found`, where it can be given to others, and what the answer cost and who gave it.

    `finish_reason` as in the ledger.
    """

    found: Lookup | None
    model: str = ""
    tier: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    finish_reason: str = "stop"


class Refusal(msgspec.Struct, frozen=True):
    """A backend's refusal of the request itself: whoever asks the same gets the same."""

    message: str
    status: int
    type: str | None = None
    code: str | None = None
    param: str | None = None


class Elsewhere(msgspec.Struct, frozen=True):
    """Another process flies."""

    process: str
    token: str


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """`token` names the lease that it is about."""

    token: str


class Follow(Message, frozen=True):
    """`sender` wants the events from `position` on. Said again every second: I am still there.

    `again`: something was lost on the way; else what is on its way already need not be sent twice.
    """

    sender: str
    position: int
    again: bool = False


class Unfollow(Message, frozen=True):
    sender: str


class Pieces(Message, frozen=True):
    """Events from `position` on; without any: I am still at it. `begun`: it is a stream."""

    position: int
    parts: list[bytes]
    begun: bool


class End(Message, frozen=True):
    """There are `count` events, and this is what it came to; nothing: it failed, somebody else may try."""

    count: int
    landing: Landing | None = None
    shared: bool = False
    refusal: Refusal | None = None


AnyMessage = Follow | Unfollow | Pieces | End

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def pack(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def unpack(data: bytes) -> AnyMessage:
    """Raises msgspec.MsgspecError: it is no such message."""
    return _decoder.decode(data)
