"""Guards: reasons why two texts that lie close together must still not share an answer.

An embedding puts "turn it on" beside "turn it off" and 2016 beside 2017. Each guard looks for one class of such
difference in the words themselves and names it; a pair that no guard objects to is accepted when its cosine
similarity reaches the threshold. Texts with the same content words may lie half as far apart again, because what
differs is wording ("Could you tell me ..."); texts where a content word was replaced by another, half as far only. A
word added to a noun that both name ("york", "new york") bars a hit by this rule (`narrowed`). It is no objection: many
such pairs do share an answer, so where hits are measured the measurement decides. `bench/cache.py` measures the rule.

The word lists are English, and Chinese in `chinese.py`: `eligibility.check` keeps texts of other languages to the exact
cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from cache.words import chinese, lexicon, quantifiers
from cache.words.narrowing import narrowed
from cache.words.order import Order, swapped
from cache.words.relations import conflict, relations_of
from cache.words.symbols import currencies, operators, spelled_out
from cache.words.text import words
from cache.words.writing import case_differs

# How far apart two texts may lie, as a multiple of the distance 1 - threshold, by what their content words do.
DISTANCE_FACTORS = {"same": 1.5, "added": 1.0, "replaced": 0.5}
# Cosines of single-precision vectors are exact to about this much.
_ROUNDING = 1e-6
_HAS_DIGIT = re.compile(r"\d")
_CAPITALISED = re.compile(r"[^\W\d_][\w'’]*")
_CLASHING_TENSES = ({"past", "now"}, {"past", "future"}, {"did", "future"})
_SENTENCE_END = re.compile(r"[.!?:;\n]\s*[\"'“‘(]?\s*$")


class Features(msgspec.Struct, frozen=True):
    """What the guards compare, read off one text."""

    words: frozenset[str]
    content: tuple[str, ...]
    numbers: tuple[str, ...]
    units: frozenset[str]
    asked_unit: str | None
    negations: int
    quantifiers: frozenset[str]
    entities: tuple[str, ...]
    question: str | None
    form: str
    persons: frozenset[str]
    tense: str | None
    possession: str | None
    modality: str | None
    speakers: tuple[str, ...]
    order: Order


class Verdict(msgspec.Struct, frozen=True):
    """`reason` is None when the pair may share an answer, else a stable word: a guard's name or `below_threshold`."""

    accepted: bool
    reason: str | None
    content: Literal["same", "added", "replaced"]


def verify(asked: str, cached: str, cosine: float, threshold: float) -> Verdict:
    """Decide whether the answer to `cached` may be given to `asked`.

    Args:
        cosine: similarity of the two embeddings, in [-1, 1].
        threshold: cosine that a pair of different content words must reach, in (0, 1].
    """
    content = compare_content(asked, cached)
    if 1.0 - cosine > (1.0 - threshold) * DISTANCE_FACTORS[content] + _ROUNDING:
        return Verdict(False, "below_threshold", content)
    reason = objection(asked, cached)
    if reason is None and narrows(asked, cached):
        reason = "narrowed"
    return Verdict(reason is None, reason, content)


def first_accepted(asked: str, nearest: Sequence[tuple[str, float]], threshold: float) -> tuple[int | None, str | None]:
    """The place of the nearest question whose answer may be given; without one, why not the first of all.

    Args:
        nearest: questions with their cosines, nearest first; at least one.
    """
    reason: str | None = "below_threshold"
    for place, (question, cosine) in enumerate(nearest):
        if cosine < lowest_cosine(threshold):
            break
        verdict = verify(asked, question, cosine, threshold)
        if verdict.accepted:
            return place, None
        if place == 0:
            reason = verdict.reason
    return None, reason


def lowest_cosine(threshold: float) -> float:
    """Similarity under which no pair is accepted, whatever its words."""
    return 1.0 - (1.0 - threshold) * max(DISTANCE_FACTORS.values()) - _ROUNDING


def compare_content(a: str, b: str) -> Literal["same", "added", "replaced"]:
    """What happened to the content words from one text to the other, words of category ("city", "name") aside.

    `same`: none differs, and both ask in the same form (why, how, yes or no ...); `replaced`: each has some that the
    other lacks; `added`: anything between.
    """
    asked, cached = features(a), features(b)
    first, second = set(asked.content), set(cached.content)
    only_first, only_second = first - second, second - first
    if only_first and only_second:
        return "replaced"
    agree = only_first | only_second <= lexicon.LIGHT and bool(first & second)
    return "same" if agree and asked.form == cached.form else "added"


