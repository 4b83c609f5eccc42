"""Which language a text is in, by its script, and where several share one by their commonest words. Nobody is sure of
a text of a few words: it has no language here, and no rule goes by it.

Seen are the first few hundred characters. Code, names and numbers count for nothing. Read next: `features.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, get_args

Language = Literal[
    "ar", "bn", "de", "el", "en", "es", "fa", "fr", "he", "hi", "id", "it", "ja", "ko", "nl", "pl", "pt", "ru", "sv",
    "ta", "th", "tr", "uk", "vi", "zh",
]  # fmt: skip
LANGUAGES: Final = get_args(Language)

_SEEN_CHARS: Final = 600
_SEEN_WORDS: Final = 80

# Scripts, as ranges of code points, and the language that is meant where nothing tells more.
_SCRIPTS: Final[Mapping[str, str]] = {
    "zh": "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f",
    "ja": "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9d",
    "ko": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ru": "\u0400-\u052f",
    "ar": "\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff",
    "hi": "\u0900-\u097f",
    "bn": "\u0980-\u09ff",
    "ta": "\u0b80-\u0bff",
    "th": "\u0e00-\u0e7f",
    "he": "\u0590-\u05ff",
    "el": "\u0370-\u03ff\u1f00-\u1fff",
}
# Written without blanks, a character is about half a word; elsewhere a word has about five letters.
_LETTERS_OF_A_CHARACTER: Final[Mapping[str, float]] = {"zh": 2.5, "ja": 2.5, "ko": 2.5}
_FOREIGN: Final = re.compile("|".join(f"([{chars}]+)" for chars in _SCRIPTS.values()))
_NAMES: Final = tuple(_SCRIPTS)
_LATIN: Final = re.compile(r"[a-zA-Z\u00c0-\u024f\u1e00-\u1eff]+(?:['’][a-zA-Z\u00c0-\u024f]+)?")
# Letters that the other language of a script does not have.
_UKRAINIAN: Final = re.compile("[іїєґІЇЄҐ]")
_PERSIAN: Final = re.compile("[\u067e\u0686\u0698\u06af]")

# Words of grammar, which any sentence of the language has some of, and which say little of what it is about.
_WORDS: Final[Mapping[str, str]] = {
    "en": "the a of and to in is are was what how which who why when where do does did can could will would should"
    " for on with at by from it this that these those i you he she we they my your his their not have has had"
    " be been an or but if there about into than me please",
    "de": "der die das und ist sind war ein eine einen einem einer nicht wie was wer warum wann wo ich du er sie"
    " wir ihr mein dein zu den dem des von mit für auf im in am bei aus nach über auch sich kann können wird"
    " werden haben hat oder aber wenn dass bitte mir mich",
    "fr": "le la les un une des du de et est sont était que qui quoi quel quelle comment pourquoi quand où je tu il"
    " elle nous vous ils mon ma mes votre ce cette ces pas ne dans pour avec sur par au aux en plus ou mais si"
    " se son sa c'est d'un d'une l'on j'ai moi",
    "es": "el la los las un una unos y es son era que qué quién cómo cuándo dónde cuál por para con sin sobre del"
    " al de en no se su sus mi mis tu tus yo él ella nosotros lo le les este esta estos como más pero o si"
    " está están hay ser puede me",
    "pt": "o a os as um uma uns e é são era que quem como quando onde qual por para com sem sobre do da dos das no"
    " na nos nas em não se seu sua meu minha eu ele ela nós você vocês este esta isso mais mas ou ao pelo pela"
    " está ser pode me",
    "it": "il lo la i gli le un uno una e è sono era che chi come quando dove quale perché per con senza su del"
    " della dei delle al alla nel nella di da in non si suo sua mio mia io tu lui lei noi voi questo questa"
    " più ma o se ho ha essere può mi",
    "nl": "de het een en is zijn was wat wie hoe waarom wanneer waar welke ik jij je hij zij wij we jullie mijn"
    " jouw van met voor op in aan bij uit naar over ook niet geen dat die dit deze er te kan kunnen wordt"
    " worden heeft hebben of maar als om",
    "sv": "och att det som en ett är var på för med inte den de du jag han hon vi ni min din av till från om hur"
    " vad vem varför när där kan ska har hade eller men så också sig mig blir",
    "pl": "i w na z się nie to jest są był jak co kto dlaczego kiedy gdzie który która do od dla po przez przy za o"
    " ja ty on ona my wy mój moja czy ale lub oraz ten ta tego może być mi jego",
    "tr": "ve bir bu için ile ne nasıl neden nerede hangi mi mı mu mü ben sen o biz siz benim değil var yok olan"
    " olarak gibi daha çok en ama veya ki de da kadar sonra nedir bana",
    "vi": "và của là có không được cho trong với một các những này đó tôi bạn người như thế nào gì tại sao khi ở đã"
    " sẽ để từ về ra làm hãy hay bao nhiêu",
    "id": "yang dan di ke dari untuk dengan adalah ini itu tidak apa bagaimana mengapa kapan siapa saya anda kami"
    " mereka akan bisa dapat ada pada dalam atau juga karena oleh sebagai lebih tolong",
}
_LANGUAGES: Final[Mapping[str, tuple[str, ...]]] = {
    word: tuple(code for code, words in _WORDS.items() if word in words.split())
    for word in sorted({word for words in _WORDS.values() for word in words.split()})
}
# So much evidence, and so much more of it than for any other, before a language is named.
_LEAST: Final = 2
_LEAST_SHARE: Final = 0.15
_LEAD: Final = 1.3


def language_of(text: str) -> str:
    """The language that most of the text is in, as ISO 639-1 names it, one of `LANGUAGES`; "" where it cannot be told.

    Cost: 10 to 60 µs, whatever the length.
    """
    seen = text[:_SEEN_CHARS]
    words = _LATIN.findall(seen)
    if not seen.isascii() and (script := _by_script(seen, sum(map(len, words)))):
        return script
    return _by_words(words[:_SEEN_WORDS])


def _by_script(text: str, latin_letters: int) -> str:
    """The language of the script that has more letters than all Latin ones; "" where none has."""
    letters = dict.fromkeys(_NAMES, 0.0)
    for found in _FOREIGN.finditer(text):
        name = _NAMES[(found.lastindex or 1) - 1]
        letters[name] += len(found[0]) * _LETTERS_OF_A_CHARACTER.get(name, 1.0)
    if letters["ja"] and letters["ja"] * 4 > letters["zh"]:  # Japanese has its own letters between the Chinese ones
        letters["ja"] += letters.pop("zh")
    best = max(letters, key=lambda name: letters[name])
    if letters[best] <= latin_letters or letters[best] < 2:
        return ""
    if best == "ru" and _UKRAINIAN.search(text):
        return "uk"
    if best == "ar" and _PERSIAN.search(text):
        return "fa"
    return best


def _by_words(words: list[str]) -> str:
    """By the words of grammar; one that several languages have counts for each of them."""
    score = dict.fromkeys(_WORDS, 0)
    for word in words:
        for code in _LANGUAGES.get(word.lower().replace("’", "'"), ()):
            score[code] += 1
    best, second = sorted(score.values(), reverse=True)[:2]
    if best < _LEAST or best < _LEAST_SHARE * len(words) or best < _LEAD * second:
        return ""
    return max(score, key=lambda code: score[code])
