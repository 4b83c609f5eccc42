"""Which task a request is, how sure that is, and how hard it looks: a linear classifier over terms and vectors.

It sorts a request into about twenty *kinds* (word problems, code to write, facts to recall, ...), each of which belongs
to one of twelve *tasks*; rules speak of tasks, the success table of kinds. Deterministic, numpy only, well under a
millisecond; the weights come from `python -m tiers.train` and ship beside this file. Read next: `success.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiers.beta import sigmoid
from tiers.features import TRAINED, Features, Message, extract
from tiers.linear import Linear
from tiers.vector import Vector, inputs_of
from tiers.words import WordVectors, default_words

# kind -> task. The order of the kinds is the order of the classifier's outputs.
KINDS: Final[dict[str, str]] = {
    "label_text": "classification",
    "extract_fields": "extraction",
    "summarise_text": "summarisation",
    "rewrite_text": "rewriting",
    "translate_text": "translation",
    "recall_fact": "question_answering",
    "exam_question": "question_answering",
    "graduate_question": "question_answering",
    "explain_topic": "question_answering",
    "small_talk": "chat",
    "write_text": "writing",
    "words_to_sentence": "writing",
    "list_ideas": "brainstorming",
    "write_function": "coding",
    "software_work": "coding",
    "trace_code": "coding",
    "word_problem": "math",
    "competition_math": "math",
    "logic_puzzle": "reasoning",
    "analyse_situation": "reasoning",
}
TASKS: Final = tuple(dict.fromkeys(KINDS.values()))

MODEL_FILE: Final = Path(__file__).with_name("model.npz")
VOCABULARY_BITS: Final = 1 << 18
BY_VECTOR: Final = "by_vector"  # among the features of a profile

_VECTOR: Final = "vector_"  # before the names of what judges by the vector, in the file

# A text this likely to be unfamiliar is out of distribution.
UNFAMILIAR: Final = 0.5

# Added to a kind's score where the request's own parameters speak: an answer of a few tokens is a label, an answer
# bound to JSON is data pulled out of a text. Set by hand: public data holds no such parameters.
_SHORT_ANSWER_SCORE: Final = 1.5
_JSON_SCORE: Final = 1.0


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """What the classifier says about one request.

    Attributes:
        task: the likeliest of `TASKS`.
        confidence: its calibrated probability, in [0, 1].
        complexity: expected share of today's open models that would fail, in [0, 1].
        in_distribution: False where the text is unlike the training data: do not trust the rest.
        features: numeric features by name, each in [0, 1]; among them `known_words`, the share of the distinct words
            that are known, `unfamiliarity`, and `by_vector` (1 where the text's own vector was looked at).
        probabilities: by task, summing to 1.
        kinds: by kind, summing to 1; what the success table is keyed by.
    """

    task: str
    confidence: float
    complexity: float
    in_distribution: bool
    features: dict[str, float]
    probabilities: dict[str, float]
    kinds: dict[str, float]

    @property
    def unfamiliarity(self) -> float:
        """Probability that the text is none that the classifier can judge, where half of all texts were."""
        return self.features.get("unfamiliarity", 0.0)


@dataclass(frozen=True, slots=True)
class Weights:
    """Trained parameters.

    Attributes:
        words: what judges by words alone: terms, the numeric features, then the word vectors.
        vector: what judges as well where the text's own vector is there, which comes behind these inputs.
        vocabulary: bit set of the hashes of known words, [VOCABULARY_BITS / 8] uint8.
        unfamiliar: [3] float32, log-odds that a text is unfamiliar: a constant, and the weights of the share of unknown
            words and of the missing confidence, both as the words have it.
    """

    words: Linear
    vector: Linear | None
    vocabulary: NDArray[np.uint8]
    unfamiliar: NDArray[np.float32]

    @classmethod
    def load(cls, path: Path = MODEL_FILE) -> Weights:
        """Read the weights.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file was trained for other kinds or features than this code has.
        """
        with np.load(path) as file:
            fits = list(file["kinds"]) == list(KINDS) and list(file["features"]) == list(TRAINED)
            if not fits or "unfamiliar" not in file:
                raise ValueError(f"{path} does not fit this version: train again with `python -m tiers.train`")
            vector = Linear.of(file, _VECTOR) if f"{_VECTOR}terms" in file else None
            return cls(Linear.of(file), vector, file["vocabulary"], file["unfamiliar"])

    def save(self, path: Path = MODEL_FILE) -> None:
        np.savez_compressed(
            path,
            kinds=np.array(list(KINDS)),
            features=np.array(TRAINED),
            unfamiliar=self.unfamiliar,
            vocabulary=self.vocabulary,
            **self.words.arrays(),
            **({} if self.vector is None else self.vector.arrays(_VECTOR)),
        )


def term_rows(terms: Sequence[str], rows: int) -> list[int]:
    """Row of each term in a table of `rows` rows (a power of two): CRC-32, the same on every machine."""
    crc, mask = zlib.crc32, rows - 1
    return [crc(term.encode()) & mask for term in terms]


class TaskClassifier:
    """Sorts requests into tasks. Stateless after loading; safe to share between threads."""

    def __init__(self, weights: Weights, words: WordVectors | None = None) -> None:
        self._weights = weights
        self._words = words or default_words()
        self._kinds = list(KINDS)
        # [K, T]: sums the kinds of a task.
        self._to_task = np.array([[task == other for other in TASKS] for task in KINDS.values()], np.float64)

    @classmethod
    def load(cls, path: Path = MODEL_FILE) -> TaskClassifier:
        """The classifier with the shipped weights. Raises as `Weights.load`."""
        return cls(Weights.load(path))

    def classify(
        self,
        messages: Sequence[Message],
        tools: bool = False,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        vector: Vector | None = None,
    ) -> TaskProfile:
        """Profile of a chat request; the arguments are those of `features.extract`, and the vector of what is asked."""
        return self.profile(extract(messages, tools, response_format, max_tokens), vector)

    def profile(self, features: Features, vector: Vector | None = None) -> TaskProfile:
        """Profile of features that were extracted before.

        Args:
            vector: of the text that `tiers.vector.asked` names, where there is one. What the text is unlike anything
                known is said by its words all the same: an embedding finds something near to everything.
        """
        weights = self._weights
        rows = term_rows(features.terms, len(weights.words.terms))
        numbers = np.concatenate((np.array(features.vector(), np.float32), self._words.inputs(features)))
        kinds, tasks, complexity = self._judged(weights.words, features, rows, numbers)
        known = self.known_words(features)
        constant, unknown, unsure = weights.unfamiliar.tolist()
        unfamiliarity = sigmoid(constant + unknown * (1 - known) + unsure * (1 - float(tasks.max())))
        seen = {**features.values, "known_words": known, "unfamiliarity": unfamiliarity}
        if vector is not None and weights.vector is not None:
            # The mean of both: they err at different prompts, and it errs less than either (docs/routing.md).
            also = self._judged(weights.vector, features, rows, np.concatenate((numbers, inputs_of(vector))))
            kinds, tasks, complexity = (kinds + also[0]) / 2, (tasks + also[1]) / 2, (complexity + also[2]) / 2
            seen[BY_VECTOR] = 1.0
        best = int(tasks.argmax())
        return TaskProfile(
            task=TASKS[best],
            confidence=float(tasks[best]),
            complexity=complexity,
            in_distribution=unfamiliarity < UNFAMILIAR,
            features=seen,
            probabilities=dict(zip(TASKS, tasks.tolist(), strict=True)),
            kinds=dict(zip(self._kinds, kinds.tolist(), strict=True)),
        )

    def _judged(
        self, linear: Linear, features: Features, rows: Sequence[int], numbers: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Probabilities of kinds [K] and tasks [T], and the complexity."""
        scores, complexity = linear.scores(rows, numbers)
        scores[self._kinds.index("label_text")] += _SHORT_ANSWER_SCORE * features.values["short_answer"]
        scores[self._kinds.index("extract_fields")] += _JSON_SCORE * features.values["wants_json"]
        kinds = np.exp(scores - scores.max())
        kinds /= kinds.sum()
        return kinds, kinds @ self._to_task, complexity

    def known_words(self, features: Features) -> float:
        """Share of the distinct words that have a vector or occur in the training data; 0 for a text without words."""
        if not features.words:
            return 0.0
        rows = np.array(term_rows(features.words, VOCABULARY_BITS))
        bits = (self._weights.vocabulary[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
        known = sum(bool(bit) or word in self._words for bit, word in zip(bits.tolist(), features.words, strict=True))
        return known / len(features.words)


@lru_cache(maxsize=1)
def default_classifier() -> TaskClassifier:
    """The shipped classifier, loaded once per process."""
    return TaskClassifier.load()
