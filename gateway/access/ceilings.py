"""What an organisation, a team, a project or a key may use, as it is asked for: checked here before it is stored.

A change says only what it changes: a field that is `UNSET` stays as it is, None takes the limit away.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from gateway.invalid import InvalidValue
from gateway.ledger.money import format_usd
from tiers import TIERS

# What a key can be kept to. Counting the tokens of a message belongs to `messages`; every key may list its models.
ROUTES: Final = ("chat", "completions", "messages", "responses", "embeddings", "rerank", "batches")
MOST: Final = 2**31 - 1
MOST_NANOUSD: Final = 2**62
_RATES: Final = ("requests_per_minute", "tokens_per_minute", "parallel")
_WORDS: Final = {"allowed_tiers": TIERS, "allowed_routes": ROUTES}


class InvalidCeiling(InvalidValue):
    """A limit, budget, expiry or scope that makes no sense; the message names the field and says what to write."""


class ChangedMeanwhile(ValueError):
    """What was to be changed is no longer as whoever asked for the change saw it."""


class LimitChange(msgspec.Struct, frozen=True, kw_only=True):
    """New limits, and a new monthly budget in nano-dollars. None: none; `UNSET`: as before."""

    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    parallel: int | UnsetType | None = UNSET
    budget_nanousd: int | UnsetType | None = UNSET


class KeyChange(LimitChange, frozen=True, kw_only=True):
    """What of a key can be changed. Times are UTC milliseconds. None for `allowed_…`: all; for `expires_ms`: never."""

    name: str | UnsetType = UNSET
    expires_ms: int | UnsetType | None = UNSET
    allowed_models: Collection[str] | UnsetType | None = UNSET
    allowed_tiers: Collection[str] | UnsetType | None = UNSET
    allowed_routes: Collection[str] | UnsetType | None = UNSET


def columns(change: LimitChange) -> dict[str, Any]:
    """The database columns that a change sets, checked; lists as JSON.

    Raises:
        InvalidCeiling: which field, and what it takes.
    """
    asked = {name: getattr(change, name) for name in change.__struct_fields__}
    values = {name: value for name, value in asked.items() if value is not UNSET}
    for name, value in values.items():
        if value is None:
            continue
        if name in _RATES and not 0 < value <= MOST:
            raise InvalidCeiling(f"'{name}' must be between 1 and {MOST}, got {value}", name)
        if name == "budget_nanousd" and not 0 <= value <= MOST_NANOUSD:
            most = format_usd(MOST_NANOUSD)
            text = f"'budget_usd' must be between 0 and {most} dollars, got {format_usd(value)}"
            raise InvalidCeiling(text, "budget_usd")
        if name.startswith("allowed_"):
            values[name] = msgspec.json.encode(_allowed(name, value)).decode()
    return values


def _allowed(name: str, words: Collection[str]) -> list[str]:
    known = _WORDS.get(name)
    unknown = sorted(word for word in words if known is not None and word not in known)
    if unknown:
        text = f"'{name}' does not know '{unknown[0]}': choose from {', '.join(known or ())}"
        raise InvalidCeiling(text, name)
    if not words:
        text = f"'{name}' is empty, so the key could do nothing: name at least one, or leave it out for all"
        raise InvalidCeiling(text, name)
    return sorted(set(words))
