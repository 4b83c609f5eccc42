"""Whether two answers say the same, where no model has to be asked for that.

In doubt they do not: an answer that was right and is called different makes the cache more careful than it need be, one
that was wrong and is called the same would hide a false hit.
"""

from __future__ import annotations

import re
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.embedding.batcher import Overloaded
from cache.embedding.embedder import Refused
from cache.entry import Entry
from cache.words.guards import objection
from cache.words.text import normal_form

# Cosine from which two answers may say the same; guards and names are looked at all the same.
SAME_COSINE = 0.9
# A word with a capital behind one without a mark at its end: within a sentence that is a name.
_NAME = re.compile(r"(?<=[^\W\d_] )[A-Z]\w+")


class Embeds(Protocol):
    """A batcher, as far as judging needs one."""

    async def embed(self, text: str, *, behind: bool = False) -> NDArray[np.float32]: ...


class _Message(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Completion).decode


class NoVerdict(Exception):
    """Nobody can say whether the two are the same; `reason` is a stable word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def text_of(entry: Entry) -> str:
    """What an answer says. Raises NoVerdict (`unreadable`)."""
    try:
        return _decode(entry.answer).choices[0].message.content
    except (msgspec.MsgspecError, IndexError):
        raise NoVerdict("unreadable") from None


def equal(first: str, second: str) -> bool:
    """Whether two answers are the same but for capitals, spaces and a full stop at the end."""
    return _plain(first) == _plain(second)


async def alike(first: str, second: str, embedder: Embeds | None) -> bool:
    """Whether two answers lie near each other, hold the same names, and no guard objects.

    Raises:
        NoVerdict: the embedder is not there (`no_embedder`), busy (`overloaded`), or cannot read one of them
            (`too_long`, `script_not_covered`).
    """
    if embedder is None:
        raise NoVerdict("no_embedder")
    try:
        one, other = await embedder.embed(first, behind=True), await embedder.embed(second, behind=True)
    except Refused as refusal:
        raise NoVerdict(refusal.reason) from None
    except Overloaded:
        raise NoVerdict("overloaded") from None
    return float(one @ other) >= SAME_COSINE and same_words(first, second)


def same_words(first: str, second: str) -> bool:
    """Whether nothing in the words says that two answers differ."""
    return set(_NAME.findall(first)) == set(_NAME.findall(second)) and objection(first, second) is None


def _plain(text: str) -> str:
    return " ".join(normal_form(text).split()).removesuffix(".").casefold()
