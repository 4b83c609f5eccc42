"""Fits the classifier's weights: a multinomial logistic regression, a ridge for complexity, a temperature, strangeness.

Inputs are those of `tiers.features`; the parameters are rounded to int8 and stored by `Weights.save`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression, Ridge

from tiers.features import Features, extract
from tiers.linear import Linear
from tiers.success import SuccessTable
from tiers.task import KINDS, VOCABULARY_BITS, TaskClassifier, Weights, term_rows
from tiers.train.corpus import REAL, Example
from tiers.train.foreign import disguises
from tiers.train.vectors import PromptVectors
from tiers.vector import inputs_of
from tiers.words import default_words

TERM_ROWS = 1 << 13
_KINDS = list(KINDS)


def inputs(features: Sequence[Features]) -> csr_matrix:
    """Inputs [n, TERM_ROWS + F + W]: 1/sqrt(n) per hashed term, the numeric features, then the word vectors."""
    columns: list[int] = []
    values: list[float] = []
    starts = [0]
    for item in features:
        rows = term_rows(item.terms, TERM_ROWS)
        columns += rows
        values += [max(1, len(rows)) ** -0.5] * len(rows)
        starts.append(len(columns))
    terms = csr_matrix((values, columns, starts), shape=(len(features), TERM_ROWS), dtype=np.float32)
    terms.sum_duplicates()
    numbers = csr_matrix(np.array([item.vector() for item in features], np.float32))
    words = default_words()
    means = csr_matrix(np.array([words.inputs(item) for item in features]))
    return hstack([terms, numbers, means], format="csr")


def _weights_of(examples: Sequence[Example]) -> NDArray[np.float64]:
    """Rare kinds count more (power 0.7); prompts that people wrote count tenfold: they are the closest to traffic."""
    kinds = Counter(e.kind for e in examples)
    return np.array([kinds[e.kind] ** -0.7 * (10.0 if e.source in REAL else 1.0) for e in examples]) * 100


def difficulty(example: Example, table: SuccessTable) -> float:
    """Share of the models that failed on a prompt; where nobody measured, the kind's failure rate at tier medium."""
    if example.scores:
        return 1.0 - float(np.mean(list(example.scores.values())))
    return 1.0 - table.kind(example.kind, "medium").mean


def held_out(count: int) -> NDArray[np.bool_]:
    """Which of so many examples `fit` learns nothing from but how sure it may be."""
    held: NDArray[np.bool_] = np.arange(count) % 10 == 7
    return held


def fit(
    examples: Sequence[Example], table: SuccessTable, vectors: PromptVectors | None = None, regularisation: float = 10.0
) -> Weights:
    """Train on `examples`; a tenth of them, chosen by position, calibrates confidence and strangeness.

    Args:
        vectors: of all examples; then there are weights for requests with a vector, trained on the examples that have
            one. The vectors leave the weights of the words as they are.
    """
    features = [extract(e.messages) for e in examples]
    held = held_out(len(examples))
    matrix = inputs(features)
    words = _linear(matrix, examples, held, table, regularisation)
    vector = None
    if vectors is not None:
        found = [vectors.asked(e.messages) for e in examples]
        there = np.array([one is not None for one in found])
        dense = csr_matrix(np.array([inputs_of(one) for one in found if one is not None]))
        some = [example for example, one in zip(examples, found, strict=True) if one is not None]
        both = hstack([matrix[there], dense], format="csr")
        vector = _linear(both, some, held[there], table, regularisation)
    weights = Weights(
        words=words,
        vector=vector,
        vocabulary=_vocabulary([f for f, h in zip(features, held, strict=True) if not h]),
        unfamiliar=np.zeros(3, np.float32),
    )
    return _familiarise(weights, [example for example, h in zip(examples, held, strict=True) if h])


