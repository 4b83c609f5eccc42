"""How much of a text a guardrail's pattern must see before it finds anything, which a stream's window must hold."""

from __future__ import annotations

import re
import warnings
from typing import Any, Final

# What RE2 writes otherwise, each one character; and its end of the text.
_ONE: Final = re.compile(r"\\(?:x\{[0-9A-Fa-f]+\}|[pP](?:\{[^}]*\}|.)|C)|(?<=\[)\[:\^?[a-z]+:\](?=\])")
_MOST: Final = 1 << 31


def longest(pattern: str) -> int | None:
    """The most characters that a match may need before it is one; `None` where they cannot be counted.

    What a pattern repeats at its end does not count: such a match is found when it begins, and grows. A pattern
    without a bound gives a number beyond all windows.
    """
    plain = _ONE.sub(r"\\d", pattern).replace(r"\z", r"\Z")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed: Any = re._parser.parse(plain)  # type: ignore[attr-defined]
    except (re.error, OverflowError, RecursionError):
        return None  # in RE2's own syntax
    parts = [part for part in parsed if str(part[0]) != "AT"]
    if not parts:
        return 0
    least, last = 0, parts[-1]
    if str(last[0]) in ("MAX_REPEAT", "MIN_REPEAT"):
        minimum, _, repeated = last[1]
        least = minimum * repeated.getwidth()[1]
        parts = parts[:-1]
    parsed.data = parts
    parsed.width = None
    return int(min(parsed.getwidth()[1] + least, _MOST))
