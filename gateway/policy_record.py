"""Keeps every policy version that comes into force in the database, beside the requests: `policy_versions.py`.

The thread that watches the policies hands over each set (`saw`); a task writes them, tries again while the database is
away, and notes now and then that the present ones are still in force. No request waits for any of it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from pathlib import Path
from typing import Final

from gateway.ledger.database import Database, is_outage
from gateway.ledger.policy_versions import PolicyVersion, keep
from gateway.ledger.rows import now_ms
from policies.load import PolicySet
from policies.watch import PolicyStore

logger = logging.getLogger("tierline.policies")

LOOK_S: Final = 1.0
STILL_IN_FORCE_S: Final = 600.0  # how old `last_seen_ms` gets while a policy is in force
RETRY_S: Final = 5.0
MOST_WAITING: Final = 1000  # versions that wait for the database; the oldest go first


class PolicyRecord:
    """What this process has seen in force, on its way to the database. `worker`: which of several processes it is."""

    def __init__(self, database: Database, store: PolicyStore, worker: int) -> None:
        self._database = database
        self._store = store
        self._seen_by = f"{socket.gethostname()[:64]}/{worker}"
        self._waiting: OrderedDict[tuple[str, str], PolicyVersion] = OrderedDict()
        self._current: PolicySet | None = None
        self._again_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="policy record")

    async def stop(self) -> None:
        """Write what is waiting, if the database takes it, and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.saw(self._store.current)
        await self._write()

    def saw(self, policies: PolicySet) -> None:
        """Note a set that is in force. Safe to call from any thread: each step is one operation on one dictionary."""
        now = now_ms()
        for policy in policies.policies:
            version = PolicyVersion(
                name=policy.name,
                version=policy.version,
                file=Path(policy.file).name,
                text=policy.text,
                seen_by=self._seen_by,
                first_seen_ms=now,
                last_seen_ms=now,
            )
            self._waiting.setdefault((policy.name, policy.version), version)
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)

    async def _run(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            current = self._store.current
            if current is not self._current or now >= self._again_at:
                if self._current is not None:
                    self.saw(self._current)  # until now
                self._current, self._again_at = current, now + STILL_IN_FORCE_S
                self.saw(current)
            await asyncio.sleep(LOOK_S if await self._write() else RETRY_S)

    async def _write(self) -> bool:
        """Returns whether nothing waits any more."""
        batch = list(self._waiting.items())
        if not batch:
            return True
        try:
            await keep(self._database, [version for _, version in batch])
        except Exception as error:
            if not is_outage(error):
                logger.exception("policy versions could not be kept")
            return False
        for key, version in batch:
            if self._waiting.get(key) is version:
                del self._waiting[key]
        return True
