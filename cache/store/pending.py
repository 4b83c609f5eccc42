"""Changes that are not in the cache's file yet: what was put is found here, what was forgotten is hidden from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from cache.store.changes import (
    AddQuestion,
    Change,
    ForgetAnswer,
    ForgetQuestion,
    PurgeAnswers,
    PutAnswer,
    Question,
    SetVector,
    Submitted,
    Vector,
)

_CHANGE_OVERHEAD_BYTES = 1000  # objects and dictionaries


class Described(Protocol):
    """Of an answer, what a purge may name: an `Entry`, or what is read of one without the answer itself."""

    @property
    def model(self) -> str: ...

    @property
    def policy(self) -> str: ...

    @property
    def tags(self) -> tuple[str, ...]: ...

    @property
    def created_at(self) -> float: ...


class Pending:
    """What was submitted and not written, and purges until the file has nothing of them any more.

    `bytes` is what it takes in memory, about.
    """

    def __init__(self, unfinished: Sequence[PurgeAnswers] = ()) -> None:
        """`unfinished`: purges that are written, and whose answers are still in the file."""
        self.bytes = 0
        self._count = 0
        self._questions: dict[int, Question] = {}
        self._answers: dict[int, PutAnswer] = {}
        self._of_answer: dict[int, list[int]] = {}
        self._exact: dict[bytes, int] = {}
        self._folded: dict[bytes, int] = {}
        self._places: dict[bytes, tuple[int, int]] = {}  # number, and how many questions wait there
        self._in_place: dict[int, set[int]] = {}
        self._gone_answers: set[int] = set()
        self._gone_questions: set[int] = set()
        self._purges: list[PurgeAnswers] = []
        self._erasing = list(unfinished)
        self._vectors: dict[int, SetVector] = {}

    def add(self, submitted: Submitted) -> None:
        change = submitted.change
        match change:
            case PutAnswer(question):
                self._answers[question.answer_id] = change
                self._add_question(question)
            case AddQuestion(question):
                self._add_question(question)
            case SetVector(question_id):
                self._vectors[question_id] = change
            case ForgetAnswer(answer_id):
                self._gone_answers.add(answer_id)
            case ForgetQuestion(question_id):
                self._gone_questions.add(question_id)
            case PurgeAnswers():
                self._purges.append(change)
        self.bytes += _size_bytes(change)
        self._count += 1

    def remove(self, submitted: Submitted) -> None:
        """Take out a change that was written, or will never be."""
        change = submitted.change
        match change:
            case PutAnswer(question):
                self._answers.pop(question.answer_id, None)
                self._remove_question(question)
            case AddQuestion(question):
                self._remove_question(question)
            case SetVector(question_id):
                if self._vectors.get(question_id) is change:
                    del self._vectors[question_id]
            case ForgetAnswer(answer_id):
                self._gone_answers.discard(answer_id)
            case ForgetQuestion(question_id):
                self._gone_questions.discard(question_id)
            case PurgeAnswers():
                self._purges.remove(change)
                self._erasing.append(change)
        self.bytes -= _size_bytes(change)
        self._count -= 1

    def __len__(self) -> int:
        """How many changes wait."""
        return self._count

    @property
    def answers(self) -> int:
        return len(self._answers)

    @property
    def questions(self) -> int:
        return len(self._questions)

    def question(self, id: int) -> Question | None:
        return self._questions.get(id)

    def answer(self, id: int) -> PutAnswer | None:
        return self._answers.get(id)

    def by_exact(self, exact: bytes) -> Question | None:
        id = self._exact.get(exact)
        return None if id is None else self._questions[id]

    def by_folded(self, folded: bytes) -> Question | None:
        id = self._folded.get(folded)
        return None if id is None else self._questions[id]

    def by_request(self, entry_id: str) -> int | None:
        """The latest answer of that `Entry.id`. Looks at every one: few wait."""
        return next((id for id, put in reversed(self._answers.items()) if put.entry.id == entry_id), None)

    def questions_of(self, answer_id: int) -> list[Question]:
        return [self._questions[id] for id in self._of_answer.get(answer_id, ())]

    def place(self, digest: bytes) -> int | None:
        known = self._places.get(digest)
        return None if known is None else known[0]

    def vectors_in(self, place: int) -> Iterator[tuple[int, Vector]]:
        """Vectors of a place that may not be in the file yet, by question."""
        for id in self._in_place.get(place, ()):
            vector = self._questions[id].vector
            if vector is not None:
                yield id, vector
        for change in self._vectors.values():
            if change.place == place and change.vector is not None:
                yield change.question_id, change.vector

    def hides(self, question_id: int, answer_id: int, scope: str, entry: Described) -> bool:
        """Whether a question was forgotten, by itself or with its answer."""
        if answer_id in self._gone_answers or question_id in self._gone_questions:
            return True
        return any(_matches(purge, answer_id, scope, entry) for purge in (*self._purges, *self._erasing))

    def erased(self, purges: Iterable[PurgeAnswers]) -> None:
        """The file has nothing of these purges any more."""
        for purge in purges:
            self._erasing.remove(purge)

    def emptied(self) -> None:
        """The file has nothing at all any more."""
        self._erasing.clear()

    @property
    def purges(self) -> int:
        """How many purges are under way."""
        return len(self._purges) + len(self._erasing)

    def _add_question(self, question: Question) -> None:
        self._questions[question.id] = question
        self._of_answer.setdefault(question.answer_id, []).append(question.id)
        self._exact[question.exact] = question.id
        if question.folded is not None:
            self._folded[question.folded] = question.id
        _, count = self._places.get(question.place_digest, (0, 0))
        self._places[question.place_digest] = (question.place, count + 1)
        self._in_place.setdefault(question.place, set()).add(question.id)

    def _remove_question(self, question: Question) -> None:
        del self._questions[question.id]
        siblings = self._of_answer[question.answer_id]
        siblings.remove(question.id)
        if not siblings:
            del self._of_answer[question.answer_id]
        if self._exact.get(question.exact) == question.id:
            del self._exact[question.exact]
        if question.folded is not None and self._folded.get(question.folded) == question.id:
            del self._folded[question.folded]
        place, count = self._places.pop(question.place_digest)
        if count > 1:
            self._places[question.place_digest] = (place, count - 1)
        in_place = self._in_place[question.place]
        in_place.discard(question.id)
        if not in_place:
            del self._in_place[question.place]


def _matches(change: PurgeAnswers, answer_id: int, scope: str, entry: Described) -> bool:
    purge = change.purge
    return (
        answer_id <= change.up_to_id
        and (purge.scope is None or scope == purge.scope)
        and (purge.model is None or entry.model == purge.model)
        and (purge.policy is None or entry.policy == purge.policy)
        and (purge.tag is None or purge.tag in entry.tags)
        and (change.born_before is None or entry.created_at <= change.born_before)
        and (change.answer_id is None or answer_id == change.answer_id)
    )


def _size_bytes(change: Change) -> int:
    own = change.size_bytes if isinstance(change, PutAnswer | AddQuestion) else 0
    return own + _CHANGE_OVERHEAD_BYTES
