"""How often the judge `embedding` calls two statements the same that are opposites: `python -m bench.cache_judges`.

Data: `cannot_negation/sem_anto_neg.tsv.gz` under TIERLINE_DATA (CANNOT, CC BY-SA 4.0): statements with their negation
or antonym, and with a paraphrase. Prints shares of 1,000 pairs of each by cosine, and of these what no guard refuses.
"""

from __future__ import annotations

import csv
import gzip
import os
import random
import sys
from pathlib import Path

from cache.embedding.embedder import Embedder
from cache.judges import SAME_COSINE
from cache.words.guards import objection

PAIRS = 1000
BATCH = 32


def main() -> int:
    data = os.environ.get("TIERLINE_DATA")
    if not data:
        print("set TIERLINE_DATA to the folder of the data sets", file=sys.stderr)
        return 2
    path = Path(data) / "cannot_negation/sem_anto_neg.tsv.gz"
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    embedder = Embedder("all-MiniLM-L6-v2", threads=1)
    print(f"{'pairs':<12}{'cosine':>8}{'near':>9}{'called the same':>17}")
    for name, label in (("opposites", "1"), ("paraphrases", "0")):
        pairs = [(row["premise"], row["hypothesis"]) for row in rows if row["label"] == label]
        random.Random(1).shuffle(pairs)
        measure(name, pairs[:PAIRS], embedder)
    return 0


def measure(name: str, pairs: list[tuple[str, str]], embedder: Embedder) -> None:
    """Print one line per threshold."""
    texts = [text for pair in pairs for text in pair]
    vectors = [vector for at in range(0, len(texts), BATCH) for vector in embedder.embed(texts[at : at + BATCH])]
    cosines = [float(vectors[2 * at] @ vectors[2 * at + 1]) for at in range(len(pairs))]
    agreed = [objection(*pair) is None for pair in pairs]
    for threshold in (0.8, 0.85, SAME_COSINE, 0.95):
        near = [cosine >= threshold for cosine in cosines]
        same = sum(one and other for one, other in zip(near, agreed, strict=True))
        print(f"{name:<12}{threshold:>8.2f}{sum(near) / len(pairs):>9.1%}{same / len(pairs):>17.1%}")


if __name__ == "__main__":
    sys.exit(main())
