"""The journal's records: an attempt opens, progresses, closes; a decision is taken."""

from __future__ import annotations

import msgspec

from gateway.ledger.rows import Decision, LedgerRow


class Open(msgspec.Struct, tag="open"):
    """An attempt starts. `row` holds all that is known, the estimated input and what that input costs."""

    row: LedgerRow


class Progress(msgspec.Struct, tag="progress"):
    """How far an attempt has come: output tokens counted so far and the cost of the attempt so far. Optional."""

    attempt_id: str
    output_tokens: int
    cost_nanousd: int


class Close(msgspec.Struct, tag="close"):
    """The final row of an attempt; also on its own, for what needs no attempt, such as a cache hit."""

    row: LedgerRow


class Decided(msgspec.Struct, tag="decided"):
    """Why a request went where it went."""

    decision: Decision


Record = Open | Progress | Close | Decided

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def decode(payload: bytes) -> Record:
    """A record from its bytes. Unknown fields are ignored, absent ones get defaults: a journal survives an upgrade.

    Raises:
        msgspec.DecodeError: a kind of record that this program does not know.
    """
    return _decoder.decode(payload)
