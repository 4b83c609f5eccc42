"""Where requests wait until their grammars are compiled: before the scheduler, so that nothing else waits for them.

    Add ── no grammar ──────────────────────────→ scheduler
      └── grammar → anteroom → thread compiles ──→ scheduler, or an error of that request alone

Requests that came together go on together, in the order of their arrival as far as their grammars allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.grammar.compiling import GrammarError, Grammars
from engine.limits import QueueFull
from engine.messages import NewRequest
from engine.types import TokenMasks


@dataclass(slots=True)
class Party:
    """Requests that came together. `grammars` by request id; `faults` are those that got none."""

    requests: list[NewRequest]
    grammars: dict[int, TokenMasks] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return all(
            r.grammar is None or r.request_id in self.grammars or r.request_id in self.faults for r in self.requests
        )


class Anteroom:
    """At most `most` requests wait here."""

    def __init__(self, grammars: Grammars, most: int) -> None:
        self._grammars = grammars
        self._most = most
        self._parties: list[Party] = []

    def __len__(self) -> int:
        return sum(len(party.requests) for party in self._parties)

    def requests(self) -> Iterable[NewRequest]:
        """All that wait here."""
        return (request for party in self._parties for request in party.requests)

    def fileno(self) -> int:
        """Readable when `ready` may have something."""
        return self._grammars.fileno()

    def enter(self, requests: Sequence[NewRequest]) -> None:
        """Have their grammars compiled. Raises QueueFull where too many wait."""
        if len(self) + len(requests) > self._most:
            raise QueueFull(f"{len(self)} requests wait for their grammars to be compiled; at most {self._most} can.")
        self._parties.append(Party(list(requests)))
        for request in requests:
            if request.grammar is not None:
                self._grammars.ask(request.request_id, request.grammar)

    def leave(self, request_ids: Iterable[int]) -> None:
        """Forget requests that were given up; others are not touched."""
        gone = set(request_ids)
        for party in self._parties:
            party.requests = [r for r in party.requests if r.request_id not in gone]
        self._parties = [party for party in self._parties if party.requests]

    def ready(self) -> list[Party]:
        """Who can go on now."""
        for request_id, result in self._grammars.take():
            for party in self._parties:
                if any(r.request_id == request_id for r in party.requests):
                    if isinstance(result, GrammarError):
                        party.faults[request_id] = f"The grammar could not be compiled: {result}"
                    else:
                        party.grammars[request_id] = result
        ready = [party for party in self._parties if party.is_ready]
        self._parties = [party for party in self._parties if not party.is_ready]
        return ready
