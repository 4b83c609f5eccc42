"""What proposes drafts: tokens that may follow what a request has so far. A wrong one costs time and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.scheduling.request import Request


class Proposer(Protocol):
    """Keeps what it likes about requests, by their id, until it is told to forget them."""

    # It cannot propose while copies of pages are outstanding: its own pages are copied when the step begins.
    waits_for_copies: bool
    # What it takes to make one more draft for all requests of a step, as far as that is known.
    seconds_per_draft: float

    def offers(self, requests: Sequence[Request], most: int) -> list[int]:
        """For each request, how many drafts it could have: 0 to `most`."""
        ...

    def propose(self, counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Up to so many drafts for each of these requests, and only for those that get any.

        A request's `block_table` covers its tokens and the drafts asked for.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request ended, or its pages are taken away. Unknown ones are ignored."""
        ...
