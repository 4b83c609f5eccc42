"""What several routes have in common: times, amounts, and the limits of organisations, teams, projects and keys."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from gateway.access.ceilings import LimitChange
from gateway.dialects.errors import BadRequest
from gateway.ledger.money import InvalidAmount, format_usd, parse_usd
from gateway.ledger.reports import InvalidReport, parse_moment
from policies.schema.base import seconds

# No time is longer than this: what shall last for ever has no end.
_LONGEST: Final = timedelta(days=36_500)


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and a monthly budget as they are given. Null takes a limit away; what is left out stays as it is.

    `budget_usd` is dollars per UTC calendar month: a string such as "12.50", or a whole number.
    """

    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    parallel: int | UnsetType | None = UNSET
    budget_usd: str | int | UnsetType | None = UNSET


def limit_change(given: Ceilings) -> LimitChange:
    """The same for the functions that keep it.

    Raises:
        BadRequest: an amount that is none.
    """
    return LimitChange(**limit_fields(given))


def limit_fields(given: Ceilings) -> dict[str, Any]:
    """The fields of a `LimitChange`; raises as `limit_change`."""
    fields: dict[str, Any] = {
        name: getattr(given, name) for name in ("requests_per_minute", "tokens_per_minute", "parallel")
    }
    budget = given.budget_usd
    if budget is None or isinstance(budget, UnsetType):
        return {**fields, "budget_nanousd": budget}
    try:
        return {**fields, "budget_nanousd": parse_usd(budget)}
    except InvalidAmount as error:
        raise BadRequest(f"'budget_usd': {error}", code="invalid_value", param="budget_usd") from None


def usd(nanousd: int | None) -> str | None:
    """Dollars as a decimal string, exact."""
    return None if nanousd is None else format_usd(nanousd)


def when(ms: int | None) -> str | None:
    """UTC milliseconds as ISO 8601."""
    if ms is None:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_ahead_ms(text: str, field: str) -> int:
    """UTC milliseconds of `2027-01-31`, `2027-01-31T12:00:00Z` or a time from now: `12h`, `30d`.

    Raises:
        BadRequest: it is none of these.
    """
    with suppress(ValueError, OverflowError):
        return int((datetime.now(UTC) + _span(text)).timestamp() * 1000)
    # A time ago, which a report would take, is no time ahead.
    if not text[:-1].isdecimal():
        with suppress(InvalidReport, OverflowError):
            return int(parse_moment(text).timestamp() * 1000)
    raise BadRequest(
        f"'{field}' must be a date (2027-01-31), a moment (2027-01-31T12:00:00Z) or a time from now (12h, 30d), "
        f"not '{text[:100]}'.",
        code="invalid_value",
        param=field,
    )


def duration_ms(text: str, field: str) -> int:
    """Milliseconds of `90s`, `30m`, `24h`, `7d`, `4w`, or `0`.

    Raises:
        BadRequest: it is none of these.
    """
    if text == "0":
        return 0
    with suppress(ValueError, OverflowError):
        return int(_span(text).total_seconds() * 1000)
    raise BadRequest(
        f"'{field}' must be a whole number and a unit, as in 30m, 24h or 7d, not '{text[:100]}'.",
        code="invalid_value",
        param=field,
    )


def check_known(names: Iterable[str] | UnsetType | None, known: Iterable[str], field: str) -> None:
    """Raises BadRequest for a name that is not among those known."""
    if names is None or isinstance(names, UnsetType):
        return
    choices = list(known)
    for name in names:
        if name not in choices:
            text = f"'{field}' does not know '{name[:100]}': choose from {', '.join(choices)}."
            raise BadRequest(text, code="invalid_value", param=field)


def _span(text: str) -> timedelta:
    span = timedelta(seconds=seconds(text))
    if span > _LONGEST:
        raise ValueError
    return span
