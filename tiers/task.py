"""Which task a request is, how sure that is, and how hard it looks: a linear classifier over hashed terms.

It sorts a request into about twenty *kinds* (word problems, code to write, facts to recall, ...), each of which belongs
to one of twelve *tasks*; rules speak of tasks, the success table of kinds. Deterministic, numpy only, well under a
millisecond; the weights come from `python -m tiers.train` and ship beside this file. Read next: `success.py`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiers.features import TRAINED, Features, Message, extract

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
        features: numeric features by name, each in [0, 1].
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


@dataclass(frozen=True, slots=True)
class Weights:
    """Trained parameters; D hashed terms, F numeric features, K kinds plus one output for complexity.

    Attributes:
        terms: [D, K + 1] int8, times `scale` [K + 1] gives the weight of a term.
        numbers: [F, K + 1] float32, weights of the numeric features.
        bias: [K + 1] float32.
        temperature: divides the scores before the softmax, fitted on held-out data.
        vocabulary: bit set of the hashes of known words, [VOCABULARY_BITS / 8] uint8.
        min_confidence, min_known_words: below either, a request is out of distribution.
    """

    terms: NDArray[np.int8]
    scale: NDArray[np.float32]
    numbers: NDArray[np.float32]
    bias: NDArray[np.float32]
    temperature: float
    vocabulary: NDArray[np.uint8]
    min_confidence: float
    min_known_words: float

    @classmethod
    def load(cls, path: Path = MODEL_FILE) -> Weights:
        """Read the weights.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file was trained for other kinds or features than this code has.
        """
        with np.load(path) as file:
            if list(file["kinds"]) != list(KINDS) or list(file["features"]) != list(TRAINED):
                raise ValueError(f"{path} does not fit this version: train again with `python -m tiers.train`")
            temperature, min_confidence, min_known = (float(x) for x in file["thresholds"])
            return cls(
                terms=file["terms"],
                scale=file["scale"],
                numbers=file["numbers"],
                bias=file["bias"],
                temperature=temperature,
                vocabulary=file["vocabulary"],
                min_confidence=min_confidence,
                min_known_words=min_known,
            )

    def save(self, path: Path = MODEL_FILE) -> None:
        np.savez_compressed(
            path,
            kinds=np.array(list(KINDS)),
            features=np.array(TRAINED),
            thresholds=np.array([self.temperature, self.min_confidence, self.min_known_words]),
            terms=self.terms,
            scale=self.scale,
            numbers=self.numbers,
            bias=self.bias,
            vocabulary=self.vocabulary,
        )


def term_rows(terms: Sequence[str], rows: int) -> list[int]:
    """Row of each term in a table of `rows` rows (a power of two): CRC-32, the same on every machine."""
    crc, mask = zlib.crc32, rows - 1
    return [crc(term.encode()) & mask for term in terms]


class TaskClassifier:
    """Sorts requests into tasks. Stateless after loading; safe to share between threads."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
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
    ) -> TaskProfile:
        """Profile of a chat request; the arguments are those of `features.extract`."""
        return self.profile(extract(messages, tools, response_format, max_tokens))

    def profile(self, features: Features) -> TaskProfile:
        """Profile of features that were extracted before."""
        scores, complexity = self._scores(features)
        scores[self._kinds.index("label_text")] += _SHORT_ANSWER_SCORE * features.values["short_answer"]
        scores[self._kinds.index("extract_fields")] += _JSON_SCORE * features.values["wants_json"]
        kinds = np.exp(scores - scores.max())
        kinds /= kinds.sum()
        tasks = kinds @ self._to_task
        best = int(tasks.argmax())
        confidence = float(tasks[best])
        weights = self._weights
        known = self.known_words(features)
        return TaskProfile(
            task=TASKS[best],
            confidence=confidence,
            complexity=complexity,
            in_distribution=confidence >= weights.min_confidence and known >= weights.min_known_words,
            features={**features.values, "known_words": known},
            probabilities=dict(zip(TASKS, tasks.tolist(), strict=True)),
            kinds=dict(zip(self._kinds, kinds.tolist(), strict=True)),
        )

    def known_words(self, features: Features) -> float:
        """Share of the distinct words that occur in the training data; 0 for a text without words."""
        if not features.words:
            return 0.0
        rows = np.array(term_rows(features.words, VOCABULARY_BITS))
        bits = (self._weights.vocabulary[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
        return float(bits.mean())

    def _scores(self, features: Features) -> tuple[NDArray[np.float64], float]:
        """Scores of the kinds, divided by the temperature, and the complexity in [0, 1]."""
        weights = self._weights
        rows = term_rows(features.terms, len(weights.terms))
        output = weights.bias + np.array(features.vector(), np.float32) @ weights.numbers
        if rows:
            # Each term counts 1/sqrt(n): long texts do not outweigh, and one phrase moves a long text little.
            output = output + weights.terms[rows].sum(axis=0, dtype=np.int32) * weights.scale / math.sqrt(len(rows))
        return output[:-1].astype(np.float64) / weights.temperature, float(min(1.0, max(0.0, output[-1])))


@lru_cache(maxsize=1)
def default_classifier() -> TaskClassifier:
    """The shipped classifier, loaded once per process."""
    return TaskClassifier.load()
