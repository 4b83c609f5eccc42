"""`/admin/v1/batches`: batches of requests, how far they are and what they cost. To look at: their keys make them."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.admin.call import AdminRoute, Call
from gateway.admin.forms import usd, when
from gateway.admin.paging import Page, Paged, page
from gateway.batches.record import STATUSES, Batch
from gateway.batches.store import BatchStore
from gateway.dialects.errors import BadRequest, NotFound
from gateway.ledger.database import Database
from gateway.ledger.reports import batch_spent


class BatchFilter(Paged, frozen=True, kw_only=True):
    """`status`: only batches that have it, such as in_progress."""

    status: str | None = None


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Of one that runs, the counts are as of now; `faults` say what is wrong with it."""

    id: str
    status: str
    endpoint: str
    organisation_id: str
    project_id: str
    key_id: str
    created: str | None
    expires: str | None
    ended: str | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    faults: list[dict[str, Any]]


class BatchCost(msgspec.Struct, frozen=True, kw_only=True):
    """One batch with what its rows in the ledger come to."""

    batch: BatchView
    cost_usd: str | None
    attempts: int


async def listed(call: Call[BatchFilter, None]) -> Page[BatchView]:
    query, after, mine = call.query, call.query.after(), call.caller.organisation_id
    if query.status is not None and query.status not in STATUSES:
        raise BadRequest(f"'status' must be one of {', '.join(STATUSES)}.", code="invalid_value", param="status")
    statuses = None if query.status is None else (query.status,)

    async def work(database: Database) -> list[Batch]:
        return await BatchStore(database).page(
            organisation_id=mine, statuses=statuses, after=after, limit=query.limit + 1
        )

    found = page(await call.database(work), query.limit, lambda batch: batch.id)
    return Page([_view(batch) for batch in found.data], found.next_cursor)


async def retrieve(call: Call[None, None]) -> BatchCost:
    id = call.path["batch"]

    async def work(database: Database) -> tuple[Batch, tuple[int, int]] | None:
        batch = await BatchStore(database).get(id)
        if batch is None:
            return None
        return batch, await batch_spent(database, batch.id, batch.key_id, batch.created_ms)

    what = f"batch '{id[:100]}'"
    found = await call.database(work)
    if found is None:
        raise NotFound(f"There is no {what}.")
    batch, (cost_nanousd, attempts) = found
    call.check_mine(batch.organisation_id, what)
    return BatchCost(batch=_view(batch), cost_usd=usd(cost_nanousd), attempts=attempts)


ROUTES = [
    AdminRoute("GET", "/admin/v1/batches", "Batches, the newest first.", listed, Page[BatchView], query=BatchFilter),
    AdminRoute("GET", "/admin/v1/batches/{batch}", "One batch and what it cost.", retrieve, BatchCost),
]


def _view(batch: Batch) -> BatchView:
    same = {name: getattr(batch, name) for name in BatchView.__struct_fields__ if name in Batch.__struct_fields__}
    return BatchView(
        **same,
        created=when(batch.created_ms),
        expires=when(batch.expires_ms),
        ended=when(batch.ended_ms),
        faults=batch.faults(),
    )
