"""`tierline cost`: what was spent, from the ledger. The sums are made in `gateway.ledger.reports`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gateway.cli.common import Column, ConfigOption, JsonOption, print_table, settings_or_exit, with_database

if TYPE_CHECKING:
    from gateway.ledger.database import Database
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
            "batch, day. Empty: one line for everything."
        ),
    ] = "team,model",
    since: Annotated[str | None, typer.Option(metavar="WHEN", help="From: 2026-11-30, or ago: 7d, 24h.")] = None,
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Until, exclusive. Days are UTC.")] = None,
    output: Annotated[Literal["table", "json", "csv"], typer.Option("--format", "-f")] = "table",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cost by the given dimensions. The total is the sum of the rows to the nano-dollar.

    Exit code 1: the database cannot be read, or contradicts itself; 2: an unknown dimension, or a span that is none.
    """
    from gateway.ledger.reports import InvalidReport, LedgerMismatch, cost_report, parse_span

    async def run(database: Database) -> Report:
        dimensions = [name.strip() for name in by.split(",") if name.strip()]
        return await cost_report(database, dimensions, *parse_span(since, until))

    found = with_database(settings_or_exit(config), run, usage=(InvalidReport,), failures=(LedgerMismatch,))
    if as_json or output == "json":
        print(found.to_json())
    elif output == "csv":
        print(found.to_csv(), end="")
    else:
        _print_table(found)


def _print_table(report: Report) -> None:
    from gateway.ledger.money import format_usd

    counts = {
        "requests": "requests",
        "input_tokens": "input",
        "cached_input_tokens": "cached",
        "output_tokens": "output",
    }
    amounts = {"cost_nanousd": "cost $", "saved_nanousd": "saved $"}
    total = report.total if report.by else None
    columns = [
        Column(name, "value" if name == "day" else "text", "total" if i == 0 else "")
        for i, name in enumerate(report.by)
    ]
    columns += [Column(title, "number", f"{total[name]:,}" if total else "") for name, title in counts.items()]
    columns += [Column(title, "number", format_usd(total[name]) if total else "") for name, title in amounts.items()]
    print_table(
        columns,
        [
            [
                *(str(row[name]) or "-" for name in report.by),
                *(f"{row[name]:,}" for name in counts),
                *(format_usd(row[name]) for name in amounts),
            ]
            for row in report.rows
        ],
    )
