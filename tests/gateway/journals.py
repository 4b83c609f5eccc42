"""What a journal holds, for its tests."""

from __future__ import annotations

from gateway.ledger import frames
from gateway.ledger.journal import Journal, Position
from gateway.ledger.records import Close, Record, decode
from gateway.ledger.rows import LedgerRow


def row(attempt_id: str, **fields: int | str) -> LedgerRow:
    return LedgerRow(attempt_id=attempt_id, request_id="r", attempt=1, ts_ms=1, **fields)  # type: ignore[arg-type]


def contents(journal: Journal) -> list[Record]:
    """Every record on disk, oldest first."""
    found: list[Record] = []
    for segment in journal.segments():
        buffer, salt = journal.load(Position(segment, 0))
        found += [decode(f.payload) for f in frames.unpack(buffer, salt, frames.HEADER_BYTES) if f.payload is not None]
    return found


def closed(journal: Journal) -> list[str]:
    return [record.row.attempt_id for record in contents(journal) if isinstance(record, Close)]
