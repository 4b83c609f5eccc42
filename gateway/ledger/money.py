"""Money is an integer of nano-dollars: one dollar is 1,000,000,000 of them.

No float ever touches an amount. Prices are integers too (nano-dollars per million tokens), so that the cost of a
token class is one multiplication and one division, rounded half up to a nano-dollar, once per class. The total of
a row is the sum of its rounded classes, hence sums over classes, rows and groups always agree.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation, localcontext
from typing import Final

from gateway.invalid import InvalidValue

NANO: Final = 10**9
MILLION: Final = 10**6
# SQLite and PostgreSQL keep amounts in 64 bits: the largest single amount is about nine billion dollars.
MAX_NANOUSD: Final = 2**63 - 1

# Wide enough for any amount that fits in 64 bits, with room for the digits that are rounded away.
_CONTEXT = Context(prec=60, rounding=ROUND_HALF_UP)


class InvalidAmount(InvalidValue):
    """Text that is no amount of dollars, or one that does not fit."""


def parse_usd(text: str | int | Decimal, *, exact: bool = True) -> int:
    """Dollars to nano-dollars.

    Args:
        text: a decimal number such as `"12.50"`. Floats are not taken: they are not what was meant.
        exact: refuse amounts finer than a nano-dollar; otherwise round them half up.

    Raises:
        InvalidAmount: not a finite decimal number, too fine, or beyond 64 bits.
    """
    try:
        amount = Decimal(text.strip().removeprefix("$").replace("_", "")) if isinstance(text, str) else Decimal(text)
    except InvalidOperation:
        raise InvalidAmount(f"{text!r} is not an amount of dollars; write it like 12.50.") from None
    if not amount.is_finite():
        raise InvalidAmount(f"{text!r} is not a finite amount.")
    if amount.adjusted() > 12:
        raise InvalidAmount(f"{text} dollars is more than a ledger can hold.")
    with localcontext(_CONTEXT):
        nanousd = int((amount * NANO).to_integral_value())
        if exact and Decimal(nanousd) != amount * NANO:
            raise InvalidAmount(f"{text} is finer than a nano-dollar (nine decimals).")
    if abs(nanousd) > MAX_NANOUSD:
        raise InvalidAmount(f"{text} dollars is more than a ledger can hold.")
    return nanousd


def format_usd(nanousd: int, *, min_decimals: int = 2) -> str:
    """Exact decimal dollars without a currency sign: `1_500_000_000` is `"1.50"`, one nano-dollar `"0.000000001"`."""
    sign = "-" if nanousd < 0 else ""
    dollars, fraction = divmod(abs(nanousd), NANO)
    digits = f"{fraction:09d}".rstrip("0").ljust(min_decimals, "0")
    return f"{sign}{dollars}.{digits}" if digits else f"{sign}{dollars}"


def cost_nanousd(tokens: int, nanousd_per_million: int) -> int:
    """Cost of one class of tokens, rounded half up to a nano-dollar.

    Raises:
        ValueError: a negative count or price, which would be a refund nobody asked for.
    """
    if tokens < 0 or nanousd_per_million < 0:
        raise ValueError(f"a cost needs counts and prices >= 0, got {tokens} tokens at {nanousd_per_million}")
    return (tokens * nanousd_per_million + MILLION // 2) // MILLION
