"""Which task a request is, how sure that is, and how hard it looks: a linear classifier over terms and word vectors.

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

from tiers.beta import sigmoid
from tiers.features import TRAINED, Features, Message, extract
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
            that are known, and `unfamiliarity`.
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
    """Trained parameters; D hashed terms, F numeric features, W word inputs, K kinds plus one output for complexity.

    Attributes:
        terms: [D, K + 1] int8, times `scale` [K + 1] gives the weight of a term.
        numbers: [F + W, K + 1] float32, weights of the numeric features and of the word vectors.
        bias: [K + 1] float32.
        temperature: divides the scores before the softmax, fitted on held-out data.
        vocabulary: bit set of the hashes of known words, [VOCABULARY_BITS / 8] uint8.
        unfamiliar: [3] float32, log-odds that a text is unfamiliar: a constant, and the weights of the share of unknown
            words and of the missing confidence.
    """

    terms: NDArray[np.int8]
    scale: NDArray[np.float32]
    numbers: NDArray[np.float32]
    bias: NDArray[np.float32]
    temperature: float
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
            return cls(
                terms=file["terms"],
                scale=file["scale"],
                numbers=file["numbers"],
                bias=file["bias"],
                temperature=float(file["temperature"]),
                vocabulary=file["vocabulary"],
                unfamiliar=file["unfamiliar"],
            )

    def save(self, path: Path = MODEL_FILE) -> None:
        np.savez_compressed(
            path,
            kinds=np.array(list(KINDS)),
            features=np.array(TRAINED),
            temperature=np.array(self.temperature),
            unfamiliar=self.unfamiliar,
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
        known = self.known_words(features)
        constant, unknown, unsure = self._weights.unfamiliar.tolist()
        unfamiliarity = sigmoid(constant + unknown * (1 - known) + unsure * (1 - confidence))
        return TaskProfile(
            task=TASKS[best],
            confidence=confidence,
            complexity=complexity,
            in_distribution=unfamiliarity < UNFAMILIAR,
            features={**features.values, "known_words": known, "unfamiliarity": unfamiliarity},
            probabilities=dict(zip(TASKS, tasks.tolist(), strict=True)),
            kinds=dict(zip(self._kinds, kinds.tolist(), strict=True)),
        )

    def known_words(self, features: Features) -> float:
        """Share of the distinct words that have a vector or occur in the training data; 0 for a text without words."""
        if not features.words:
            return 0.0
        rows = np.array(term_rows(features.words, VOCABULARY_BITS))
        bits = (self._weights.vocabulary[rows >> 3] >> (rows & 7).astype(np.uint8)) & 1
        known = sum(bool(bit) or word in self._words for bit, word in zip(bits.tolist(), features.words, strict=True))
        return known / len(features.words)

    def _scores(self, features: Features) -> tuple[NDArray[np.float64], float]:
        """Scores of the kinds, divided by the temperature, and the complexity in [0, 1]."""
        weights = self._weights
        rows = term_rows(features.terms, len(weights.terms))
        numbers = np.concatenate((np.array(features.vector(), np.float32), self._words.inputs(features)))
        output = weights.bias + numbers @ weights.numbers
        if rows:
            # Each term counts 1/sqrt(n): long texts do not outweigh, and one phrase moves a long text little.
            output = output + weights.terms[rows].sum(axis=0, dtype=np.int32) * weights.scale / math.sqrt(len(rows))
        return output[:-1].astype(np.float64) / weights.temperature, float(min(1.0, max(0.0, output[-1])))


@lru_cache(maxsize=1)
def default_classifier() -> TaskClassifier:
    """The shipped classifier, loaded once per process."""
    return TaskClassifier.load()
