"""`tierline batches`: batches of requests that are under way or have ended. Their work is in `gateway.batches`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import (
    Column,
    ConfigOption,
    Exit,
    JsonOption,
    fail,
    print_json,
    print_table,
    settings_or_exit,
    with_database,
)

if TYPE_CHECKING:
    from gateway.batches.record import Batch
    from gateway.ledger.database import Database

app = typer.Typer(no_args_is_help=True, help="Batches of requests: list, show, cancel.")
BatchArgument = Annotated[str, typer.Argument(metavar="BATCH", help="Its id, as `tierline batches list` shows it.")]


@app.command("list")
def list_(
    status: Annotated[str | None, typer.Option(help="Only these: validating, in_progress, …, unfinished.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest so many.")] = 50,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show batches of all projects, the newest first.

    Exit code 2: there is no such status.
    """
    from gateway.batches.record import STATUSES
    from gateway.batches.store import BatchStore
    from gateway.cli.secrets import when
    from gateway.files.store import UNFINISHED

    if status not in (None, "unfinished", *STATUSES):
        fail(f"there is no status '{status}'; choose from unfinished, {', '.join(STATUSES)}", Exit.USAGE)
    statuses = UNFINISHED if status == "unfinished" else None if status is None else (status,)
    found = with_database(
        settings_or_exit(config), lambda database: BatchStore(database).page(statuses=statuses, limit=limit)
    )
    if as_json:
        print_json([_public(batch) for batch in found])
        return
    columns = [Column(title, "value") for title in ("batch", "status", "endpoint", "made")]
    columns += [Column(title, "number") for title in ("lines", "completed", "failed")]
    rows = [
        [batch.id, batch.status, batch.endpoint, when(batch.created_ms), str(batch.total), str(batch.completed),
         str(batch.failed)]
        for batch in found
    ]  # fmt: skip
    print_table(columns, rows)


@app.command()
def show(batch_id: BatchArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show one batch: how far it is, what is wrong with it, what its requests cost so far.

    Exit code 1: there is no such batch.
    """
    from gateway.batches.store import BatchStore
    from gateway.cli.secrets import when
    from gateway.ledger.money import format_usd
    from gateway.ledger.reports import batch_spent

    async def work(database: Database) -> tuple[Batch, tuple[int, int]] | None:
        batch = await BatchStore(database).get(batch_id)
        if batch is None:
            return None
        return batch, await batch_spent(database, batch.id, batch.key_id, batch.created_ms)

    found = with_database(settings_or_exit(config), work)
    if found is None:
        fail(f"there is no batch {batch_id}")
    batch, (cost_nanousd, attempts) = found
    if as_json:
        print_json({**_public(batch), "cost_nanousd": cost_nanousd, "attempts": attempts})
        return
    print(f"batch {batch.id}")
    lines = {
        "status": batch.status,
        "endpoint": batch.endpoint,
        "project": batch.project_id,
        "key": batch.key_id,
        "made": when(batch.created_ms),
        "until": when(batch.expires_ms),
        "ended": when(batch.ended_ms),
        "lines": f"{batch.total}, of which {batch.completed} completed and {batch.failed} failed",
        "tokens": f"{batch.input_tokens} in, {batch.output_tokens} out",
        "cost": f"${format_usd(cost_nanousd)} for {attempts} attempts",
        "input": batch.input_file_id,
        "output": batch.output_file_id or "-",
        "errors": batch.error_file_id or "-",
    }
    for name, value in lines.items():
        print(f"  {name:<10} {value}")
    for fault in batch.faults():
        where = f"line {fault['line']}: " if fault.get("line") else ""
        print(f"  {'fault':<10} {where}{fault['message']} ({fault['code']})")


@app.command()
def cancel(batch_id: BatchArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Stop a batch within a second or two; what was answered by then is kept.

    Exit code 1: there is no such batch, or it has ended already.
    """
    from gateway.batches.store import BatchStore

    batch = with_database(settings_or_exit(config), lambda database: BatchStore(database).cancel(batch_id))
    if batch is None:
        fail(f"there is no batch {batch_id}")
    if batch.status not in ("cancelling", "cancelled"):
        fail(f"the batch {batch_id} is {batch.status}: there is nothing left to cancel")
    if as_json:
        print_json(_public(batch))
    else:
        print(f"batch {batch.id} is {batch.status}")


def _public(batch: Batch) -> dict[str, Any]:
    return {**batch.shown(), "project_id": batch.project_id, "key_id": batch.key_id}
