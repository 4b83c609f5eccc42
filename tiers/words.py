"""What single words mean: a vector for each of 16,384 English words, made once from the cache's embedding model.

A linear model over words cannot know that "Kotlin" is like "Java" if it saw only one of them; the mean of such vectors
tells it, at the price of a look-up per word. `bench/word_vectors.py` makes the file; read next: `task.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiers.features import Features

WORDS_FILE: Final = Path(__file__).with_name("words.npz")
SIZE: Final = 64
# The mean over all words and the mean over the first three, where the verb of the instruction stands.
INPUTS: Final = 2 * SIZE
# Frequent words say little: the weight of the word of rank r (1 the most frequent) is SMOOTH / (SMOOTH + 1 / r), after
# Arora et al. 2017 ("a simple but tough-to-beat baseline for sentence embeddings") with Zipf's law for the frequency.
_SMOOTH: Final = 0.3


class WordVectors:
    """Vectors [n, SIZE] of n words by falling frequency. Stateless after loading; safe to share between threads."""

    def __init__(self, words: Sequence[str], vectors: NDArray[np.int8], scale: float) -> None:
        self._row = {word: row for row, word in enumerate(words)}
        self._weight = (_SMOOTH / (_SMOOTH + 1 / np.arange(1, len(words) + 1))).astype(np.float32)
        self._vectors, self._scale = vectors, np.float32(scale)  # few rows are wanted at a time, so they stay small

    @classmethod
    def load(cls, path: Path = WORDS_FILE) -> WordVectors:
        """Read the vectors.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with np.load(path) as file:
            return cls(str(file["words"]).split("\n"), file["vectors"], float(file["scale"]))

    def __contains__(self, word: str) -> bool:
        return word in self._row

    def inputs(self, features: Features) -> NDArray[np.float32]:
        """The two means [INPUTS] of a request; zeros where no word is known."""
        found = np.zeros(INPUTS, np.float32)
        rows = [row for word in features.words if (row := self._row.get(word)) is not None]
        if rows:
            weight = self._weight[rows]
            found[:SIZE] = weight @ self._rows(rows) / weight.sum()
        first = [row for term in features.terms if term[0] == "^" and (row := self._row.get(term[1:])) is not None]
        if first:
            found[SIZE:] = self._rows(first).sum(axis=0) / len(first)
        return found

    def _rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The vectors [n, SIZE] of these rows."""
        return self._vectors[rows] * self._scale


@lru_cache(maxsize=1)
def default_words() -> WordVectors:
    """The shipped vectors, loaded once per process."""
    return WordVectors.load()
