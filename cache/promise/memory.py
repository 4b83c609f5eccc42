"""What a keeper remembers: the judged candidates of a promise, newest kept, and the tickets that await a word."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.promise.fit import Labels
from cache.promise.rule import Kind, Rule

# Of a label: whose answer, how many requests it stands for, whether it was right, whether it was drawn by lot.
ROW = np.dtype([("answer", np.int64), ("weight", np.float32), ("right", np.bool_), ("drawn", np.bool_)])


class Pending(msgspec.Struct, frozen=True):
    """A verdict whose candidate may be judged later: under which promise and regime, which answer, which features."""

    rule: Rule
    regime: int
    kind: Kind
    answer_id: int
    features: tuple[float, ...]


class Tickets:
    """Verdicts by number, the oldest forgotten first. Served ones await their user's word, the others the judge's."""

    def __init__(self, first: int, most: int) -> None:
        self._next = first
        self._most = most
        self._asked: OrderedDict[int, Pending] = OrderedDict()
        self._served: OrderedDict[int, Pending] = OrderedDict()

    def issue(self, pending: Pending) -> int:
        number = self._next
        self._next += 1
        shelf = self._served if pending.kind == "serve" else self._asked
        shelf[number] = pending
        if len(shelf) > self._most:
            shelf.popitem(last=False)
        return number

    def judged(self, number: int) -> Pending | None:
        """Take out the verdict that was asked upstream; None when it is unknown, judged already or forgotten."""
        return self._asked.pop(number, None)

    def drop(self, rule: Rule) -> None:
        """Forget the verdicts under a rule that the judge has not spoken on."""
        for number in [number for number, pending in self._asked.items() if pending.rule == rule]:
            del self._asked[number]

    def rated(self, number: int) -> Pending | None:
        """Take out the verdict that was served; None when it is unknown, rated already or forgotten."""
        return self._served.pop(number, None)


class Memory:
    """The latest `most` labels of one promise, in arrays: features [most, features], and what came of them [most]."""

    def __init__(self, features: int, most: int) -> None:
        self.most = most
        self.seen = 0  # labels ever remembered; row `seen % most` is written next
        self._x = np.zeros((0, features), dtype=np.float32)
        self._rows = np.zeros(0, dtype=ROW)

    def __len__(self) -> int:
        return min(self.seen, self.most)

    def add(self, features: tuple[float, ...], answer_id: int, right: bool, weight: float, drawn: bool) -> None:
        if self.seen < self.most and self.seen == len(self._x):
            more = min(self.most, max(256, 2 * self.seen)) - len(self._x)
            self._x = np.concatenate([self._x, np.zeros((more, self._x.shape[1]), dtype=np.float32)])
            self._rows = np.concatenate([self._rows, np.zeros(more, dtype=ROW)])
        row = self.seen % self.most
        self._x[row] = features
        self._rows[row] = (answer_id, weight, right, drawn)
        self.seen += 1

    def labels(self) -> Labels:
        """A copy, oldest first."""
        x, rows = self.arrays()
        return Labels(
            x.astype(np.float64),
            rows["answer"].copy(),
            rows["right"].astype(np.float64),
            rows["weight"].astype(np.float64),
            rows["drawn"].copy(),
        )

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.void]]:
        """Copies of the features and the rest, oldest first."""
        order = np.arange(max(0, self.seen - self.most), self.seen) % self.most
        return self._x[order], self._rows[order]

    def restore(self, seen: int, x: NDArray[np.float32], rows: NDArray[np.void]) -> None:
        """Take over what `arrays` gave when `seen` labels had been remembered."""
        self.seen = seen
        where = np.arange(seen - len(x), seen) % self.most
        self._x, self._rows = np.empty_like(x), np.empty_like(rows)
        self._x[where], self._rows[where] = x, rows
