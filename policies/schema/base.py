"""What every part of a policy is made of: names, durations, and models that refuse unknown keys."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

TierName = Literal["small", "medium", "large", "xlarge"]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _one_line(value: str) -> str:
    if not value.isprintable() or value != value.strip():
        raise ValueError("it must be one line of printable characters, without blanks around it")
    return value


# For text that appears in headers, in the log and in tables; in an annotation it stands after the bounds of the length.
ONE_LINE: Final = AfterValidator(_one_line)
RouteName = Annotated[str, Field(min_length=1, max_length=100), ONE_LINE]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"^([1-9][0-9]*)(s|m|h|d|w)$")


def seconds(value: Any) -> float:
    """Seconds of a duration such as `90s`, `15m`, `24h`, `7d` or `2w`.

    Raises:
        ValueError: it is not a whole number of one of these units; a bare number is refused, its unit would be a guess.
    """
    match = _DURATION.match(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f"a duration is a whole number and a unit (s, m, h, d, w), such as 24h; got {value!r}")
    return float(int(match[1]) * _UNITS[match[2]])


Duration = Annotated[
    float,
    BeforeValidator(seconds, json_schema_input_type=Annotated[str, Field(pattern=_DURATION.pattern)]),
]


class Strict(BaseModel):
    """Base of all policy models: unknown keys are errors, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
