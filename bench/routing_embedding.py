"""`python -m bench.routing_embedding`: whether a sentence embedding pays for itself in naming the task.

The same logistic regression over four sets of inputs: words and shape; these and the word vectors that ship; these and
the embedding that the answer cache makes; all three. Trained on all prompts that people wrote and a sample of the
others, judged on hand-labelled prompts whose collection was left out. Takes some minutes, most of them to embed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression

from bench.report import Row, report
from bench.routing_judges import interval, text
from cache.embedding.embedder import Embedder, Refused
from tiers.features import TRAINED, extract
from tiers.task import KINDS, TASKS
from tiers.train import corpus
from tiers.train.corpus import HAND_LABELLED, REAL, Example
from tiers.train.fit import TERM_ROWS, inputs
from tiers.words import INPUTS

MODEL = "all-MiniLM-L6-v2"
_OTHERS = 4000
_SHARE_KEPT = 0.7  # of a text that does not fit the model's window, again and again until it does
# Length of the vectors beside inputs of 0 to 1, as for the word vectors.
_LENGTH = 3.0


def _embed(embedder: Embedder, examples: Sequence[Example]) -> NDArray[np.float32]:
    rows = []
    for example in examples:
        part = text(example)[:2000]
        while True:
            try:
                embedder.count(part)
                break
            except Refused:
                part = part[: int(len(part) * _SHARE_KEPT)]
        rows.append(embedder.embed([part or "."])[0] * _LENGTH)
    return np.array(rows)


def _right(matrix: csr_matrix, examples: Sequence[Example]) -> list[bool]:
    """For every hand-labelled prompt whether its task is named right by a model that has not seen its collection."""
    kinds, tasks = list(KINDS), np.array([TASKS.index(task) for task in KINDS.values()])
    target = np.array([kinds.index(e.kind) for e in examples])
    source = np.array([e.source for e in examples])
    counts = Counter(e.kind for e in examples)
    mass = np.array([counts[e.kind] ** -0.7 * (10.0 if e.source in REAL else 1.0) for e in examples]) * 100
    right: list[bool] = []
    for collection in HAND_LABELLED:
        out = source == collection
        model = LogisticRegression(C=10.0, max_iter=120, tol=1e-3).fit(matrix[~out], target[~out], mass[~out])
        found = model.predict_proba(matrix[out])
        of_task = np.array([tasks[model.classes_] == task for task in range(len(TASKS))], float)
        right += ((found @ of_task.T).argmax(axis=1) == tasks[target[out]]).tolist()
    return right


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routing_embedding", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="default: $TIERLINE_DATA")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("give the folder of the data sets with --data or $TIERLINE_DATA (see tiers/DATA.md)")
    everything = corpus.load(options.data)
    others = [e for e in everything if e.source not in REAL]
    examples = [e for e in everything if e.source in REAL] + random.Random(5).sample(others, _OTHERS)
    shipped = inputs([extract(e.messages) for e in examples])
    assert shipped.shape[1] == TERM_ROWS + len(TRAINED) + INPUTS
    lexical = shipped[:, : TERM_ROWS + len(TRAINED)]
    embedding = csr_matrix(_embed(Embedder(MODEL), examples))
    systems = {
        "words and shape": lexical,
        "and word vectors (ships)": shipped,
        "and sentence embedding": hstack([lexical, embedding], format="csr"),
        "and both": hstack([shipped, embedding], format="csr"),
    }
    rows: list[Row] = []
    for system, matrix in systems.items():
        right = _right(matrix, examples)
        rows.append(interval("task_accuracy", system, f"hand-labelled, collection left out (n={len(right)})", right))
    report("routing-embedding", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
