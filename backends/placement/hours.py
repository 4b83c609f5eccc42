"""Hours of the week in which a replica works: `09-18`, `Mon-Fri 08:30-18`, `22-06, Sat-Sun 00-24`.

Days are English, times are those of a time zone, summer time included; a span that ends before it begins goes on into
the next day. Looking up whether it is open costs a comparison: the answer is kept until the next minute.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_WEEK_MINUTES = 7 * _DAY_MINUTES
_SPAN = re.compile(r"(?:([A-Za-z]{3})(?:-([A-Za-z]{3}))? )?(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")
_FORM = "hours are spans such as '09-18', 'Mon-Fri 08:30-18:00' or '22-06', joined by commas"


class Hours:
    """When a replica works.

    Raises:
        ValueError: `text` is not of that form, or names no time at all.
    """

    def __init__(self, text: str, zone: ZoneInfo) -> None:
        self.text = text
        self._zone = zone
        self._open = bytearray(_WEEK_MINUTES)
        for part in text.split(","):
            self._add(part.strip())
        self._known_until = 0.0  # Unix seconds
        self._is_open = False

    def open(self) -> bool:
        """Whether it works now."""
        now = time.time()
        if now >= self._known_until or now < self._known_until - 60.0:  # the clock may be set back
            self._is_open = self.open_at(now)
            self._known_until = (now // 60 + 1) * 60
        return self._is_open

    def open_at(self, unix_s: float) -> bool:
        local = datetime.fromtimestamp(unix_s, self._zone)
        return bool(self._open[local.weekday() * _DAY_MINUTES + local.hour * 60 + local.minute])

    def opens_in_s(self) -> float:
        """Seconds until it works again; 0 if it does."""
        now = datetime.now(UTC)
        if self.open_at(now.timestamp()):
            return 0.0
        minute = now.replace(second=0, microsecond=0)
        for minutes in range(1, _WEEK_MINUTES + 2 * 60):  # a week, and an hour that summer time may skip
            later = minute + timedelta(minutes=minutes)
            if self.open_at(later.timestamp()):
                return (later - now).total_seconds()
        return float(_WEEK_MINUTES * 60)

    def minutes(self) -> bytes:
        """For each minute of the week, from Monday on, whether it works."""
        return bytes(self._open)

    def _add(self, text: str) -> None:
        match = _SPAN.fullmatch(text)
        if match is None:
            raise ValueError(f"{_FORM}, not {text!r}")
        first, last, *times = match.groups()
        begin, end = _minute(times[0], times[1], text), _minute(times[2], times[3], text)
        if begin == end:
            raise ValueError(f"'{text}' begins when it ends; a whole day is 00-24")
        length = end - begin if end > begin else end - begin + _DAY_MINUTES
        for day in _days(first, last, text):
            start = day * _DAY_MINUTES + begin
            for minute in range(start, start + length):
                self._open[minute % _WEEK_MINUTES] = 1


def _minute(hours: str, minutes: str | None, text: str) -> int:
    minute = int(hours) * 60 + int(minutes or 0)
    if int(minutes or 0) > 59 or minute > _DAY_MINUTES:
        raise ValueError(f"'{text}' has a time that no day has")
    return minute


def _days(first: str | None, last: str | None, text: str) -> list[int]:
    if first is None:
        return list(range(7))
    numbers = []
    for name in (first, last or first):
        if name.lower() not in _DAYS:
            raise ValueError(f"'{text}' has the day {name!r}; days are Mon, Tue, Wed, Thu, Fri, Sat, Sun")
        numbers.append(_DAYS.index(name.lower()))
    begin, end = numbers
    return [(begin + number) % 7 for number in range((end - begin) % 7 + 1)]
