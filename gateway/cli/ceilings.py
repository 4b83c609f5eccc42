"""Options that set limits, budget and scopes of keys and of those above them: read here, checked in `gateway.access`.

An option that is not given changes nothing; `none` takes a limit away, or opens what was restricted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UNSET, UnsetType

from gateway.cli.common import Exit, fail

if TYPE_CHECKING:
    from gateway.access.ceilings import LimitChange
    from gateway.access.key_info import KeyInfo
    from gateway.access.levels import LevelInfo

NONE = "none"
RequestsOption = Annotated[str | None, typer.Option("--rpm", metavar="N|none", help="Requests per minute.")]
TokensOption = Annotated[str | None, typer.Option("--tpm", metavar="N|none", help="Tokens per minute.")]
ParallelOption = Annotated[str | None, typer.Option("--parallel", metavar="N|none", help="Requests at once.")]
BudgetOption = Annotated[
    str | None, typer.Option("--budget-usd", metavar="DOLLARS|none", help="Budget per calendar month (UTC).")
]


def limit_change(rpm: str | None, tpm: str | None, parallel: str | None, budget_usd: str | None) -> LimitChange:
    """The change that these options ask for, or exit code 2."""
    from gateway.access.ceilings import LimitChange

    return LimitChange(
        requests_per_minute=_whole(rpm, "--rpm"),
        tokens_per_minute=_whole(tpm, "--tpm"),
        parallel=_whole(parallel, "--parallel"),
        budget_nanousd=_money(budget_usd, "--budget-usd"),
    )


def names(given: list[str] | None) -> list[str] | UnsetType | None:
    """A repeatable option: `none` alone for all."""
    return UNSET if not given else None if given == [NONE] else given


def limit_cells(info: KeyInfo | LevelInfo) -> list[str]:
    """The cells of a table for requests and tokens per minute, requests at once, and the budget."""
    from gateway.ledger.money import format_usd

    limits = (info.requests_per_minute, info.tokens_per_minute, info.parallel)
    budget = "-" if info.budget_nanousd is None else format_usd(info.budget_nanousd)
    return [*("-" if limit is None else str(limit) for limit in limits), budget]


def _whole(text: str | None, option: str) -> int | UnsetType | None:
    if text is None:
        return UNSET
    if text == NONE:
        return None
    if not (text.isascii() and text.isdecimal()):
        fail(f"{option}: '{text}' is neither a whole number nor '{NONE}'", Exit.USAGE)
    return int(text)


def _money(text: str | None, option: str) -> int | UnsetType | None:
    from gateway.ledger.money import InvalidAmount, parse_usd

    if text is None:
        return UNSET
    if text == NONE:
        return None
    try:
        return parse_usd(text)
    except InvalidAmount as error:
        fail(f"{option}: {error}", Exit.USAGE)
