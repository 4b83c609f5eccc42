"""How a cache process stands among its replicas, and how far a purge has come. For everybody to read."""

from __future__ import annotations

import msgspec


class Purged(msgspec.Struct, frozen=True):
    """How far a purge has come: answers removed here, how many processes have followed, and which have not and why."""

    removed: int
    confirmed: int = 1
    unconfirmed: list[str] = []


class ReplicaStats(msgspec.Struct, frozen=True):
    """`replicas`: processes heard of lately, this one included. `answers` and `bytes` are those in Redis.

    `waiting`: changes that Redis does not have yet. Since the process started: `published` and `taken` answers,
    `retractions` of others that were followed, `rebuilds` from a snapshot, answers that stay in this process because
    too many waited for Redis (`dropped`) or it had no room (`refused`), and those that could not be read.
    """

    connected: bool
    replicas: int
    answers: int
    bytes: int
    waiting: int
    published: int
    taken: int
    retractions: int
    rebuilds: int
    dropped: int
    refused: int
    unreadable: int
