"""What is taken out of a text before anything is counted: words that beg for a larger model and say nothing else.

Pleas for effort ("think step by step"), whatever is said again, and heaps of keywords without grammar. What is left is
seen by the classifier. A cheap look decides whether there is anything to do; most texts pass as they are.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

_EFFORT: Final = re.compile(
    r"\b(?:(?:(?:let's )?(?:think|reason|explain|work|go) (?:(?:it|this|about it|through it) )?)?step[- ]by[- ]step"
    r"|take a deep breath|think (?:very )?(?:carefully|hard|deeply)|after careful thought"
    r"|(?:give |list |weigh )?(?:the )?pros and cons|be (?:very )?(?:thorough|precise|careful)"
    r"|this is (?:very |extremely )?important(?: to (?:me|my career))?"
    r"|put you(?:r)? final answer in \\boxed\{[^}]*\}|i(?:'ll| will) tip you \$?\d+)"
    r"[\s.,;!]*",
    re.IGNORECASE,
)
# A cheap look before the expensive one: none of these words, none of those phrases.
_EFFORT_HINTS: Final = ("step", "deep", "careful", "hard", "thorough", "precise", "important", "boxed", "tip", "pros")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|\n+")
# This many words in a row without a mark and without a word of grammar are a heap.
_HEAP: Final = 7
_RUN: Final = bytes(_HEAP)
_INSISTENT: Final = 3
_GRAMMAR_WORDS: Final = """
    a an the this that these those my your his her its our their of to in on at by for from with without into over
    under about between after before than as and or but if so because while when where which who whom whose what why how
    not no is are was were be been being am do does did done have has had can could will would shall should may might
    must i you he she it we they me him us them there here all any each every some many much more most other such
    only also just then too very up out off please let get got make made use give
"""
_GRAMMAR: Final = frozenset(_GRAMMAR_WORDS.split())
_PLAIN_WORD: Final = re.compile(r"[a-z'-]+\Z", re.IGNORECASE)


def without(text: str) -> str:
    """The text without pleas, repetition and heaps of keywords; a text that is nothing but a heap stays."""
    lowered = text.lower()
    if any(hint in lowered for hint in _EFFORT_HINTS):
        text = _EFFORT.sub(" ", text)
        lowered = text.lower()
    words = lowered.split()
    if len(set(words)) < 0.5 * len(words):
        text = _once(text) or text
        words = text.lower().split()
    if _RUN in bytes(map(_GRAMMAR.__contains__, words)):
        text = _without_heaps(text) or text
    return text.strip()


def _once(text: str) -> str:
    """Every sentence or line once, nothing that is part of another one, and no word three times in a row."""
    parts = dict.fromkeys(" ".join(_run_free(part)) for part in _SENTENCE_END.split(text))
    return "\n".join(part for part in parts if not any(part in other for other in parts if other != part))


def _run_free(part: str) -> Iterator[str]:
    """The words of a part; what is said three times in a row is not there at all."""
    for _, run in itertools.groupby(part.split(), str.lower):
        words = list(run)
        if len(words) < _INSISTENT:
            yield from words


def _bare(word: str) -> bool:
    """A word that belongs to a heap: letters only, and none of the words that hold sentences together."""
    return _PLAIN_WORD.match(word) is not None and word.lower() not in _GRAMMAR


def _without_heaps(text: str) -> str:
    """The text line by line, its heaps left out; lines without one stay as they are."""
    kept = []
    for line in text.split("\n"):
        runs = [(bare, list(run)) for bare, run in itertools.groupby(line.split(), _bare)]
        if any(bare and len(words) >= _HEAP for bare, words in runs):
            line = " ".join(" ".join(words) for bare, words in runs if not bare or len(words) < _HEAP)
        kept.append(line)
    return "\n".join(kept).strip()
