"""What stands beside the router: a keyword heuristic of the usual kind, and a lexical model of our own making.

Both are judged on the same prompts as the router; the lexical model also on the same folds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import Ridge

from bench.prompt_vectors import embed
from bench.report import Row
from cache.embedding.embedder import Embedder
from tiers import TIERS
from tiers.features import Message, extract, text_of
from tiers.task import TaskClassifier, TaskProfile
from tiers.train import evaluate
from tiers.train.corpus import Example
from tiers.train.fit import TERM_ROWS, inputs
from tiers.train.vectors import PromptVectors

OURS, BASELINE, LEXICAL = "tierline", "keyword heuristic", "lexical ridge"
WITH_VECTORS = "tierline with vectors"


class Judge(Protocol):
    """What says what a request is."""

    def classify(self, messages: Sequence[Message]) -> TaskProfile: ...


class WithVectors:
    """A classifier that looks at vectors, as a gateway with a cache process does."""

    def __init__(self, classifier: TaskClassifier, vectors: PromptVectors, embedder: Embedder) -> None:
        self._classifier = classifier
        self._vectors = vectors
        self._embedder = embedder

    def classify(self, messages: Sequence[Message]) -> TaskProfile:
        embed([messages], self._vectors, self._embedder)
        return self._classifier.classify(messages, vector=self._vectors.asked(messages))


def of_vectors(rows: Iterable[Row]) -> list[Row]:
    """Rows that were made of decisions by vectors, under that name; what stands beside them is there already."""
    return [replace(row, system=row.system.replace(OURS, WITH_VECTORS)) for row in rows if row.system.startswith(OURS)]


_WORDS = {
    "coding": ("code", "function", "python", "javascript", "sql", "bug", "error", "script", "class", "program"),
    "math": ("solve", "equation", "calculate", "how many", "sum of", "percent", "prove", "integral", "probability"),
    "reasoning": ("analyze", "analyse", "compare", "step by step", "trade-off", "strategy", "why", "evaluate"),
    "translation": ("translate", "translation"),
    "summarisation": ("summarize", "summarise", "summary", "tl;dr"),
    "classification": ("classify", "category", "sentiment", "label", "spam", "true or false"),
    "extraction": ("extract", "find all", "list all", "entities"),
    "rewriting": ("rewrite", "rephrase", "paraphrase", "grammar", "correct the"),
    "brainstorming": ("ideas", "suggest", "brainstorm", "recommend"),
    "writing": ("write a", "compose", "essay", "story", "poem", "email"),
    "question_answering": ("what is", "who", "when", "where", "which", "explain"),
    "chat": ("hello", "hi ", "thanks", "how are you"),
}
_HARD = (
    "prove",
    "algorithm",
    "architecture",
    "analyze",
    "analyse",
    "step by step",
    "optimize",
    "theorem",
    "complex",
)


class Keywords:
    """The usual regex router: counts of telling words decide the task, their number and the length the tier."""

    def task(self, text: str) -> str:
        lowered = text.lower()
        scores = {task: sum(word in lowered for word in words) for task, words in _WORDS.items()}
        best = max(scores, key=lambda task: scores[task])
        return best if scores[best] else "chat"

    def hardness(self, text: str) -> float:
        """0 and more: telling words and length."""
        lowered = text.lower()
        return sum(word in lowered for word in _HARD) + min(2.0, len(text) / 1500)

    def tier(self, text: str) -> str:
        hardness = self.hardness(text)
        return TIERS[sum(hardness >= bound for bound in (0.15, 1.0, 2.0))]


def text(example: Example) -> str:
    """All text of an example."""
    return "\n".join(text_of(message) for message in example.messages)


def one(metric: str, system: str, setting: str, unit: str, value: float) -> Row:
    """A row of a single run."""
    return Row.of(metric, system, setting, unit, [value])


def interval(metric: str, system: str, setting: str, values: Sequence[float], seed: int = 0) -> Row:
    """A mean with its 95 % interval by bootstrap over the values as `min` and `max`; `runs` counts the values."""
    array = np.asarray(values, float)
    rng = np.random.default_rng(seed)
    means = [float(array[rng.integers(0, len(array), len(array))].mean()) for _ in range(1000)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Row(metric, system, setting, "share", float(array.mean()), float(low), float(high), len(array))


def lexical(mix: Sequence[Example], group_of: Sequence[str]) -> NDArray[np.float64]:
    """Predicted gain of each query by a ridge over words and pairs alone, trained without the query's group."""
    terms = inputs([extract(e.messages) for e in mix])[:, :TERM_ROWS]
    gain = np.array([e.scores[evaluate.STRONG] - e.scores[evaluate.WEAK] for e in mix])
    groups, found = np.array(group_of), np.zeros(len(mix))
    for group in sorted(set(group_of)):
        out = groups == group
        found[out] = Ridge(alpha=1.0).fit(terms[~out], gain[~out]).predict(terms[out])
    return found
