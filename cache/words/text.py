"""Plain-text helpers shared by keys, eligibility and verification: normal form, words, scripts.

Everything here is deterministic and free of models, so that the same text gives the same key on every machine.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_CONTRACTIONS = (
    (re.compile(r"\bcan't\b"), "can not"),
    (re.compile(r"\bcannot\b"), "can not"),
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"\bshan't\b"), "shall not"),
    (re.compile(r"\bain't\b"), "is not"),
    (re.compile(r"\b([a-z]+)n't\b"), r"\1 not"),
    # Typed without the apostrophe; "wont", "cant" and "were" are also words of their own, but rare beside these.
    (re.compile(r"\b(do|does|did|is|are|was|has|have|had|would|could|should)nt\b"), r"\1 not"),
    (re.compile(r"\bcant\b"), "can not"),
    (re.compile(r"\bwont\b"), "will not"),
    (re.compile(r"\b(i)'m\b"), r"\1 am"),
    (re.compile(r"\b([a-z]+)'re\b"), r"\1 are"),
    (re.compile(r"\b([a-z]+)'ve\b"), r"\1 have"),
    (re.compile(r"\b([a-z]+)'ll\b"), r"\1 will"),
    (re.compile(r"\b([a-z]+)'d\b"), r"\1 would"),
    (re.compile(r"\b(let)'s\b"), r"\1 us"),
    (re.compile(r"\b(what|who|where|when|how|why|that|there|here|it|he|she)'s\b"), r"\1 is"),
    (re.compile(r"\bwhats\b"), "what is"),
    (re.compile(r"\bunable\b"), "not able"),
)
# A run of letters and digits; inner dots, commas, hyphens, colons and slashes stay when a digit is beside them
# (3.14, 1,000, M605x, 10:30, 2017-01), so that numbers and codes are single words.
_WORD = re.compile(r"[^\W_]+(?:(?:(?<=\d)[.,:/\-](?=\d)|[-](?=\d)|(?<=\d)[-]|')[^\W_]+)*", re.UNICODE)


def _set(listing: str) -> frozenset[str]:
    return frozenset(listing.split())


# Function words, to tell English from its neighbours in the same script; words of both kinds are left out.
_ENGLISH = _set(
    "the is are of to and in what how my your do does can with for that this it on from be was were who when where why "
    "which have has not you at an or if will would should there"
)
_NOT_ENGLISH = _set(
    "der das und ist nicht wie ich ein eine wer den dem des mit für auf von zu kann mein sind "
    "le les la est une des du et je pas que qui quel quelle quels comment pourquoi mon ma avec dans sur puis-je "
    "el los las y es una qué cuál cómo por para con mi cuando donde quién no puedo está "
    "il lo gli è che di un come perché qual quale quanto sono della del mio "
    "os um uma é qual não como meu minha você em quem onde "
    "het een niet ik hoe wat van mijn wie waar waarom "
    "och är det jag hur vad inte min jest jak nie się czy mój co bir ve nasıl nedir için "
    "yang dan apa bagaimana tidak saya là của không như thế nào"
) - {"no", "was", "is", "an", "in"}
_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "`": "'", "´": "'"})


def normal_form(text: str) -> str:
    """The form in which two texts are the same text: `one_spelling`, no space around (blanks, tabs, line ends).

    Case and inner spaces stay: they carry meaning in code, names and abbreviations ("US", "us").
    """
    return one_spelling(text).strip(" \t\n")


def one_spelling(text: str) -> str:
    """The text in Unicode NFC with `\\n` line ends: characters that Unicode calls equivalent are one."""
    return unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))


@lru_cache(maxsize=4096)
def words(text: str) -> tuple[str, ...]:
    """Lower-case words in order, contractions opened ("isn't" is "is", "not"), possessive 's split off as "'s"."""
    lowered = text.translate(_APOSTROPHES).lower()
    for pattern, replacement in _CONTRACTIONS:
        lowered = pattern.sub(replacement, lowered)
    found: list[str] = []
    for match in _WORD.finditer(lowered):
        word = match.group()
        if word.endswith("'s"):
            found += (word[:-2], "'s")
        else:
            found.append(word.strip("'"))
    return tuple(found)


@lru_cache(maxsize=8192)
def _script_of(character: str) -> str | None:
    if not character.isalpha():
        return None
    name = unicodedata.name(character, "UNKNOWN").split(" ")[0].split("-")[0].lower()
    # Compatibility letters (full width, mathematical) and ª º µ name no script: they count as what they look like.
    return {"cjk": "han", "fullwidth": "latin", "feminine": "latin", "masculine": "latin", "micro": "latin"}.get(
        name, name
    )


def scripts(text: str) -> frozenset[str]:
    """Scripts of the letters of a text, such as `latin`, `cyrillic`, `han`; empty when it has no letters."""
    return frozenset(script for script in map(_script_of, set(text)) if script)


def main_script(text: str) -> str:
    """The script of most letters, ties broken by name; `none` when the text has no letters."""
    counts: dict[str, int] = {}
    for character in text:
        script = _script_of(character)
        if script:
            counts[script] = counts.get(script, 0) + 1
    return min(counts, key=lambda name: (-counts[name], name)) if counts else "none"


def looks_english(text: str) -> bool:
    """Whether a text of Latin letters has at least as many function words of English as of its neighbours."""
    spoken = words(text)
    english = sum(word in _ENGLISH for word in spoken)
    foreign = sum(word in _NOT_ENGLISH for word in spoken)
    if not english and not foreign:
        return text.isascii() or len(spoken) < 3
    return english >= foreign
