"""`tierline cost`: what was spent, from the ledger. The sums are made in `gateway.ledger.reports`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gateway.cli.common import ConfigOption, Exit, JsonOption, fail, settings_or_exit

if TYPE_CHECKING:
    from gateway.ledger.reports import Report

app = typer.Typer(no_args_is_help=True, help="What was spent, by team, model, tier, day.")


@app.callback()
def _group() -> None:
    """Keeps `report` a word of its own while it is the only command."""


@app.command()
def report(
    by: Annotated[
        str,
        typer.Option(
            help="Comma-separated: organisation, team, project, key, policy, tier, model, backend, cache, outcome, "
            "day. Empty: one line for everything."
        ),
    ] = "team,model",
    since: Annotated[str | None, typer.Option(metavar="WHEN", help="From: 2026-11-30, or ago: 7d, 24h.")] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Until, exclusive. Days are UTC.")] = None,
    output: Annotated[Literal["table", "json", "csv"], typer.Option("--format", "-f")] = "table",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cost by the given dimensions. The total is the sum of the rows to the nano-dollar.

    Exit code 1: the database cannot be read, or contradicts itself; 2: an unknown dimension or date.
    """
    from sqlalchemy.exc import DBAPIError

    from gateway.ledger.database import Database, DatabaseError
    from gateway.ledger.reports import InvalidReport, LedgerMismatch, cost_report, parse_moment

    settings = settings_or_exit(config)

    async def run() -> Report:
        dimensions = [name.strip() for name in by.split(",") if name.strip()]
        span = [parse_moment(text) if text else None for text in (since, until)]
        database = await Database.open(settings.database_url())
        try:
            return await cost_report(database, dimensions, *span)
        finally:
            await database.close()

    try:
        found = asyncio.run(run())
    except InvalidReport as error:
        fail(str(error), Exit.USAGE)
    except (DatabaseError, LedgerMismatch) as error:
        fail(str(error))
    except DBAPIError as error:
        fail(f"the database failed: {error.orig}")
    if as_json or output == "json":
        print(found.to_json())
    elif output == "csv":
        print(found.to_csv(), end="")
    else:
        _print_table(found)


def _print_table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gateway.ledger.money import format_usd

    counts = {
        "requests": "requests",
        "input_tokens": "input",
        "cached_input_tokens": "cached",
        "output_tokens": "output",
    }
    table = Table(box=None, pad_edge=False, show_footer=bool(report.by))
    for i, name in enumerate(report.by):
        table.add_column(name, footer="total" if i == 0 else "", overflow="fold")
    for name, title in counts.items():
        table.add_column(title, footer=f"{report.total[name]:,}", justify="right")
    for title in ("cost", "saved"):
        table.add_column(f"{title} $", footer=format_usd(report.total[f"{title}_nanousd"]), justify="right")
    for row in report.rows:
        cells = [str(row[name]) or "-" for name in report.by] + [f"{row[name]:,}" for name in counts]
        table.add_row(*(Text(cell) for cell in cells), *(format_usd(row[f"{t}_nanousd"]) for t in ("cost", "saved")))
    Console().print(table)
