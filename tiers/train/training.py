"""From examples to weights and a success table: what ships, and what the evaluation trains anew in each fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from tiers.success import SuccessTable
from tiers.task import KINDS, TaskClassifier, Weights
from tiers.train import outcomes
from tiers.train.corpus import Example
from tiers.train.fit import difficulty, fit, held_out
from tiers.train.slopes import fit_slopes
from tiers.train.vectors import PromptVectors


def train(examples: Sequence[Example], vectors: PromptVectors | None = None) -> tuple[Weights, SuccessTable]:
    """Weights and table. The slopes are fitted on the tenth of the examples that the weights have not seen; those by
    words and those by vectors share them."""
    plain = outcomes.build(examples)
    complexity = {}
    for kind in KINDS:
        values = [difficulty(example, plain) for example in examples if example.kind == kind]
        complexity[kind] = fmean(values) if values else 0.5
    weights = fit(examples, plain, vectors)
    table = replace(plain, complexity=complexity)
    classifier = TaskClassifier(weights)
    held = [e for e, out in zip(examples, held_out(len(examples)), strict=True) if out and e.scores]
    views = [[classifier.classify(e.messages) for e in held]]
    if vectors is not None:
        views.append([classifier.classify(e.messages, vector=vectors.asked(e.messages)) for e in held])
    return weights, replace(table, slopes=fit_slopes(table, held, views))
