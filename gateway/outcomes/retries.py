"""Who asks nearly the same again within two minutes may not have been content: a weak sign, and only of people.

Of programs it would be none: one template with another text in it looks like the same question. So it is looked at only
where a request names its end user (`user`, `safety_identifier`), who has not asked often lately, and takes the time to
read the answer. What counts is the share of such answers that are asked for again (`weighing.py`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

WITHIN_S: Final = 120.0
LEAST_S: Final = 2.0  # sooner, nobody has read an answer
MOST_OF_A_PERSON: Final = 6  # requests within that time
ALIKE: Final = 0.7  # of all words of both, the share that both have
LEAST_WORDS: Final = 4
MOST_ASKERS: Final = 10_000
_READ_CHARACTERS: Final = 1000
_MOST_ID_CHARACTERS: Final = 256

Tell = Callable[[bool], None]


class _Asked(msgspec.Struct):
    """The latest request of somebody. `tell` takes whether its answer was good as far as this shows."""

    words: frozenset[str]
    turns: int
    answered_at: float  # monotonic
    since: float  # when counting began
    count: int
    tell: Tell | None


class Retries:
    """The latest request of each end user, for two minutes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._latest: OrderedDict[tuple[str, str], _Asked] = OrderedDict()

    def seen(self, asker: tuple[str, str], text: str, turns: int, arrived_at: float, tell: Tell) -> None:
        """An answer was given.

        Args:
            asker: id of the key, and the end user that the request names.
            text: what the user asked; `turns` is how often they have.
            arrived_at: when the request had come, monotonic.
            tell: is told whether the answer was good as far as this shows.
        """
        words = frozenset(text[:_READ_CHARACTERS].lower().split())
        now = self._now()
        before = self._latest.pop(asker, None)
        since, count = now, 1
        if before is not None:
            if now - before.since <= WITHIN_S:
                since, count = before.since, before.count + 1
            waited = arrived_at - before.answered_at
            again = LEAST_S <= waited <= WITHIN_S and turns in (before.turns, before.turns + 1)
            if before.tell is not None and count <= MOST_OF_A_PERSON:
                before.tell(not (again and _alike(before.words, words)))
        self._latest[asker] = _Asked(words, turns, now, since, count, tell if count <= MOST_OF_A_PERSON else None)
        if len(self._latest) > MOST_ASKERS:
            self._end(self._latest.popitem(last=False)[1])

    def sweep(self) -> None:
        """Those whose time is over did not ask again."""
        now = self._now()
        while self._latest:
            asker, latest = next(iter(self._latest.items()))
            if now - latest.answered_at <= WITHIN_S:
                return
            del self._latest[asker]
            self._end(latest)

    @staticmethod
    def _end(latest: _Asked) -> None:
        if latest.tell is not None:
            latest.tell(True)


def end_user(payload: Mapping[str, Any]) -> str | None:
    """Who a request says that its end user is."""
    user = payload.get("user") or payload.get("safety_identifier")
    return user[:_MOST_ID_CHARACTERS] if isinstance(user, str) else None


def _alike(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether two questions are nearly the same, by the words that they share."""
    if min(len(one), len(other)) < LEAST_WORDS:
        return False
    return len(one & other) >= ALIKE * len(one | other)
