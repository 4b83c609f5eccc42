"""What is taken for granted of a step that is not over, so that the next one can be scheduled meanwhile.

Its rows will be computed, and whoever samples will have one token more, unless that token is its last. While this is
assumed a request looks as it will then, with `AWAITED` in place of the token, and the scheduler need not know more.
When the results are here everything is taken back, and they are taken over as always: whoever ended, or failed, is gone
then, and the row that it has in the next step yields nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduling.request import Request, RequestStatus
from engine.types import AWAITED, StepRow


class Assumption:
    """Of one step at most."""

    def __init__(self) -> None:
        self._counts: dict[Request, int] = {}  # tokens of the step, by request

    def __bool__(self) -> bool:
        return bool(self._counts)

    def make(self, flight: Iterable[tuple[Request, StepRow]]) -> None:
        """Assume that these rows are computed. Who has lost its pages meanwhile gets nothing of it."""
        for request, row in flight:
            if request.status is not RequestStatus.RUNNING:
                continue
            self._counts[request] = len(row.token_ids)
            request.num_computed_tokens += len(row.token_ids)
            if row.sample and request.num_tokens + 1 < request.max_total_tokens:
                request.token_ids.append(AWAITED)

    def take_back(self) -> None:
        """Let the requests be as they were, those apart that have lost their pages since."""
        for request, count in self._counts.items():
            if request.token_ids[-1] == AWAITED:
                request.token_ids.pop()
            if request.status is RequestStatus.RUNNING:
                request.num_computed_tokens -= count
        self._counts = {}
