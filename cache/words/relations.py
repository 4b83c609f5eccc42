"""Relations: the prepositions and other small words that say how the things in a question stand to one another.

"to my account" and "from my account", "before food" and "with food", "above the limit" and "up to the limit" differ in
nothing else, and an embedding takes them for equal. `relations_of` reads them off a text, each with the words that it
governs; `conflict` says whether two texts hold relations that exclude each other. Words that say the same ("into" and
"onto", "prior to" and "before") are one kind; most pairs of kinds exclude nothing ("in" and "at").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import msgspec

from cache.words import lexicon


def _set(listing: str) -> frozenset[str]:
    return frozenset(listing.split())


_PHRASES = {
    "source": "from|off|out of|away from|off of",
    "goal": "to|into|onto|toward|towards",
    "before": "before|prior to|ahead of|in advance of|earlier than|preceding",
    "until": "until|till|up until|no later than",
    "during": "during|while|whilst|amid|throughout|in the middle of|at the same time as",
    "after": "after|following|later than|subsequent to|upon",
    "since": "since|ever since",
    "above": "above|over|exceeding|exceed|exceeds|beyond|more than|greater than|higher than|in excess of",
    "below": "below|under|beneath|underneath|less than|fewer than|lower than|smaller than",
    "at least": "at least|no less than|no fewer than|not less than|not fewer than|no lower than|minimum of",
    "at most": "at most|up to|no more than|not more than|maximum of|no higher than|not exceeding",
    "inside": "inside|within|inside of",
    "outside": "outside|outside of",
    "front": "in front of",
    "behind": "behind|in back of",
    "beside": "beside|next to|alongside",
    "between": "between|among|amongst",
    "through": "through|across|via",
    "around": "around",
    "with": "with|together with|along with",
    "than": "than",
    "versus": "against|versus|vs",
    "beat": "beat|beats|defeat|defeats",
    "minus": "minus",
    "by": "by",
    "of": "of",
    "per": "per",
    "in": "in",
    "on": "on",
    "at": "at",
    "for": "for",
    "about": "about|regarding|concerning",
    "asked": "how many|how much|which|what",
}
_KIND_OF = {tuple(phrase.split()): kind for kind, phrases in _PHRASES.items() for phrase in phrases.split("|")}
_LONGEST = max(map(len, _KIND_OF))
# Kinds of which one takes the place of the other and says something else; all others may stand for each other.
_EXCLUDE = [
    ("source", "goal"),
    ("source", "until"),
    ("source", "before"),
    *combinations(("above", "below", "at least", "at most"), 2),
    *combinations(("before", "during", "after"), 2),
    *((kind, "since") for kind in ("before", "until", "during")),
    *((kind, "until") for kind in ("during", "after")),
    *((kind, "with") for kind in ("before", "after")),
    *((kind, "outside") for kind in ("inside", "in", "at", "goal")),
    *(("inside", kind) for kind in ("above", "at least", "after")),
    *combinations(("front", "behind", "beside", "between", "inside", "below", "on"), 2),
    *(("through", kind) for kind in ("around", "goal", "source")),
    ("for", "source"),
]
_EXCLUDED: dict[str, frozenset[str]] = {
    kind: frozenset(other for pair in _EXCLUDE if kind in pair for other in pair if other != kind) for kind in _PHRASES
}
# Which thing is meant by "X in Y", "X for Y" shows in the order; the others say so alone, wherever they stand.
LOOSE = frozenset({"of", "per", "in", "on", "at", "for", "about", "with", "between"})
# "to" behind these words, or before these verbs, is no direction.
_BEFORE_INFINITIVE = _set(
    "how want wants need needs like able unable possible have has had ought try trying allowed supposed required easy "
    "hard safe legal where what when whether forgot wish would wanted needed tried ready due not"
)
_INFINITIVES = _set(
    "be have do get make use go see know find buy pay open close cancel change add remove set apply check activate "
    "verify start stop"
)
_TIME_UNITS = _set(
    "second minute hour day week month year monday tuesday wednesday thursday friday saturday sunday january february "
    "march april june july august september october november december"
)
_TIMES = _set("noon midnight morning evening night tonight tomorrow sunset sunrise end deadline")
_ARTICLES = _set(
    "a an the my your his her its our their this that these those any some no one such same other not doing being "
    "having"
)
_MOST_SKIPPED, _MOST_GOVERNED = 2, 4


class Relation(msgspec.Struct, frozen=True):
    """One relation: its kind, the words right behind it (stems), and how many words stand before it."""

    kind: str
    governs: tuple[str, ...]
    at: int


def relations_of(spoken: tuple[str, ...]) -> tuple[Relation, ...]:
    """The relations of a text, in order."""
    found = []
    i = 0
    while i < len(spoken):
        kind, length = _kind_at(spoken, i)
        if kind is not None:
            if kind == "by" and _is_time(spoken, i + length):
                kind = "until"
            found.append(Relation(kind, _governed(spoken, i + length), i))
        i += length
    return tuple(found)


def conflict(first: tuple[Relation, ...], second: tuple[Relation, ...]) -> bool:
    """Whether a relation of one text stands, in the other, in the place of one that excludes it."""
    one, other = (Counter(relation.kind for relation in relations) for relations in (first, second))
    only_second = other - one
    return any(_EXCLUDED[kind] & only_second.keys() for kind in one - other)


def governors(relations: Iterable[Relation]) -> dict[str, tuple[str, int]]:
    """For each governed word, the kind of its relation and where that stands."""
    return {word: (relation.kind, relation.at) for relation in relations for word in relation.governs}


def _kind_at(spoken: tuple[str, ...], i: int) -> tuple[str | None, int]:
    for length in range(min(_LONGEST, len(spoken) - i), 0, -1):
        kind = _KIND_OF.get(spoken[i : i + length])
        if kind is None:
            continue
        if spoken[i] == "to" and length == 1 and is_infinitive(spoken, i):
            return None, 1
        if kind == "after" and spoken[i] == "following" and i and spoken[i - 1] in ("the", "a"):
            return None, 1
        return kind, length
    return None, 1


def is_infinitive(spoken: tuple[str, ...], i: int) -> bool:
    before = spoken[i - 1] if i else ""
    after = spoken[i + 1] if i + 1 < len(spoken) else ""
    return before in _BEFORE_INFINITIVE or after in _INFINITIVES


def _is_time(spoken: tuple[str, ...], i: int) -> bool:
    after = [word for word in spoken[i : i + 3] if word not in ("the", "a", "an", "this", "next")]
    return bool(after) and (
        after[0] in _TIMES or lexicon.UNITS.get(after[0]) in _TIME_UNITS or (after[0][0].isdigit() and len(after) < 2)
    )


def _governed(spoken: tuple[str, ...], start: int) -> tuple[str, ...]:
    """Stems of the content words that follow one upon another, behind an article or the like."""
    governed: list[str] = []
    for i in range(start, min(start + _MOST_SKIPPED + _MOST_GOVERNED, len(spoken))):
        word = spoken[i]
        if word in lexicon.FUNCTION_WORDS or _kind_at(spoken, i)[0] is not None:
            if governed or i - start >= _MOST_SKIPPED or word not in _ARTICLES:
                break
        else:
            governed.append(lexicon.stem(word))
    return tuple(governed[:_MOST_GOVERNED])