def _linear(
    matrix: csr_matrix,
    examples: Sequence[Example],
    held: NDArray[np.bool_],
    table: SuccessTable,
    regularisation: float,
) -> Linear:
    """Weights for the inputs [n, TERM_ROWS + N] of the examples; those that are held calibrate the temperature."""
    target = np.array([_KINDS.index(e.kind) for e in examples])
    importance = _weights_of(examples)
    model = LogisticRegression(C=regularisation, max_iter=120, tol=1e-3)
    model.fit(matrix[~held], target[~held], sample_weight=importance[~held])
    hardness = Ridge(alpha=3.0)
    hardness.fit(matrix[~held], [difficulty(e, table) for e, h in zip(examples, held, strict=True) if not h])

    table_all = np.zeros((matrix.shape[1], len(_KINDS) + 1), np.float64)
    bias = np.full(len(_KINDS) + 1, -20.0)  # a kind that this training set lacks is never chosen
    table_all[:, model.classes_] = model.coef_.T
    bias[model.classes_] = model.intercept_
    table_all[:, -1], bias[-1] = hardness.coef_, hardness.intercept_
    terms, numbers = table_all[:TERM_ROWS], table_all[TERM_ROWS:]
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-9) / 127
    linear = Linear(
        terms=np.round(terms / scale).astype(np.int8),
        scale=scale.astype(np.float32),
        numbers=numbers.astype(np.float32),
        bias=bias.astype(np.float32),
        temperature=1.0,
    )
    rounded = np.concatenate((linear.terms * linear.scale, linear.numbers))
    scores = matrix[held] @ rounded[:, :-1] + linear.bias[:-1]
    real = np.array([example.source in REAL for example, h in zip(examples, held, strict=True) if h])
    return replace(linear, temperature=_temperature(scores, target[held], real))


def _vocabulary(features: Sequence[Features]) -> NDArray[np.uint8]:
    """Bits of the words that occur in at least two prompts."""
    counts = Counter(word for item in features for word in item.words)
    bits = np.zeros(VOCABULARY_BITS, np.uint8)
    bits[term_rows([word for word, count in counts.items() if count > 1], VOCABULARY_BITS)] = 1
    return np.packbits(bits, bitorder="little")


def _temperature(scores: NDArray[np.float64], target: NDArray[np.int64], real: NDArray[np.bool_]) -> float:
    """Of scores [n, K], by maximum likelihood.

    Where there are hand-labelled (`real`) prompts among them they count as much as all others together: benchmarks and
    patterns are easier to tell apart than traffic, and confidence fitted to them alone is too high.
    """
    mass = np.ones(len(target))
    if 0 < real.sum() < len(real):
        mass[real] = (~real).sum() / real.sum()

    def loss(log_temperature: float) -> float:
        scaled = scores / np.exp(log_temperature)
        scaled -= scaled.max(axis=1, keepdims=True)
        losses = np.log(np.exp(scaled).sum(axis=1)) - scaled[np.arange(len(target)), target]
        return float(np.average(losses, weights=mass))

    return float(np.exp(minimize_scalar(loss, bounds=(-1.5, 1.5), method="bounded").x))


def _familiarise(weights: Weights, examples: Sequence[Example]) -> Weights:
    """Weights of the unfamiliarity: a logistic regression of held-out prompts against their own disguises.

    Both sides have the same mass, and so have hand-labelled prompts and the others, as in `_temperature`.
    """
    real = np.array([example.source in REAL for example in examples])
    classifier = TaskClassifier(weights)
    messages = [example.messages for example in examples]
    share = float(real.mean())
    one = np.where(real, 0.5 / share, 0.5 / (1 - share)) if 0 < share < 1 else np.ones(len(real))
    rows, foreign, mass = [], [], []
    for strange, group in ((0, messages), (1, disguises(messages))):
        for item, weight in zip(group, one, strict=True):
            profile = classifier.classify(item)
            rows.append([1 - profile.features["known_words"], 1 - profile.confidence])
            foreign.append(strange)
            mass.append(weight)
    model = LogisticRegression(C=10.0).fit(rows, foreign, sample_weight=mass)
    return replace(weights, unfamiliar=np.array([model.intercept_[0], *model.coef_[0]], np.float32))
