"""What a model is served for, and how the states of a text's tokens become one vector. No torch, no file format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Task(StrEnum):
    """An engine does one of these: answers, vectors of texts, or scores of pairs of texts."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


class PoolingKind(StrEnum):
    """Which tokens' last states, each normed, the vector is the mean of."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"  # the first token alone


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """How a text becomes a vector.

    `normalise`: it is given length 1. `labels`: of a score head `[labels, hidden]` that the vector is multiplied by; 0:
    the model has none. `sigmoid`: a single score is brought between 0 and 1.
    """

    kind: PoolingKind = PoolingKind.LAST
    normalise: bool = True
    labels: int = 0
    sigmoid: bool = True

    @property
    def task(self) -> Task:
        return Task.SCORE if self.labels else Task.EMBED

    def positions(self, num_tokens: int) -> range:
        """The tokens of a text of so many whose states are wanted."""
        match self.kind:
            case PoolingKind.LAST:
                return range(num_tokens - 1, num_tokens)
            case PoolingKind.CLS:
                return range(1)
        return range(num_tokens)


def choose_task(asked: str, own: PoolingSpec | None) -> PoolingSpec | None:
    """How texts are pooled for the task `asked` ("auto": what the model is made for); None: it generates.

    `own`: what the model says of pooling, None where it is made to generate.

    Raises:
        ValueError: the model cannot do that.
    """
    if asked == "auto":
        return own
    task = Task(asked)
    if own is not None and own.labels:
        if task is not Task.SCORE:
            raise ValueError(f"this model scores pairs of texts and nothing else: leave out '--task {task}'")
        return own
    if task is Task.SCORE:
        raise ValueError("this model has no score head, so it cannot be served with '--task score'")
    if task is Task.EMBED:
        return own or PoolingSpec()
    return None
