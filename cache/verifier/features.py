"""What is read off a candidate: how near it lies, who votes for it, and what the words say.

Vectors tell little near the top: "card not working" and "card payment not working" lie as close as rewordings do. So
the words are compared with the whole group of questions that got this answer, and with those that got another: a word
of the question that only the others use speaks against the candidate. The functions are symmetric in nothing and cost
some 0.1 ms; every feature is finite and bounded, whatever the texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from cache.words import guards, lexicon
from cache.words.text import words

FEATURES = (
    "cosine",  # of the question that speaks for the answer
    "margin",  # that cosine less the best one of any other answer
    "behind",  # how far it lies behind the nearest neighbour, to which a guard may have objected
    "share",  # of the neighbours' weight, what votes for this answer
    "votes",  # neighbours that vote for it: ln(1 + number)
    "second",  # cosine of the group's second question, less that of the nearest; the largest gap if there is none
    "same_content",  # content words equal, asked in the same form
    "replaced",  # each side has content words that the other lacks
    "overlap",  # content words of both / of either
    "only_asked",  # content words that only the asked question has
    "only_cached",  # content words that only the cached question has
    "same_form",  # both ask why, how, yes or no ...
    "length_ratio",  # |ln(words of one / words of the other)|
    "length",  # ln(1 + words asked)
    "letters",  # letter triples of both / of either: survives typing errors
    "novel",  # content words asked that no question of the group has
    "claimed",  # of these, those that a question with another answer has
    "core_missing",  # content words that all questions of the group have (two or more) and the asked one lacks
)
_LARGEST_GAP = 0.3
_MOST_WORDS = 4


class Group(msgspec.Struct, frozen=True):
    """Questions among the neighbours that got one answer, each with its cosine, nearest first; their share of votes."""

    answer_id: int
    questions: tuple[tuple[str, float], ...]
    share: float


def extract(asked: str, question: str, cosine: float, group: Group, rivals: Sequence[Group]) -> tuple[float, ...]:
    """The features of giving `group`'s answer to `asked`, for which `question` speaks; one float per `FEATURES`."""
    best = group.questions[0][1]
    rival = max((other.questions[0][1] for other in rivals), default=cosine - _LARGEST_GAP)
    second = group.questions[1][1] if len(group.questions) > 1 else best - _LARGEST_GAP
    one, other = guards.features(asked), guards.features(question)
    mine, its = set(one.content), set(other.content)
    spoken, cached = len(words(asked)), len(words(question))
    ours = [set(guards.features(text).content) for text, _ in group.questions]
    novel = mine.difference(*ours)
    theirs = {stem for other in rivals for text, _ in other.questions for stem in guards.features(text).content}
    core = set.intersection(*ours) - mine - lexicon.LIGHT if len(ours) > 1 else set()
    content = guards.compare_content(asked, question)
    return (
        cosine,
        _clipped(cosine - rival),
        _clipped(max(best, rival) - cosine),
        group.share,
        math.log1p(len(group.questions)),
        _clipped(best - second),
        float(content == "same"),
        float(content == "replaced"),
        len(mine & its) / max(1, len(mine | its)),
        float(min(len(mine - its), _MOST_WORDS)),
        float(min(len(its - mine), _MOST_WORDS)),
        float(one.form == other.form),
        abs(math.log((1 + spoken) / (1 + cached))),
        math.log1p(spoken),
        _overlap(_triples(asked), _triples(question)),
        float(min(len(novel), _MOST_WORDS)),
        float(min(len(novel & theirs), _MOST_WORDS)),
        float(min(len(core), _MOST_WORDS)),
    )


def _clipped(gap: float) -> float:
    return min(max(gap, -_LARGEST_GAP), _LARGEST_GAP)


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / max(1, len(one | other))


@lru_cache(maxsize=16_384)
def _triples(text: str) -> frozenset[str]:
    spelled = f" {' '.join(words(text))} "
    return frozenset(spelled[i : i + 3] for i in range(len(spelled) - 2))
