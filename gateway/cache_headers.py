"""What a client says about the cache: `Cache-Control` (RFC 9111, section 5.2.1) and Tierline's own `x-tierline-cache`.

Both take the same words, and of both together the strictest counts. Each word only takes away from what the policy
allows. Browsers and proxies write into `Cache-Control` as well, so words that it does not define here mean nothing; in
our own header they are a mistake, and refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from backends.protocol import whole_number
from gateway.dialects.errors import BadRequest

DIRECTIVES: Final = ("no-cache", "no-store", "only-if-cached", "max-age")
# RFC 9111, section 1.2.2: what is larger than can be represented counts as this.
_LONGEST_S: Final = 2**31
# Elements of a list; a comma within quotes separates nothing.
_ELEMENT: Final = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*+(?:"|\\?\Z))++')


class Directives(msgspec.Struct, frozen=True):
    """What a request demands. `max_age_s`: no answer from the cache may be older, in seconds."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age_s: int | None = None

    @property
    def forbids_reading(self) -> str | None:
        """The directive that leaves no answer of the cache to give; None if there may be one."""
        if self.no_cache:
            return "no-cache"
        return "max-age" if self.max_age_s == 0 else None

    def oldest_s(self, ttl_s: float | None) -> float | None:
        """How old an answer may be where the policy allows `ttl_s`."""
        if self.max_age_s is None or ttl_s is None:
            return ttl_s if self.max_age_s is None else self.max_age_s
        return min(ttl_s, self.max_age_s)


def read(cache_control: str | None, own: str | None) -> Directives:
    """The directives of both headers.

    Raises:
        BadRequest: `invalid_cache_directive`, for what `x-tierline-cache` does not take.
    """
    if cache_control is None and own is None:
        return NONE
    given: set[str] = set()
    ages: list[int] = []
    for name, value in _elements(cache_control or ""):
        given.add(name)
        if name == "max-age":
            # Freshness that cannot be read is none (section 4.2.1).
            ages.append(0 if (seconds := _seconds(value)) is None else seconds)
    for name, value in _elements(own or ""):
        if name not in DIRECTIVES:
            raise _refused(f"does not know {name}; it takes {', '.join(sorted(DIRECTIVES))}")
        if name != "max-age" and value is not None:
            raise _refused(f"takes no value for {name}")
        given.add(name)
        if name == "max-age":
            seconds = _seconds(value)
            if seconds is None:
                raise _refused("takes whole seconds for max-age, as in max-age=60")
            ages.append(seconds)
    return Directives("no-cache" in given, "no-store" in given, "only-if-cached" in given, min(ages, default=None))


def _elements(header: str) -> Iterator[tuple[str, str | None]]:
    """Names, in lower case, and values of a list of directives; a value may stand in quotes."""
    for element in _ELEMENT.findall(header):
        name, separator, value = element.partition("=")
        if name := name.strip().lower():
            yield name, value.strip().strip('"') if separator else None


def _seconds(value: str | None) -> int | None:
    if value is None or not value.isascii() or not value.isdigit():
        return None
    digits = value.lstrip("0") or "0"
    return min(_LONGEST_S, whole_number(digits, 10) or (0 if digits == "0" else _LONGEST_S))


def _refused(what: str) -> BadRequest:
    return BadRequest(f"'x-tierline-cache' {what}.", code="invalid_cache_directive")


NONE: Final = Directives()
