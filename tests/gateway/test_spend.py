"""What limits ask of the ledger: sums of a UTC month by scope, with some requests left out, and single requests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.ledger.database import Database
from gateway.ledger.rows import LedgerRow, new_id
from gateway.ledger.spend import month_spend, used_by
from gateway.limiter import _request_id_of_now

NOVEMBER = 2026 * 12 + 10


def moment(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc, arg-type]


def row(**fields: Any) -> LedgerRow:
    known = {"attempt_id": new_id(), "request_id": f"req-{new_id()}", "attempt": 1, "ts_ms": moment(2026, 11, 29)}
    return msgspec.convert({**known, **fields}, LedgerRow)


async def test_the_sums_are_of_the_utc_month(database: Database) -> None:
    first, last = moment(2026, 11, 1), moment(2026, 12, 1) - 1
    for ts, cost in ((first - 1, 1000), (first, 1), (last, 2), (last + 1, 2000)):
        await database.insert_rows([row(ts_ms=ts, key_id="k", team_id="t", policy="p", cost_nanousd=cost)])
    assert await month_spend(database, NOVEMBER) == {"key:k": 3, "team:t": 3, "policy:p": 3}
    assert (await month_spend(database, NOVEMBER + 1))["key:k"] == 2000
    assert await month_spend(database, NOVEMBER + 2) == {}


async def test_requests_are_left_out_by_their_id(database: Database) -> None:
    before = [f"req-{new_id()}" for _ in range(1200)]
    cut = _request_id_of_now()
    assert cut > max(before)
    after = "req-ffffffff-ffff-7fff-8fff-ffffffffffff"
    rows = [row(request_id=request, key_id="k", policy="p", cost_nanousd=1) for request in before]
    rows += [row(request_id=after, key_id="k", cost_nanousd=1_000_000)]
    await database.insert_rows(rows)
    assert (await month_spend(database, NOVEMBER, before=cut))["key:k"] == 1200

    async def without() -> list[str]:
        return [*before[:700], after, "req-unknown"]

    assert await month_spend(database, NOVEMBER, before=cut, without=without) == {"key:k": 500, "policy:p": 500}


async def test_what_requests_used_is_that_of_all_their_attempts(database: Database) -> None:
    tried = {"request_id": "twice", "input_tokens": 5, "output_tokens": 2, "cost_nanousd": 10}
    await database.insert_rows([row(**tried, attempt=1), row(**tried, attempt=2), row(request_id="other")])
    assert await used_by(database, ["twice", "never"]) == {"twice": (14, 20)}
    assert await used_by(database, []) == {}
