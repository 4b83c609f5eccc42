"""The answers of an evaluation: what the store does, as far as decisions depend on it, with the true answers beside."""

from __future__ import annotations

from typing import NamedTuple

from cache.store.answers import MAX_ALIASES
from cache.store.index import Vector, VectorIndex
from cache.verifier.corpus import Asked
from cache.verifier.neighbours import NEIGHBOURS, Neighbour
from cache.words.guards import objection
from cache.words.text import normal_form
from cache.words.writing import folded_form


class Known(NamedTuple):
    """A question that is in the cache as it is asked (`exact`), or in another writing."""

    answer_id: int
    question: str
    exact: bool


class Answers:
    """Answers with their questions, by exact text, by folded form and by vector."""

    def __init__(self, dimension: int) -> None:
        self._index = VectorIndex(dimension)
        self._questions: list[tuple[str, int]] = []  # by question id: the text and its answer
        self._truths: list[str] = []  # by answer id
        self._aliases: list[int] = []
        self._exact: dict[str, tuple[str, int]] = {}
        self._folded: dict[str, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._truths)

    def truth(self, answer_id: int) -> str:
        """The id of the answer that is really kept there."""
        return self._truths[answer_id]

    def known(self, text: str, *, fuzzy: bool) -> Known | None:
        """The same text, or with `fuzzy` the same words in another writing."""
        found = self._exact.get(normal_form(text))
        if found is not None:
            return Known(found[1], found[0], True)
        form = folded_form(text) if fuzzy else None
        written = None if form is None else self._folded.get(form)
        if written is None or objection(text, written[0]) is not None:
            return None
        return Known(written[1], written[0], False)

    def nearest(self, vector: Vector) -> list[Neighbour]:
        found = self._index.search(vector, NEIGHBOURS)
        return [Neighbour(*self._questions[id], cosine) for id, cosine in found]

    def put(self, asked: Asked, vector: Vector | None) -> None:
        """Keep a fresh answer."""
        self._truths.append(asked.answer_id)
        self._aliases.append(0)
        self._add(asked.text, vector, len(self._truths) - 1)

    def alias(self, asked: Asked, vector: Vector, answer_id: int) -> None:
        """Give an answer one more question; beyond the store's limit the fresh answer is kept as one of its own."""
        if self._aliases[answer_id] < MAX_ALIASES:
            self._aliases[answer_id] += 1
            self._add(asked.text, vector, answer_id)
        else:
            self.put(asked, vector)

    def _add(self, text: str, vector: Vector | None, answer_id: int) -> None:
        self._exact[normal_form(text)] = (text, answer_id)
        if vector is not None:
            self._index.add(len(self._questions), vector)
            self._questions.append((text, answer_id))
            form = folded_form(text)
            if form is not None:
                self._folded[form] = (text, answer_id)
