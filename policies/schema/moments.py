"""Points in time as people write them: with a date, a time of day, and always a time zone."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field

_MOMENT = re.compile(r"^(\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?)(Z|[+-]\d\d:\d\d| [A-Za-z][A-Za-z0-9_+/-]*)$")
_EXAMPLE = "such as 2026-12-24T08:00:00+01:00, 2026-12-24T07:00:00Z or 2026-12-24 08:00 Europe/Berlin"


def moment(value: Any) -> datetime:
    """The moment, in UTC, that a date, a time of day and an offset or the name of a time zone mean.

    Raises:
        ValueError: it is none. Without a zone it is refused: which one is meant would be a guess.
    """
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    match = _MOMENT.match(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f"a moment is a date, a time and a time zone, {_EXAMPLE}; got {value!r}")
    text, zone = match[1], match[2].strip()
    try:
        if match[2][0] != " ":
            return datetime.fromisoformat(text + zone).astimezone(UTC)
        local = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"there is no such moment as {value!r}: {error}") from None
    try:
        known = ZoneInfo(zone)
    except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError, below
        raise ValueError(f"the time zone '{zone}' cannot be read: {error}") from None
    except KeyError:
        raise ValueError(f"no time zone '{zone}' is known on this machine: write an offset, such as +01:00") from None
    found = local.replace(tzinfo=known).astimezone(UTC)
    if found.astimezone(known).replace(tzinfo=None) != local:
        raise ValueError(f"there is no {text} in {zone}: the clocks are put forward over it")
    return found


Moment = Annotated[
    datetime,
    BeforeValidator(moment, json_schema_input_type=Annotated[str, Field(pattern=_MOMENT.pattern)]),
]
