"""Texts that the classifier cannot judge, made from texts that it can: what it learns to call unfamiliar.

Other scripts, and words that are none with a few real ones between them: the shape stays, only the words change.
Real foreign texts are not trained on; `make bench-routing` measures with them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

_SEED = 11
_LETTERS = re.compile(r"[A-Za-z]+")
# First letters of Cyrillic, Arabic, Devanagari and Han: letters are shifted there, one for one.
_SCRIPTS = (0x0430, 0x0627, 0x0905, 0x4E00)


def disguises(conversations: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Each conversation as one that nobody can judge: every second one as gibberish, the others in another script."""
    rng = random.Random(_SEED)
    found = []
    for number, messages in enumerate(conversations):
        base = rng.choice(_SCRIPTS)

        def disguise(word: re.Match[str], base: int = base, gibberish: bool = number % 2 == 1) -> str:
            return _scrambled(word[0], rng) if gibberish else _other_script(word[0], base)

        found.append([{**m, "content": _LETTERS.sub(disguise, str(m["content"]))} for m in messages])
    return found


def _scrambled(word: str, rng: random.Random) -> str:
    """Other letters in the place of most words: gibberish with a few real words in it."""
    if len(word) < 3 or rng.random() < 0.2:
        return word
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in word)


def _other_script(word: str, base: int) -> str:
    return "".join(chr(base + (ord(letter) | 32) - 97) for letter in word)
