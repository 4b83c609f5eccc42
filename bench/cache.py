"""The semantic cache on public questions: how often it hits and how often it is wrong.

Beside it, with the same embedder, the rule that other gateways use: the nearest question by cosine similarity alone,
taken as typed, with nothing refused. Every run shuffles the stream with another seed. Labels are the data sets' own; in
Banking77 many "wrong" hits are equal questions with different labels ("How to verify my identity" stands under two).

    banking77        stream of customer questions, equal intent = equal answer; here by the static rule,
                     in `cache_online.py` under promises
    clinc150         stream of utterances of 150 intents
    cannot_negation  pairs of opposites: every hit is wrong
    pawsx_zh         Chinese pairs of like words, half of them of different meaning. The embedder refuses Chinese, so
                     what the guards alone object to is counted, too
    .../typed        questions and the same as typed in haste: no capitals, no mark at the end; every miss is a loss

    TIERLINE_DATA=FOLDER python -m bench.cache [--part static|promise] [--runs 3]
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.cache_online import examples, measure_bounds, measure_offline, measure_online, published
from bench.cache_swaps import swaps
from bench.report import Row, report
from cache.embedding.embedder import Embedder, Vectors
from cache.evaluation.files import Pair
from cache.evaluation.pairs import evaluate_pairs
from cache.evaluation.result import Summary
from cache.evaluation.stream import evaluate_stream
from cache.store.index import VectorIndex
from cache.verifier.corpus import STREAMS, Asked, banking77, clinc150
from cache.words.guards import objection

THRESHOLDS = (0.90, 0.95, 0.97)
PEER = "cosine alone"
ASKING = ("what ", "how ", "when ", "where ", "who ", "why ", "which ", "can ", "do ", "does ", "is ", "are ")


class Remembering:
    """An embedder that embeds a text once, so that every threshold and seed sees the same vectors at no cost."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._known: dict[str, Vectors] = {}
        self.name, self.dimension, self.scripts = embedder.name, embedder.dimension, embedder.scripts

    def check(self, text: str) -> None:
        self._embedder.check(text)

    def embed(self, texts: list[str]) -> Vectors:
        missing = sorted({text for text in texts if text not in self._known}, key=len)
        for start in range(0, len(missing), 32):
            batch = missing[start : start + 32]
            self._known.update(zip(batch, self._embedder.embed(batch), strict=True))
        return np.stack([self._known[text] for text in texts])


def pair_sets(data: Path) -> Iterator[tuple[str, list[Pair]]]:
    folder = data / "cannot_negation"
    rows = _tsv(folder / "sem_anto_neg.tsv.gz")
    yield "cannot_negation/sem_anto_neg", [Pair(r["premise"], r["hypothesis"], r["label"] == "0") for r in rows]
    rows = _tsv(folder / "sentiment_labelled_sentences.tsv.gz")
    yield "cannot_negation/sentiment", [Pair(r["sentence"], r["negated"], False) for r in rows]
    rows = _tsv(data / "pawsx_zh" / "dev_2k.tsv.gz")
    yield "pawsx_zh", [Pair(r["sentence1"], r["sentence2"], r["label"] == "1") for r in rows]
    yield "number, date and code swaps", list(swaps())


def typed_in_haste(data: Path, count: int = 2000) -> Iterator[tuple[str, list[Pair]]]:
    """Questions as typed in haste, beside themselves with a capital and a mark. Those of Clinc150 are short."""
    banking, clinc = banking77(data), clinc150(data)
    careful = [asked.text.strip() for asked in banking if asked.text.strip().endswith(("?", "."))]
    hasty = [asked.text for asked in clinc if asked.text.startswith(ASKING)]
    for name, texts in (
        ("banking77/typed", careful),
        ("clinc150/typed", [text[0].upper() + text[1:] + "?" for text in hasty]),
    ):
        sample = random.Random(0).sample(texts, count)
        yield name, [Pair(text.lower().rstrip("?. "), text, True) for text in sample]


