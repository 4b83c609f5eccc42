"""Why the beginning of a prompt was not in the prefix cache: what an operator asks when hits stay away.

It remembers, within a bound, which pages were evicted and when, and under which roots the first pages of texts are
cached now. From the first page that was not found it follows why none after it could be.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_MOST_REMEMBERED = 100_000  # evicted pages, about 150 bytes each


class Absence(StrEnum):
    """Why tokens of a prompt had to be computed."""

    NEW = "new"  # nobody has sent this text, or so long ago that its eviction is forgotten
    EVICTED = "evicted"  # it was here; the room was needed
    OTHER_SALT = "other_salt"  # it is here, for another tenant
    OTHER_ADAPTER = "other_adapter"  # it is here, as another adapter computed it
    LAST_PAGE = "last_page"  # a page is shared when it is full, and the last token always runs through the model
    SEED = "seed"  # sampled with a seed, so nothing is looked up
    SCORED = "scored"  # log-probabilities of the prompt, or a vector of it, were asked for: nothing is looked up


@dataclass(frozen=True, slots=True)
class Missed:
    """Why full pages of a prompt were not found, and how many tokens they hold."""

    reason: Absence
    tokens: int
    seconds_ago: float | None = None  # since the eviction

    def __str__(self) -> str:
        """As its client may read it: that another tenant has sent the same text is not said."""
        reason = Absence.NEW if self.reason in (Absence.OTHER_SALT, Absence.OTHER_ADAPTER) else self.reason
        age = "" if self.seconds_ago is None else f"; seconds-ago={self.seconds_ago:.1f}"
        return f"{reason}; tokens={self.tokens}{age}"


class PrefixHistory:
    """Told by the prefix cache of pages that come and go; asked when one is missing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._evicted: OrderedDict[bytes, float] = OrderedDict()
        # The first page of a text, to the roots that it is cached under, each with the adapter that computed it.
        self._first: dict[bytes, dict[bytes, int]] = {}

    def stored(self, digest: bytes) -> None:
        self._evicted.pop(digest, None)

    def began(self, tokens: bytes, root: bytes, adapter: int) -> None:
        """The first page of a text is cached under a root."""
        self._first.setdefault(tokens, {})[root] = adapter

    def evicted(self, digest: bytes) -> None:
        self._evicted[digest] = self._clock()
        if len(self._evicted) > _MOST_REMEMBERED:
            self._evicted.popitem(last=False)

    def ended(self, tokens: bytes, root: bytes) -> None:
        """What `began` is cached no longer."""
        roots = self._first.get(tokens)
        if roots is not None and roots.pop(root, None) is not None and not roots:
            del self._first[tokens]

    def why(self, digest: bytes, first: tuple[bytes, int] | None, tokens: int) -> Missed:
        """Why page `digest` is missing, the first one of those that hold `tokens` tokens.

        `first`: its tokens and its adapter, if it is the first page of its text.
        """
        when = self._evicted.get(digest)
        if when is not None:
            return Missed(Absence.EVICTED, tokens, self._clock() - when)
        if first is None:
            return Missed(Absence.NEW, tokens)
        adapters = self._first.get(first[0], {}).values()
        if not adapters:
            return Missed(Absence.NEW, tokens)
        return Missed(Absence.OTHER_SALT if first[1] in adapters else Absence.OTHER_ADAPTER, tokens)
