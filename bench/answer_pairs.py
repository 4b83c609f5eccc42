"""Pairs of answers in prose that say the same, and pairs that do not, made from public instructions and their answers.

The same: an answer with the phrases that models put around it, with its sentences in another order, shortened forms
written out, or as a list; what two runs of one model differ by. Different: the nearest answer to another instruction;
an answer with one number, one name or one negation changed, which is how a wrong answer looks near a right one.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

Pair = tuple[str, str]
_FILES = ("self_instruct_seed_tasks_175.jsonl.gz", "self_instruct_user_oriented_252.jsonl.gz")
_SHORTEST, _LONGEST = 60, 800  # characters: prose, and within the embedder's window
_OPENINGS = ("Sure! ", "Certainly. ", "Here is an answer: ", "Of course! Here you go: ", "Great question! ")
_CLOSINGS = (
    " I hope this helps!",
    " Let me know if you need anything else.",
    " Feel free to ask if you have questions.",
)
_CONTRACTIONS = (
    ("n't", " not"),
    ("'re ", " are "),
    ("'ll ", " will "),
    ("'ve ", " have "),
    ("I'm ", "I am "),
    ("It's ", "It is "),
    ("it's ", "it is "),
)
_NEGATIONS = ((" is ", " is not "), (" are ", " are not "), (" can ", " cannot "), (" will ", " will not "))
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def answers(data: Path) -> list[str]:
    """Answers in prose, each once."""
    found = []
    for name in _FILES:
        with gzip.open(data / "instructions" / name, "rt", encoding="utf-8") as file:
            found += [one["output"].strip() for line in file for one in json.loads(line)["instances"]]
    return [text for text in dict.fromkeys(found) if _SHORTEST <= len(text) <= _LONGEST and text.isascii()]


def same(texts: list[str]) -> dict[str, list[Pair]]:
    """By what was done to the answer; where it changes nothing there is no pair."""
    lot = random.Random(0)
    made: dict[str, Callable[[str], str]] = {
        "phrases around it": lambda text: lot.choice(_OPENINGS) + text + lot.choice(_CLOSINGS),
        "sentences in another order": lambda text: _reordered(text, lot),
        "short forms written out": _written_out,
        "as a list": lambda text: "\n".join(f"- {part}" for part in _SENTENCE.split(text)),
    }
    return {name: [(text, other) for text in texts if (other := make(text)) != text] for name, make in made.items()}


def different(texts: list[str]) -> dict[str, list[Pair]]:
    """By what was done to the answer; the nearest answer to another instruction is for the caller to find."""
    made: dict[str, Callable[[str], str]] = {
        "another number": lambda text: re.sub(r"\b[2-9]\d*\b", lambda found: str(int(found[0]) + 3), text, count=1),
        "another name": _renamed(texts),
        "a negation": _negated,
    }
    return {name: [(text, other) for text in texts if (other := make(text)) != text] for name, make in made.items()}


def statements(data: Path, count: int) -> dict[str, list[Pair]]:
    """One-sentence statements of CANNOT: `paraphrases`, made with antonyms, and `opposites`."""
    with gzip.open(data / "cannot_negation/sem_anto_neg.tsv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = {}
    for name, label in (("opposites", "1"), ("paraphrases", "0")):
        pairs = [(row["premise"], row["hypothesis"]) for row in rows if row["label"] == label]
        random.Random(1).shuffle(pairs)
        found[name] = pairs[:count]
    return found


def _reordered(text: str, lot: random.Random) -> str:
    first, *rest = _SENTENCE.split(text)
    lot.shuffle(rest)
    return " ".join([first, *rest])


def _written_out(text: str) -> str:
    for short, long in _CONTRACTIONS:
        text = text.replace(short, long)
    return text


def _negated(text: str) -> str:
    for plain, negated in _NEGATIONS:
        if plain in text:
            return text.replace(plain, negated, 1)
    return text


def _renamed(texts: list[str]) -> Callable[[str], str]:
    """One name within a sentence becomes a name of another answer."""
    name = re.compile(r"(?<=[a-z] )[A-Z][a-z]{3,}\b")
    names = sorted({found for text in texts for found in name.findall(text)})
    lot = random.Random(2)
    return lambda text: name.sub(lambda found: lot.choice([one for one in names if one != found[0]]), text, count=1)
