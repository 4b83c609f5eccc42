"""The journal's records: an attempt opens, progresses, closes; a decision is taken, something is noted of a request."""

from __future__ import annotations

import msgspec

from gateway.ledger.rows import Decision, LedgerRow, Note


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


class Noted(msgspec.Struct, tag="noted"):
    """What happened to a request beside its attempts."""

    note: Note


Record = Open | Progress | Close | Decided | Noted

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def decode(payload: bytes) -> Record:
    """A record from its bytes. Unknown fields are ignored, absent ones get defaults: a journal survives an upgrade.

    Raises:
        msgspec.DecodeError: a kind of record that this program does not know.
    """
    return _decoder.decode(payload)


def concerns_database(payload: bytes) -> bool:
    """Whether these are the bytes of a Close, a Decided or a Noted: cheaper than decoding what only recovery reads."""
    return not payload.startswith(_RECOVERY_ONLY)


# Every record begins with its tag, so the first bytes of an encoded one tell the kind (up to the next field's name).
_RECOVERY_ONLY = tuple(
    encode(record)[: len(b"\x82\xa4type\xa8") + len(kind)]
    for kind, record in (
        ("open", Open(LedgerRow(attempt_id="", request_id="", attempt=1, ts_ms=0))),
        ("progress", Progress("", 0, 0)),
    )
)
