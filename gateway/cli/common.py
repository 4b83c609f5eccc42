"""What all commands share: exit codes, how an error is said, how the configuration is found, how a table is laid out.

Results go to standard output, everything else to standard error, so that output can be piped.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import typer

from gateway.settings import Settings, load
from policies.yamlfile import InvalidFile

if TYPE_CHECKING:
    from rich.text import Text

    from gateway.ledger.database import Database

_Result = TypeVar("_Result")
# A column of text is not folded to less than this; a terminal too narrow even for that gets one line per cell.
_NARROWEST_TEXT = 12
_GAP = 2
# No time on a command line is longer than this: a key that shall live for ever has no expiry.
_LONGEST = timedelta(days=36_500)


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1  # it was tried and did not work; standard error says why
    USAGE = 2  # wrong command line, or a configuration file that cannot be used


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="The platform file. Default: $TIERLINE_CONFIG, else tierline.yaml.", metavar="FILE"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def fail(message: str, code: Exit = Exit.FAILED) -> NoReturn:
    """Say what is wrong on standard error and end the command."""
    print(f"tierline: {message}", file=sys.stderr)
    raise typer.Exit(code)


def settings_or_exit(config: Path | None, *, here: bool = False) -> Settings:
    """The settings, or every fault of the file with its line and exit code 2. `here`: as for `load`."""
    try:
        return load(config, here=here)
    except InvalidFile as error:
        lines = "\n".join(str(problem) for problem in error.problems)
        hint = "" if config_path(config).exists() else "\nName the file with --config FILE or TIERLINE_CONFIG."
        fail(f"the configuration cannot be used:\n{lines}{hint}", Exit.USAGE)


def config_path(config: Path | None) -> Path:
    """The file that `load` reads, absolute."""
    import os

    return (config or Path(os.environ.get("TIERLINE_CONFIG", "tierline.yaml"))).resolve()


def with_database(
    settings: Settings,
    work: Callable[[Database], Awaitable[_Result]],
    *,
    usage: tuple[type[Exception], ...] = (),
    failures: tuple[type[Exception], ...] = (),
) -> _Result:
    """Run `work` on the configured database.

    `usage` and `failures` are errors of the work whose message is for the user: they end the command with exit code 2
    or 1, as does a database that cannot be used.
    """
    from sqlalchemy.exc import DBAPIError

    from gateway.ledger.database import Database, DatabaseError

    expected: tuple[type[Exception], ...] = (DatabaseError, *failures)

    async def run() -> _Result:
        database = await Database.open(settings.database_url())
        try:
            return await work(database)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except usage as error:
        fail(str(error), Exit.USAGE)
    except expected as error:
        fail(str(error))
    except DBAPIError as error:
        fail(f"the database failed: {error.orig}")


def short(path: Path) -> str:
    """The path as it can be typed from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def closest(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'support'?` where a known name is near, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def check_models(settings: Settings, wanted: Iterable[str], option: str, also: Sequence[str] = ()) -> None:
    """Exit code 2 for a model that tierline.yaml does not have. `also` are further words that the option takes."""
    known = [*also, *settings.models]
    for name in wanted:
        if name not in known:
            names = ", ".join(known) or "none"
            fail(f"{option}: there is no model '{name}'.{closest(name, known)} The models are: {names}.", Exit.USAGE)


def duration(text: str, option: str) -> timedelta:
    """A time such as `90s`, `30m`, `24h`, `7d` or `4w`, or exit code 2."""
    from policies.schema.base import seconds

    with suppress(ValueError, OverflowError):
        if (found := timedelta(seconds=seconds(text))) <= _LONGEST:
            return found
    fail(f"{option}: '{text}' is no time: write a whole number and a unit, as in 90s, 30m, 24h, 7d or 4w.", Exit.USAGE)


class Column(NamedTuple):
    """A column of a table: `text` may be folded in a narrow terminal, a `value` or a `number` never."""

    title: str
    kind: Literal["text", "value", "number"] = "text"
    footer: str = ""


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table without ever cutting a cell.

    A file or a pipe gets the width that the table needs. In a terminal texts are folded until it fits; where that is
    not enough, each row becomes a list of lines `title  cell`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    body = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    footer = [Text(column.footer) for column in columns]
    has_footer = any(column.footer for column in columns)
    titles = [Text(column.title) for column in columns]
    widths = [max(cell.cell_len for cell in cells) for cells in zip(titles, footer, *body, strict=True)]
    needed = sum(widths) + _GAP * (len(columns) - 1)
    folded = [
        min(width, _NARROWEST_TEXT) if column.kind == "text" else width
        for column, width in zip(columns, widths, strict=True)
    ]
    console = Console()
    if console.is_terminal and console.width < sum(folded) + _GAP * (len(columns) - 1):
        _print_records(titles, [*body, footer] if has_footer else body)
        return
    table = Table(box=None, pad_edge=False, show_header=any(titles), show_footer=has_footer)
    for column, title, end in zip(columns, titles, footer, strict=True):
        justify: Literal["left", "right"] = "right" if column.kind == "number" else "left"
        table.add_column(title, end, justify=justify, no_wrap=column.kind != "text", overflow="fold")
    for row in body:
        table.add_row(*row)
    if console.is_terminal:
        console.print(table)
        return
    console = Console(width=needed)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print_records(titles: Sequence[Text], rows: Sequence[Sequence[Text]]) -> None:
    width = max(title.cell_len for title in titles)
    for number, row in enumerate(rows):
        if number:
            print()
        for title, cell in zip(titles, row, strict=True):
            if cell:
                print(f"{title.plain:<{width}}  {cell.plain}".rstrip())
