"""Pairs that differ in one small word, or in who does what: the guards keep them apart, and let rewordings through.

`guard_pairs.tsv` holds them by kind, beside each other those of different meaning and those of the same. The English
ones are decided by the whole rule with the real embedder, which takes most of them for equal. It knows no Chinese, so
these are put to the guards alone. Pairs of the kind `narrowed` are kept apart by the rule of the threshold, and no
guard objects to them.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from cache.embedding.embedder import Embedder
from cache.words.guards import narrows, objection, verify

THRESHOLD = 0.95
# The arithmetic of the embedder differs a little between kinds of processor: a pair that is as near to the threshold as
# that may be taken for less alike than it is.
PROCESSORS = 0.002

with (Path(__file__).parent / "guard_pairs.tsv").open(encoding="utf-8", newline="") as file:
    PAIRS = [
        (row["kind"], row["same"] == "1", row["text_a"], row["text_b"]) for row in csv.DictReader(file, delimiter="\t")
    ]
ENGLISH = [pair for pair in PAIRS if not pair[0].startswith("zh ")]


@pytest.mark.parametrize(("kind", "same", "a", "b"), PAIRS)
def test_the_guards_keep_apart_what_differs_and_nothing_else(kind: str, same: bool, a: str, b: str) -> None:
    for one, other in ((a, b), (b, a)):
        objects, narrower = objection(one, other) is not None, narrows(one, other)
        if same:
            assert (objects, narrower) == (False, False)
        else:
            assert (objects, narrower) == (False, True) if kind.endswith("narrowed") else objects


def test_every_english_pair_is_decided_right_by_the_whole_rule(embedder: Embedder) -> None:
    first = embedder.embed([a for _, _, a, _ in ENGLISH])
    second = embedder.embed([b for _, _, _, b in ENGLISH])
    wrong = [
        (a, b)
        for (_, same, a, b), one, other in zip(ENGLISH, first, second, strict=True)
        if verify(a, b, float(one @ other) + PROCESSORS, THRESHOLD).accepted != same
    ]
    assert wrong == []


def test_the_embedder_alone_would_accept_most_of_what_differs(embedder: Embedder) -> None:
    """Else these pairs would prove nothing about the guards."""
    different = [(a, b) for _, same, a, b in ENGLISH if not same]
    first, second = (embedder.embed(list(side)) for side in zip(*different, strict=True))
    near = sum(float(one @ other) >= THRESHOLD for one, other in zip(first, second, strict=True))
    assert near > len(different) / 2


def test_each_kind_has_twenty_pairs_and_many_of_the_same_meaning() -> None:
    count = Counter(kind for kind, *_ in PAIRS)
    same = Counter(kind for kind, alike, *_ in PAIRS if alike)
    assert len(count) == 14
    assert all(count[kind] >= 20 and same[kind] >= 10 for kind in count)
