"""Which limiter this gateway uses: counters in memory, or in Redis where `storage.redis_url` names one.

What the limiter asks of the ledger comes from here, so that it knows no database: the month's sums, and what single
requests used.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.access.counters_memory import MemoryLimiter
from gateway.access.counting import month_of
from gateway.ledger.database import Database
from gateway.ledger.rows import new_id
from gateway.ledger.spend import month_spend, used_by
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.access.counters_redis import Ids
    from gateway.access.counters_shared import SharedLimiter

# Two machines' clocks may differ by this much when Redis has lost its data, and no request is counted twice or not.
_CLOCK_SKEW_S = 0.1


class MissingExtra(ValueError):
    """The settings ask for Redis, but its client is not installed."""


async def open_limiter(
    settings: Settings, database: Database, journals: Sequence[Path]
) -> MemoryLimiter | SharedLimiter:
    """Make the limiter and start it. `journals`: this process's own first, then those it has taken over.

    Raises:
        MissingExtra: see there. ValueError: the URL makes no sense.
    """
    month, _ = month_of(time.time())
    spent = await month_spend(database, month)
    if settings.storage.redis_url is None:
        return MemoryLimiter(spent)
    try:
        from gateway.access.counters_redis import SCRIPT, RedisLimiter
        from gateway.access.counters_shared import SharedLimiter
        from gateway.access.redis_shared import open_channel
    except ModuleNotFoundError as error:
        raise MissingExtra(f"storage.redis_url needs {error.name}: pip install 'tierline[redis]'") from error

    async def sums(month: int, before: str, without: Ids) -> Mapping[str, int]:
        return await month_spend(database, month, before=before, without=without)

    async def used(request_ids: Collection[str]) -> Mapping[str, tuple[int, int]]:
        return await used_by(database, request_ids)

    channel = open_channel(settings.storage, SCRIPT)
    owner, *taken_over = [_identity(journal) for journal in journals]
    limiter = SharedLimiter(
        RedisLimiter(channel, owner=owner, spent=sums, new_cut=_request_id_of_now),
        settings.limits.when_redis_is_down,
        processes=settings.server.workers,
        spent=spent,
        used_by=used,
        former_owners=taken_over,
    )
    await limiter.start()
    return limiter


def _request_id_of_now() -> str:
    """An id that no request of any gateway has reached yet, and every later one will have passed."""
    later_ms = int((time.time() + _CLOCK_SKEW_S) * 1000)
    return f"req-{uuid.UUID(int=(later_ms << 80) | (7 << 76) | (0b10 << 62))}"


def _identity(journal: Path) -> str:
    """What the holds of a process are known by. It goes with the journal, because the journal has their rows."""
    path = journal / "identity"
    if not path.exists():
        path.write_text(new_id())
    return path.read_text().strip()
