"""How often the judge `embedding` is wrong about answers: `python -m bench.cache_judges`, with TIERLINE_DATA.

Answers in prose that say the same, and others (`bench/answer_pairs.py`); statements with their opposites and
paraphrases (CANNOT, CC BY-SA 4.0). Prints by threshold which share of the pairs it calls the same, guards included,
and by the cosine alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from bench.answer_pairs import Pair, answers, different, same, statements
from bench.report import Row, report
from cache.embedding.embedder import Embedder, Refused, Vectors
from cache.judges import SAME_COSINE, same_words

STATEMENTS = 1000
THRESHOLDS = (0.8, 0.85, SAME_COSINE, 0.95, 0.98)
_BATCH = 16


def main() -> int:
    folder = os.environ.get("TIERLINE_DATA")
    if not folder:
        print("set TIERLINE_DATA to the folder of the data sets", file=sys.stderr)
        return 2
    data, embedder = Path(folder), Embedder("all-MiniLM-L6-v2", threads=1)
    texts = [text for text in answers(data) if readable(text, embedder)]
    told = statements(data, STATEMENTS)
    rows: list[Row] = []
    for name, pairs in same(texts).items():
        rows += measured(f"the same: {name}", pairs, embedder)
    rows += measured("the same: paraphrased with antonyms", told["paraphrases"], embedder)
    for name, pairs in {"the nearest other answer": nearest(texts, embedder), **different(texts)}.items():
        rows += measured(f"different: {name}", pairs, embedder)
    rows += measured("different: opposites", told["opposites"], embedder)
    report("cache_judges", rows)
    return 0


def measured(name: str, pairs: list[Pair], embedder: Embedder) -> list[Row]:
    """Which share of the pairs is called the same."""
    pairs = [pair for pair in pairs if all(readable(text, embedder) for text in pair)]
    first, second = (embedded([pair[side] for pair in pairs], embedder) for side in (0, 1))
    cosines = np.einsum("ij,ij->i", first, second)
    agreed = np.array([same_words(*pair) for pair in pairs])
    rows = []
    for threshold in THRESHOLDS:
        near, setting = cosines >= threshold, f"{name} ({len(pairs)}), cosine {threshold:.2f}"
        rows.append(Row.of("called_the_same", "tierline", setting, "share", [float((near & agreed).mean())]))
        rows.append(Row.of("called_the_same", "cosine alone", setting, "share", [float(near.mean())]))
    return rows


def nearest(texts: list[str], embedder: Embedder) -> list[Pair]:
    """Each answer with the most similar answer to another instruction."""
    vectors = embedded(texts, embedder)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -1.0)
    return [(text, texts[other]) for text, other in zip(texts, cosines.argmax(axis=1), strict=True)]


def embedded(texts: list[str], embedder: Embedder) -> Vectors:
    """Vectors [texts, dimension]."""
    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
    made: dict[int, Vectors] = {}
    for start in range(0, len(order), _BATCH):
        some = order[start : start + _BATCH]
        made.update(zip(some, embedder.embed([texts[at] for at in some]), strict=True))
    return np.stack([made[at] for at in range(len(texts))])


def readable(text: str, embedder: Embedder) -> bool:
    try:
        embedder.check(text)
    except Refused:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
