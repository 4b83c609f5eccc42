"""Public questions with known answers, as streams: what the verifier is trained on and the cache is measured with.

Sources and licences are in DATA.md. Nothing of the texts is shipped.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections import defaultdict
from pathlib import Path

import msgspec


class Asked(msgspec.Struct, frozen=True):
    """A question of a stream; equal `answer_id` means that one answer serves both."""

    text: str
    answer_id: str


def banking77(data: Path) -> list[Asked]:
    """10,003 questions to a bank; equal intent = equal answer."""
    with gzip.open(data / "banking77" / "train.csv.gz", "rt", encoding="utf-8") as file:
        return [Asked(row["text"], row["category"]) for row in csv.DictReader(file)]


def clinc150(data: Path) -> list[Asked]:
    """15,000 utterances of 150 intents; equal intent = equal answer."""
    return [Asked(text, intent) for text, intent in _clinc(data)["train"]]


def clinc150_open(data: Path) -> list[Asked]:
    """The same and 1,200 utterances that belong to none, each with an answer of its own."""
    found = _clinc(data)
    loose = [text for part in ("oos_train", "oos_val", "oos_test") for text, _ in found[part]]
    return clinc150(data) + [Asked(text, f"none of them {i}") for i, text in enumerate(loose)]


def clinc150_rest(data: Path) -> list[Asked]:
    """7,500 utterances of the same 150 intents that nothing is trained on."""
    found = _clinc(data)
    return [Asked(text, intent) for part in ("val", "test") for text, intent in found[part]]


def headlines(data: Path) -> list[Asked]:
    """5,000 headlines on the price of gold; the answer is one of four words: up, down, neutral, none."""
    with gzip.open(data / "frugalgpt_headlines" / "train.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = [(row[0].removeprefix("Q: ").removesuffix("\nA:").strip(), row[1]) for row in csv.reader(file)]
    return [Asked(text, answer) for text, answer in rows]


STREAMS = {"banking77": banking77, "clinc150": clinc150}
# Nothing is trained on these, and no rule was chosen by them.
UNSEEN = {"clinc150_rest": clinc150_rest, "headlines": headlines}


def thinned(stream: list[Asked], most: int, seed: int) -> list[Asked]:
    """At most `most` questions of each answer, shuffled: traffic that repeats itself less."""
    of_answer: dict[str, list[Asked]] = defaultdict(list)
    for asked in random.Random(seed).sample(stream, len(stream)):
        if len(of_answer[asked.answer_id]) < most:
            of_answer[asked.answer_id].append(asked)
    kept = [asked for questions in of_answer.values() for asked in questions]
    return random.Random(seed).sample(kept, len(kept))


def _clinc(data: Path) -> dict[str, list[list[str]]]:
    with gzip.open(data / "clinc150" / "data_full.json.gz", "rt", encoding="utf-8") as file:
        found: dict[str, list[list[str]]] = json.load(file)
    return found
