"""What the commands for keys of models and of the admin API share: secrets that are shown once, and replaced."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Protocol

import typer

from gateway.cli.common import duration, print_json

OverlapOption = Annotated[
    str, typer.Option(metavar="TIME", help="How long the old secret stays good: 30m, 24h, 7d; 0 ends it at once.")
]


class Former(Protocol):
    """A secret that was replaced. Times are UTC milliseconds."""

    @property
    def prefix(self) -> str: ...
    @property
    def valid_until_ms(self) -> int | None: ...
    @property
    def valid(self) -> bool: ...


def overlap_ms(overlap: str) -> int:
    """Milliseconds of `--overlap`, or exit code 2."""
    return 0 if overlap == "0" else int(duration(overlap, "--overlap").total_seconds() * 1000)


def old_secret(former: Former, overlap_ms: int) -> str:
    """What becomes of the secret that was replaced."""
    until = f"works until {when(former.valid_until_ms)} UTC" if overlap_ms else "works no more"
    return f"The old secret, {former.prefix}…, {until}.\n"


def print_token(token: str, what: str, public: dict[str, Any], as_json: bool, *, note: str = "") -> None:
    """The token alone on standard output, so that a script can take it; the words beside it."""
    if as_json:
        print_json({**public, "key": token})
        return
    print(token)
    text = f"\n{what}.\n{note}Keep it now: it is stored only as a hash and cannot be shown again."
    typer.echo(text, err=True)


def state_cell(state: str, replaced: list[Any]) -> str:
    """The state of a key in a table, with the former secrets that still work."""
    former = [f"{one.prefix}… until {when(one.valid_until_ms)}" for one in replaced if one.valid]
    return f"active, and {', '.join(former)}" if former and state == "active" else state


def when(ms: int | None) -> str:
    """A time in a table, UTC."""
    return "-" if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M}"