def objection(a: str, b: str) -> str | None:
    """The first guard that objects to the pair, or None. Symmetric in its arguments."""
    if chinese.is_chinese(a) or chinese.is_chinese(b):
        reason = chinese.objection(a, b)
        if reason is not None:
            return reason
    first, second = features(a), features(b)
    if first.numbers != second.numbers:
        return "numbers"
    if first.units != second.units or (
        first.asked_unit and second.asked_unit and first.asked_unit != second.asked_unit
    ):
        return "units"
    if case_differs(a, b):
        return "case"
    if first.negations != second.negations:
        return "negation"
    if _opposites(first.words - second.words, second.words - first.words):
        return "antonym"
    if conflict(first.order.relations, second.order.relations):
        return "relation"
    if quantifiers.conflict(first.quantifiers, second.quantifiers):
        return "quantifier"
    if not (_mentions(first.entities, second) and _mentions(second.entities, first)):
        return "entity"
    if first.question and second.question and first.question != second.question:
        return "question"
    if first.persons - second.persons and second.persons - first.persons:
        return "person"
    if first.persons == second.persons and first.speakers != second.speakers:
        return "person"
    if {first.tense, second.tense} in _CLASHING_TENSES or {first.possession, second.possession} == {"has", "done"}:
        return "tense"
    if first.modality and second.modality and first.modality != second.modality:
        return "modality"
    return "order" if swapped(first.order, second.order) else None


def narrows(a: str, b: str) -> bool:
    """Whether one text asks about a narrower thing than the other: "york" and "new york". Symmetric."""
    if chinese.is_chinese(a) or chinese.is_chinese(b):
        return chinese.narrowed(a, b)
    return narrowed(features(a).order.spoken, features(b).order.spoken)


@lru_cache(maxsize=16_384)
def features(text: str) -> Features:
    """Read the features of a text. Pure; remembered, because a cached question is compared many times."""
    text = spelled_out(lexicon.without_tag(chinese.without_chinese(text)))
    spoken = lexicon.without_courtesy(words(text))
    tokens = frozenset(spoken)
    asked = lexicon.asked_unit(spoken)
    content = _content(spoken)
    numbers = sorted(_number(word) for word in spoken if _HAS_DIGIT.search(word) or word in lexicon.NUMBER_WORDS)
    return Features(
        words=tokens,
        content=content,
        numbers=(*numbers, *operators(text)),
        units=(frozenset(lexicon.UNITS[word] for word in tokens if word in lexicon.UNITS) - {asked}) | currencies(text),
        asked_unit=asked,
        negations=sum(word in lexicon.NEGATIONS for word in spoken),
        quantifiers=quantifiers.quantifiers(spoken),
        entities=tuple(sorted(_entities(text), key=lambda name: spoken.index(name) if name in tokens else 0)),
        question=lexicon.question_of(spoken),
        form=lexicon.form_of(spoken),
        persons=frozenset(lexicon.PERSONS[word] for word in tokens if word in lexicon.PERSONS),
        tense=lexicon.tense_of(tokens),
        possession=lexicon.possession_of(spoken),
        modality=lexicon.modality_of(spoken),
        speakers=lexicon.speakers_of(spoken),
        order=Order(spoken, content, relations_of(spoken)),
    )


def _number(word: str) -> str:
    """One spelling per number: digits without thousands separators; codes as they are."""
    plain = lexicon.NUMBER_WORDS.get(word, word)
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain)


def _content(spoken: tuple[str, ...]) -> tuple[str, ...]:
    """Stems of the content words in order, with "France's capital" read as "capital of France"."""
    ordered: list[str] = []
    for i, word in enumerate(spoken):
        if word == "'s" and ordered and i + 1 < len(spoken):
            continue
        if word not in lexicon.FUNCTION_WORDS:
            stem = lexicon.stem(word)
            if i >= 2 and spoken[i - 1] == "'s" and ordered:
                ordered.insert(len(ordered) - 1, stem)
            else:
                ordered.append(stem)
    return tuple(ordered)


def _entities(text: str) -> tuple[str, ...]:
    """Lower-cased names: words with a capital that no sentence start explains. None in a text of capitals."""
    found = list(_CAPITALISED.finditer(text))
    capitalised = [match for match in found if match.group()[0].isupper()]
    if len(found) > 2 and 2 * len(capitalised) > len(found) + 2:
        return ()
    names: dict[str, None] = {}
    for match in capitalised:
        word = match.group()
        starts = match.start() == 0 or _SENTENCE_END.search(text[: match.start()])
        inner = any(letter.isupper() for letter in word[1:])
        lowered = words(word)
        if lowered and (inner or not starts) and lowered[0] not in lexicon.FUNCTION_WORDS:
            names[lowered[0]] = None
    return tuple(names)


def _mentions(names: tuple[str, ...], other: Features) -> bool:
    return all(name in other.words or lexicon.stem(name) in other.content for name in names)


def _opposites(only_first: frozenset[str], only_second: frozenset[str]) -> bool:
    """Whether a word on one side only is the opposite of a word on the other side only."""
    for word in only_first:
        for other in only_second:
            if lexicon.opposite(word, other):
                return True
    return False
