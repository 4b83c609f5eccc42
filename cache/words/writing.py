"""The same words written otherwise: without capitals, with other spaces, without the mark at the end.

`folded_form` makes such texts one. `case_differs` says where upper and lower case keep two texts apart all the same:
5 mW and 5 MW, the US and us, Polish and polish. Embedders read no case, and people type names without capitals, so
most differences say nothing. Kept apart are symbols of units, letters beside digits, single letters, and words that
mean something else with a capital, as far as both meanings are common. A capital that begins a sentence says nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

from cache.words import lexicon
from cache.words.text import normal_form, words

# Behind a letter or a digit only: other marks may be what the text is about. "5!" is no "5".
_FINAL_MARK = re.compile(r"(?<=[^\W\d_])[ \u00a0]?[.?!]+$|(?<=\d)[ \u00a0]?[.?]+$")
_SPACES = re.compile(r"[ \u00a0]+")
_FEWEST_WORDS = 3
_TOKEN = re.compile(r"[^\W_]+")
_SENTENCE_END = re.compile(r"[.!?:;\n]\s*[\"'“‘(]?\s*$")
_LETTER_BY_DIGIT = re.compile(r"[^\W\d]\d|\d[^\W\d]")
# Texts about things that are spelled to the letter.
_TO_THE_LETTER = re.compile(
    r"\b(?:pass ?(?:words?|phrases?|codes?|keys?)|user ?names?|hashtags?|identifiers?|variables?|hash(?:es)?|"
    r"serial numbers?|hex|base64)\b",
    re.IGNORECASE,
)
_SYMBOL_LENGTH = 3


def _set(listing: str) -> frozenset[str]:
    return frozenset(listing.split())


_OTHERWISE_WITH_A_CAPITAL = _set("""
    us it who aids sat act aim led ram rom cat pet mac add stem fed
    mb gb kb tb pb mbps gbps kbps mbit gbit mw mv ma mpa mhz ph db ca co na
    march may august polish turkey china chile jordan guinea jersey lima nice reading bath cork hull phoenix mobile
    buffalo orange lent slough split cologne champagne scotch welsh swede swedes dane danes pole poles swiss
    democrat democrats democratic republican republicans liberal liberals conservative conservatives labour green greens
    catholic orthodox congress parliament bible mass lord sabbath advent easter
    bill mark will rob jack frank pat rose lily iris ivy grace hope faith joy dawn amber pearl jade violet holly heather
    rich art bob chuck drew gene grant josh lance miles nick penny pierce ray sue victor wade ward cliff dean don drake
    earl ernest guy herb job kit lane mike tiger crystal summer forest chance
    apple word excel access outlook office teams windows edge target gap shell visa chase discover subway alphabet
    galaxy pixel surface meta go rust ruby basic scratch spring react next node slack zoom signal steam epic
    square stripe mint match ring echo bolt lime grab spark storm pages numbers keynote notes messages
    mercury saturn titan amazon
""")


def folded_form(text: str) -> str | None:
    """What texts have in common that differ in case, spaces and a final mark only; None for a text of several lines.

    A question mark stays where it alone makes the question: "You are safe?" is not "You are safe.".
    """
    text = _SPACES.sub(" ", normal_form(text.lower())).strip(" ")
    if any(not character.isprintable() for character in text):
        return None
    mark = _FINAL_MARK.search(text)
    spoken = words(text)
    if mark is None or len(spoken) < _FEWEST_WORDS:
        return text
    bare = text[: mark.start()]
    return (
        f"{bare}?" if "?" in mark.group() and lexicon.form_of(lexicon.without_courtesy(spoken)) == "statement" else bare
    )


def case_differs(a: str, b: str) -> bool:
    """Whether a word that both texts hold is written in another case, in a way that may change what is meant."""
    first, second = _spellings(a), _spellings(b)
    to_the_letter = bool(_TO_THE_LETTER.search(a) or _TO_THE_LETTER.search(b))
    for word in first.keys() & second.keys():
        if first[word] != second[word] and (to_the_letter or _matters(word, first[word] | second[word])):
            return True
    return False


def _matters(word: str, spellings: frozenset[str]) -> bool:
    if word in _OTHERWISE_WITH_A_CAPITAL or _LETTER_BY_DIGIT.search(word):
        return True
    if len(word) == 1:
        return word != "i"
    # Of short words with capitals on both sides, each may be a symbol of its own: Mg and MG, pH and Ph.
    return len(word) <= _SYMBOL_LENGTH and word not in spellings


@lru_cache(maxsize=16_384)
def _spellings(text: str) -> dict[str, frozenset[str]]:
    """How each word is written, by its lower-case form. A word behind a number is a word of its own with it."""
    found: dict[str, set[str]] = {}
    before = ""
    for match in _TOKEN.finditer(text):
        word = match.group()
        if before.isdigit() and len(word) <= _SYMBOL_LENGTH and text[match.start() - 1] in " \u00a0":
            word = before + word  # "5 mW" as "5mW"
        elif _begins_sentence(text, match.start()) and (word[1:].islower() or len(word) == 1):
            word = word.lower()
        found.setdefault(word.lower(), set()).add(word)
        before = match.group()
    return {word: frozenset(spellings) for word, spellings in found.items()}


def _begins_sentence(text: str, at: int) -> bool:
    return at == 0 or _SENTENCE_END.search(text[max(0, at - 8) : at]) is not None
