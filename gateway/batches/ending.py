"""From results to files: what lines came to, in the order of the input, and who was not asked any more.

The files are written first and seen with the last step of the batch, so nobody ever finds half of one. Killed in
between, they are written again, and what was there is purged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.batches.checking import Wrong, read_line
from gateway.batches.line import unasked_line
from gateway.batches.record import Batch, Fault, Status
from gateway.batches.results import Result, Results
from gateway.batches.store import BatchStore
from gateway.files.store import FileStore, Writing, lines_of, named

# Results that are put at once.
_HELD: Final = 256
_WHY: Final = {
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "failed": (
        "key_not_in_force",
        "This request was not executed, because the batch's API key was revoked or expired.",
    ),
}


class _File:
    """One of the two files; there is none until it has a line."""

    def __init__(self, files: FileStore, batch: Batch, what: str) -> None:
        self._files = files
        self._batch = batch
        self._name = f"{batch.id}_{what}.jsonl"
        self._writing: Writing | None = None

    async def add(self, line: bytes) -> None:
        if self._writing is None:
            self._writing = await self._files.write(self._batch.project_id, "batch_output", bounded=False)
        await self._writing.add(line)

    async def close(self) -> dict[str, Any] | None:
        """Its row, once it is on disk; None: it has no line."""
        if self._writing is None:
            return None
        file = await self._writing.close()
        return msgspec.structs.asdict(named(file, self._name, self._batch.output_expires_s))

    async def abandon(self) -> None:
        if self._writing is not None:
            await self._writing.abandon()


async def end(
    files: FileStore,
    store: BatchStore,
    results: Results,
    batch: Batch,
    owner: str,
    to: Status,
    faults: Sequence[Fault],
) -> None:
    """Make the files of a batch and end it. One that is not the owner's any more stays as it is.

    Raises:
        FilesUnavailable, StorageFull, SQLAlchemyError: not now; nothing has changed.
    """
    output, errors = _File(files, batch, "output"), _File(files, batch, "error")
    ended = False
    try:
        if to != "completed" and batch.total:
            await _keep_unasked(files, results, batch, to)
        async for ok, line in results.bodies(batch.id):
            await (output if ok else errors).add(line)
        made = {"output_file_id": await output.close(), "error_file_id": await errors.close()}
        values: dict[str, Any] = {name: row["id"] for name, row in made.items() if row is not None}
        if faults:
            values["errors"] = msgspec.json.encode(faults).decode()
        ended = await store.end(batch, owner, to, [row for row in made.values() if row is not None], **values)
    finally:
        if not ended:
            await output.abandon()
            await errors.abandon()


async def _keep_unasked(files: FileStore, results: Results, batch: Batch, to: Status) -> None:
    """Lines that have no result get one that says why, so that every line is in one of the files."""
    code, message = _WHY[to]
    done, number = await results.done(batch.id), 0
    held: list[Result] = []
    async for data in lines_of(files.content.read(batch.input_file_id), 1 << 62):
        number += 1
        if number in done:
            continue
        try:
            line = read_line(number, data, batch.endpoint)
        except Wrong:
            continue  # it was never checked
        if line is not None:
            body = unasked_line(line.custom_id, code, message)
            held.append(Result(batch_id=batch.id, line=number, ok=False, body=body))
        if len(held) >= _HELD:
            await results.put_all(held)
            held = []
    await results.put_all(held)
