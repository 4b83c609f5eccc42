"""Why a body is no JSON, for whoever sent it: the decoder's own words name the place and often not the mistake."""

from __future__ import annotations

import re
from typing import Final

# The first half of a surrogate pair, written as an escape, with something else than a second half behind it. An escaped
# backslash begins no escape; a body that ends here is cut short and not to blame for its half.
_HALF: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*+(\\u[dD][89abAB][0-9a-fA-F]{2})(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])", re.DOTALL
)
_TRUNCATED: Final = "Input data was truncated"
_OUT_OF_RANGE: Final = "Number out of range"


def reason(body: bytes, error: Exception) -> str:
    """A sentence on what is wrong with `body`, which could not be decoded because of `error`."""
    said = str(error)
    if not body.strip():
        return "The body is empty: send a JSON object."
    if said.startswith(_TRUNCATED):
        if half := _HALF.search(body):
            return (
                f"The body is not valid JSON: '{half[1].decode()}' (byte {half.start(1)}) is half a surrogate pair; a "
                "character beyond U+FFFF is written as both halves, or as itself in UTF-8."
            )
        return f"The body is not valid JSON: it ends, after {len(body)} bytes, in the middle: it was cut short."
    if said.startswith(_OUT_OF_RANGE):
        return "The body is not valid JSON: a number in it is out of range; the largest are about 1.8e308."
    return f"The body is not valid JSON: {said}."
