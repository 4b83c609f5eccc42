"""`tierline owners`: organisations, teams and projects, with limits, budgets and usage. The work is in
`gateway.access.levels`, the words here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from gateway.cli.ceilings import (
    BudgetOption,
    ParallelOption,
    RequestsOption,
    TokensOption,
    limit_cells,
    limit_change,
)
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
    from gateway.access.levels import LevelInfo, LevelUsage
    from gateway.ledger.database import Database

app = typer.Typer(no_args_is_help=True, help="Organisations, teams and projects: limits, budgets, usage.")

_Result = TypeVar("_Result")
OwnerArgument = Annotated[
    str,
    typer.Argument(metavar="OWNER", help="organisation:NAME, team:NAME, project:NAME; also team:ORGANISATION/NAME."),
]
KindOption = Annotated[Literal["organisation", "team", "project"] | None, typer.Option(help="Only these.")]


@app.command("list")
def list_(kind: KindOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show organisations, teams and projects with their limits. Keys have their own: `tierline keys list`."""
    from gateway.access.levels import list_levels

    found = _with_database(config, lambda database: list_levels(database, kind))
    if as_json:
        print_json([_public(info) for info in found])
        return
    columns = [Column("kind", "value"), Column("name")]
    columns += [Column(title, "number") for title in ("rpm", "tpm", "parallel", "budget $", "keys")]
    rows = [[info.kind, info.path, *limit_cells(info), str(info.keys)] for info in found]
    print_table(columns, rows)


@app.command()
def create(
    owner: OwnerArgument,
    rpm: RequestsOption = None,
    tpm: TokensOption = None,
    parallel: ParallelOption = None,
    budget_usd: BudgetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make one before its first key: `team:acme/support`. Those above it are made where they do not exist.

    Exit code 2: it exists, or a name or limit that makes no sense.
    """
    from gateway.access.levels import create_level

    change = limit_change(rpm, tpm, parallel, budget_usd)
    info = _with_database(config, lambda database: create_level(database, owner, change))
    _print(info, "made", as_json)


@app.command("set")
def set_(
    owner: OwnerArgument,
    rpm: RequestsOption = None,
    tpm: TokensOption = None,
    parallel: ParallelOption = None,
    budget_usd: BudgetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set limits and the monthly budget. What is not named stays; `none` takes a limit away.

    Running gateways keep to it within a second, and a budget counts what was spent in this month already.

    Exit code 2: no such owner, or a limit that makes no sense.
    """
    from gateway.access.levels import change_level

    change = limit_change(rpm, tpm, parallel, budget_usd)
    info = _with_database(config, lambda database: change_level(database, owner, change))
    _print(info, "set", as_json)


@app.command()
def usage(
    owner: Annotated[str | None, typer.Argument(metavar="[OWNER]", help="As for `set`; default: all.")] = None,
    kind: KindOption = None,
    month: Annotated[
        str | None, typer.Option(metavar="MONTH", help="2026-10; default: the running month (UTC).")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """What each used in a month, from the ledger, beside its budget of today.

    Exit code 2: no such owner, or a month that is none.
    """
    from gateway.access.levels import level_usage

    number = None if month is None else _month(month)
    found = _with_database(config, lambda database: level_usage(database, kind, owner, number))
    if as_json:
        print_json([_public_usage(one) for one in found])
        return
    columns = [Column("kind", "value"), Column("name"), Column("month", "value")]
    columns += [Column(title, "number") for title in ("requests", "input", "output", "cost $", "budget $", "used")]
    print_table(columns, [_usage_row(one) for one in found])


def _with_database(config: Path | None, work: Callable[[Database], Awaitable[_Result]]) -> _Result:
    """Run `work` on the configured database, with what can be wrong with owners said in words."""
    from gateway.access.ceilings import InvalidCeiling
    from gateway.access.levels import InvalidLevel

    return with_database(settings_or_exit(config), work, usage=(InvalidLevel, InvalidCeiling))


def _month(text: str) -> int:
    try:
        moment = datetime.strptime(text, "%Y-%m")
    except ValueError:
        fail(f"--month: '{text}' is no month: write it as in 2026-10", Exit.USAGE)
    return moment.year * 12 + moment.month - 1


def _print(info: LevelInfo, done: str, as_json: bool) -> None:
    if as_json:
        print_json(_public(info))
        return
    titles = ("rpm", "tpm", "parallel", "budget $")
    limits = ", ".join(f"{title} {cell}" for title, cell in zip(titles, limit_cells(info), strict=True))
    print(f"{done} {info.kind} {info.path}: {limits}")


def _usage_row(usage: LevelUsage) -> list[str]:
    from gateway.ledger.money import format_usd

    used, share = usage.used, usage.budget_used
    return [
        usage.level.kind,
        usage.level.path,
        usage.month,
        *(f"{number:,}" for number in (used.requests, used.input_tokens, used.output_tokens)),
        format_usd(used.cost_nanousd),
        limit_cells(usage.level)[-1],
        "-" if share is None else f"{share:.1%}",
    ]


def _public(info: LevelInfo) -> dict[str, Any]:
    import msgspec

    return {**msgspec.structs.asdict(info), "path": info.path}


def _public_usage(usage: LevelUsage) -> dict[str, Any]:
    import msgspec

    from gateway.ledger.money import format_usd

    used = msgspec.structs.asdict(usage.used)
    dollars = {"cost_usd": format_usd(usage.used.cost_nanousd), "saved_usd": format_usd(usage.used.saved_nanousd)}
    return {"owner": _public(usage.level), "month": usage.month, **used, **dollars, "budget_used": usage.budget_used}
