"""One request over many candidates: the door through which the gateway asks backends.

It promises that `open` returns only a committed answer (a stream's first content, or a whole plain answer), so that
every failure before it stays invisible; that a stream which breaks after it is continued where that is possible and
raises otherwise, so that it never looks like an end; that an answer which no retry can change (4xx) goes back as it
came; and that cancelling breaks the upstream connection at once. The nouns are in `attempt.py`; how a call finds its
answer is in `chain.py`, one attempt in `attempting.py`, the continuation of a broken stream in `rescue.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.attempt import (
    Attempt,
    AttemptObserver,
    BackendError,
    Call,
    Candidate,
    Event,
    NoBackend,
    StreamCut,
    UpstreamRefused,
)
from backends.attempting import Dispatched
from backends.chain import Chain, Limits
from backends.pool import Pool
from backends.rescue import Rescuable

__all__ = [
    "Attempt",
    "AttemptObserver",
    "BackendError",
    "Call",
    "Candidate",
    "Dispatched",
    "Dispatcher",
    "Event",
    "Limits",
    "NoBackend",
    "StreamCut",
    "UpstreamRefused",
]


class Dispatcher:
    """Sends calls to the pools of backends, by name."""

    def __init__(self, pools: Mapping[str, Pool], limits: Limits | None = None) -> None:
        self._pools = pools
        self._limits = limits or Limits()

    async def open(self, call: Call, candidates: Sequence[Candidate], observer: AttemptObserver) -> Dispatched:
        """Get a committed answer to `call` from one of `candidates`, tried in their order.

        Raises:
            UpstreamRefused: a replica answered 4xx, and no candidate is left that may take the request.
            CannotTranslate: no candidate's kind of server can be asked that.
            NoBackend: nothing answered.
            ValueError: no candidate, a backend that does not exist, or a header that HTTP does not allow.
        """
        if not candidates:
            raise ValueError("a call needs at least one candidate")
        able = False
        for candidate in candidates:
            if candidate.backend not in self._pools:
                raise ValueError(
                    f"model '{candidate.model}' names the backend '{candidate.backend}', which has no pool"
                )
            able = able or candidate.prefill
        chain = Chain(self._pools, observer, self._limits, call.deadline)
        answer = await chain.answer(call, candidates)
        if able and call.stream:
            return Rescuable(answer, chain, call, candidates)
        return answer
