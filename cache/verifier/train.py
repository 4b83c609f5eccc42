"""`python -m cache.verifier.train --data FOLDER`: fit the verifier on public questions and write `prior.json`.

Each stream is played through a cache that keeps every question under its true answer; each candidate on the way, and
whether its answer was right, is one example. Streams are played whole, thinned out and in small pieces, because a young
cache, or one whose answers have few questions, shows other neighbours than a full one. Every data set counts the same.

With `--leave-one-out` nothing is written: each data set is judged by a verifier that was fitted on the others. Takes
some minutes and the extra `[train]`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.embedding.embedder import Embedder, Refused, Vectors
from cache.store.index import Vector, VectorIndex
from cache.verifier.corpus import Asked, banking77, clinc150_open, thinned
from cache.verifier.features import FEATURES
from cache.verifier.model import PRIOR_FILE, Verifier
from cache.verifier.neighbours import NEIGHBOURS, Neighbour, candidate
from cache.words.asking import asked_form

VERSION = "2"
# Questions per answer in the thinned streams.
_THINNED = (3, 12, 40)
_MOST_QUESTIONS = 32
# Small caches: how many, of how many questions on how many subjects.
_YOUNG, _YOUNG_QUESTIONS, _YOUNG_SUBJECTS = 150, 40, 12
_INVERSE_PENALTY = 1.0
_TARGETS = (0.005, 0.01, 0.02)

Array = NDArray[np.float64]


class Examples(msgspec.Struct):
    """Features [examples, features], whether the answer was right, and whether a guard objected, [examples]."""

    x: Array
    right: NDArray[np.bool_]
    objected: NDArray[np.bool_]


def play(stream: list[Asked], vectors: dict[str, Vector]) -> Examples:
    """Ask the questions in order of a cache that learns the true answer to each."""
    index = VectorIndex(len(next(iter(vectors.values()))))
    answers: dict[str, int] = {}
    questions: dict[int, int] = defaultdict(int)
    x, right, objected = [], [], []
    known: list[tuple[str, int]] = []
    for asked in stream:
        vector = vectors.get(asked.text)
        if vector is None:
            continue
        nearest = [Neighbour(*known[id], cosine) for id, cosine in index.search(vector, NEIGHBOURS)]
        found = candidate(asked.text, nearest)
        answer = answers.setdefault(asked.answer_id, len(answers))
        if found is not None:
            x.append(found.features)
            right.append(found.answer_id == answer)
            objected.append(found.objection is not None)
        if questions[answer] < _MOST_QUESTIONS:
            questions[answer] += 1
            index.add(len(known), vector)
            known.append((asked.text, answer))
    return Examples(np.array(x), np.array(right), np.array(objected))


def examples_of(stream: list[Asked], vectors: dict[str, Vector]) -> Examples:
    """The examples of a data set: its stream whole, and thinned out."""
    played = [play(thinned(stream, len(stream), 0), vectors)]
    played += [play(thinned(stream, most, seed), vectors) for seed, most in enumerate(_THINNED, 1)]
    played += [play(part, vectors) for part in young(stream)]
    return Examples(*(np.concatenate([getattr(part, name) for part in played]) for name in Examples.__struct_fields__))


def young(stream: list[Asked]) -> Iterator[list[Asked]]:
    """Streams of few questions on few subjects: most caches are small, and then there are few neighbours."""
    lot = random.Random(0)
    of_answer: dict[str, list[Asked]] = defaultdict(list)
    for asked in stream:
        of_answer[asked.answer_id].append(asked)
    subjects = sorted(of_answer)
    for _ in range(_YOUNG):
        some = [asked for subject in lot.sample(subjects, _YOUNG_SUBJECTS) for asked in of_answer[subject]]
        yield lot.sample(some, min(len(some), _YOUNG_QUESTIONS))


def train(sets: list[Examples]) -> Verifier:
    """A verifier fitted on all `sets`, each of which weighs as much as another."""
    from sklearn.linear_model import LogisticRegression

    free = [found.x[~found.objected] for found in sets]
    x = np.concatenate(free)
    right = np.concatenate([found.right[~found.objected] for found in sets])
    weights = np.concatenate([np.full(len(part), len(x) / len(sets) / len(part)) for part in free])
    means, scales = x.mean(axis=0), x.std(axis=0)
    scales[scales == 0] = 1.0
    model = LogisticRegression(C=_INVERSE_PENALTY, max_iter=5000)
    model.fit((x - means) / scales, right, weights)
    return Verifier(
        VERSION,
        FEATURES,
        tuple(means.round(6).tolist()),
        tuple(scales.round(6).tolist()),
        tuple(model.coef_[0].round(6).tolist()),
        round(float(model.intercept_[0]), 6),
    )


def hits_within(found: Examples, scores: Array, wrong: float) -> float:
    """Largest share of all candidates that may be accepted, best scores first, with at most `wrong` of them wrong."""
    order = np.argsort(-np.where(found.objected, -np.inf, scores), kind="stable")
    order = order[: int((~found.objected).sum())]
    rates = np.cumsum(~found.right[order]) / np.arange(1, len(order) + 1)
    kept = np.flatnonzero(rates <= wrong)
    return float(kept[-1] + 1) / len(scores) if len(kept) else 0.0


def embedded(stream: list[Asked], embedder: Embedder) -> dict[str, Vector]:
    """Vector by text, without the texts that the embedder refuses."""
    texts = []
    for text in dict.fromkeys(asked.text for asked in stream):
        try:
            embedder.check(asked_form(text))
            texts.append(text)
        except Refused:
            continue
    texts.sort(key=len)
    found: dict[str, Vector] = {}
    for start in range(0, len(texts), 64):
        batch = texts[start : start + 64]
        vectors: Vectors = embedder.embed([asked_form(text) for text in batch])
        found.update(zip(batch, vectors, strict=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cache.verifier.train", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="default: $TIERLINE_DATA")
    parser.add_argument("--out", type=Path, default=PRIOR_FILE)
    parser.add_argument("--leave-one-out", action="store_true", help="judge each data set by the others; write nothing")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("give the folder of the data sets with --data or $TIERLINE_DATA")
    embedder = Embedder("all-MiniLM-L6-v2", threads=1)
    sets: dict[str, Examples] = {}
    for name, read in (("banking77", banking77), ("clinc150", clinc150_open)):
        stream = read(options.data)
        sets[name] = examples_of(stream, embedded(stream, embedder))
        print(f"{name}: {len(sets[name].right)} examples, {sets[name].right.mean():.1%} right", flush=True)
    if options.leave_one_out:
        for name, held in sets.items():
            verifier = train([found for other, found in sets.items() if other != name])
            scores = np.array([verifier.logit(tuple(row)) for row in held.x.tolist()])
            free = ~held.objected
            expected = float((1 / (1 + np.exp(-scores[free]))).mean())
            print(f"{name} by the others: {held.right[free].mean():.3f} right, {expected:.3f} expected")
            for wrong in _TARGETS:
                learned = hits_within(held, scores, wrong)
                print(
                    f"  at most {wrong:.1%} wrong: {learned:.1%}, cosine {hits_within(held, held.x[:, 0], wrong):.1%}"
                )
        return 0
    verifier = train(list(sets.values()))
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(verifier), indent=1) + b"\n")
    for feature, weight in zip(verifier.features, verifier.coefficients, strict=True):
        print(f"{feature:<16}{weight:+.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