def _tsv(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def cosine_stream(stream: list[Asked], embedder: Remembering, threshold: float) -> tuple[float, float]:
    """Hit rate and false-hit rate of the nearest neighbour alone."""
    index = VectorIndex(embedder.dimension)
    vectors = embedder.embed([asked.text for asked in stream])
    hits = wrong = 0
    for i, (asked, vector) in enumerate(zip(stream, vectors, strict=True)):
        nearest = index.search(vector, 1)
        if nearest and nearest[0][1] >= threshold:
            hits += 1
            wrong += stream[nearest[0][0]].answer_id != asked.answer_id
        else:
            index.add(i, vector)
    return hits / len(stream), wrong / hits if hits else 0.0


def measure_streams(data: Path, embedder: Remembering, runs: int) -> Iterator[Row]:
    for name, read in STREAMS.items():
        stream = read(data)
        for threshold in THRESHOLDS:
            ours: list[Summary] = []
            peers: list[tuple[float, float]] = []
            for seed in range(runs):
                shuffled = random.Random(seed).sample(stream, len(stream))
                ours.append(evaluate_stream(shuffled, embedder, threshold=threshold).summary)
                peers.append(cosine_stream(shuffled, embedder, threshold))
            setting = f"{name} threshold={threshold:.2f}"
            yield Row.of("hit_rate", "tierline", setting, "share", [found.hit_rate or 0.0 for found in ours])
            yield Row.of("hit_rate", PEER, setting, "share", [hit for hit, _ in peers])
            yield Row.of(
                "false_hit_rate", "tierline", setting, "share", [found.false_hit_rate or 0.0 for found in ours]
            )
            yield Row.of("false_hit_rate", PEER, setting, "share", [wrong for _, wrong in peers])


def measure_pairs(data: Path, embedder: Remembering) -> Iterator[Row]:
    for name, pairs in pair_sets(data):
        different = [pair for pair in pairs if not pair.same]
        first = embedder.embed([pair.text_a for pair in different])
        second = embedder.embed([pair.text_b for pair in different])
        cosines = np.einsum("ij,ij->i", first, second)
        for threshold in THRESHOLDS:
            setting = f"{name} threshold={threshold:.2f}"
            found = evaluate_pairs(pairs, embedder, threshold=threshold).summary
            yield Row.of("false_accept_rate", "tierline", setting, "share", [found.false_accept_rate or 0.0])
            if threshold == THRESHOLDS[0]:
                yield from _under_promise(name, pairs, embedder)
            accepted = float((cosines >= threshold).mean())
            yield Row.of("false_accept_rate", PEER, setting, "share", [accepted])
        for meaning, chosen in (("different", different), ("same", [pair for pair in pairs if pair.same])):
            if chosen:
                refused = sum(objection(pair.text_a, pair.text_b) is not None for pair in chosen)
                setting = f"{name} {meaning} meaning"
                yield Row.of("objection_rate", "tierline, guards alone", setting, "share", [refused / len(chosen)])


def _under_promise(name: str, pairs: list[Pair], embedder: Remembering) -> Iterator[Row]:
    """Pairs of different meaning accepted where the bar is the promise's, by the shipped verifier."""
    for promise in (0.005, 0.02):
        found = evaluate_pairs(pairs, embedder, max_false_hit_rate=promise)
        wrong = [decision for decision in found.decisions if decision.correct is False]
        same_text = sum(decision.outcome == "exact" for decision in wrong)
        count = sum(not pair.same for pair in pairs)
        setting = f"{name} promise={promise:.1%}"
        yield Row.of("false_accept_rate", "tierline", setting, "share", [(len(wrong) - same_text) / count])
        yield Row.of("false_accept_rate", "tierline, the same text twice", setting, "share", [same_text / count])
        if found.summary.recall is not None:
            yield Row.of("recall", "tierline", setting, "share", [found.summary.recall])


def measure_typed(data: Path, embedder: Remembering) -> Iterator[Row]:
    for name, pairs in typed_in_haste(data):
        first, second = (embedder.embed([getattr(pair, side) for pair in pairs]) for side in ("text_a", "text_b"))
        cosines = np.einsum("ij,ij->i", first, second)
        for threshold in THRESHOLDS:
            setting = f"{name} threshold={threshold:.2f}"
            found = evaluate_pairs(pairs, embedder, threshold=threshold).summary
            yield Row.of("recall", "tierline", setting, "share", [found.recall or 0.0])
            yield Row.of("recall", PEER, setting, "share", [float((cosines >= threshold).mean())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="or TIERLINE_DATA")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--part", choices=("all", "static", "promise"), default="all")
    options = parser.parse_args()
    if options.data is None:
        parser.error("name the folder of data sets with --data or TIERLINE_DATA")
    remembering = Remembering(Embedder("all-MiniLM-L6-v2", threads=1))
    if options.part in ("all", "static"):
        report("cache", measure_static(options.data, remembering, options.runs))
    if options.part in ("all", "promise"):
        report("cache_promise", measure_promise(options.data, remembering, options.runs))


def measure_static(data: Path, remembering: Remembering, runs: int) -> Iterator[Row]:
    """Pairs, and streams by the rule without a promise."""
    yield from measure_pairs(data, remembering)
    yield from measure_typed(data, remembering)
    yield from measure_streams(data, remembering, runs)


def measure_promise(data: Path, remembering: Remembering, runs: int) -> Iterator[Row]:
    """What the promise keeps, and what others have published."""
    yield from measure_bounds()
    sets = examples(data, remembering)
    yield from measure_offline(data, remembering, sets)
    yield from measure_online(data, remembering, sets, runs)
    yield from published()


if __name__ == "__main__":
    main()
