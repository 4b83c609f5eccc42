"""The `Limiter` of several gateway processes: one set of counters in Redis, changed by `counters.lua`.

One call per admission, settle and touch; each is atomic, by Redis's clock. It promises that what is spent equals the
ledger's sum, also when Redis has lost its data: a request counts either in the ledger or in Redis, decided by whether
its id lies before a cut, and a new cut is made whenever Redis is not the server that the last one was made on.

    first admission with a budget ─► cut = an id of now ─► base = ledger's sum of requests before it ─► admit again

Raises `RedisDown` when Redis does not answer; what then happens is decided in `counters_shared.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.access.counting import (
    SOON_S,
    Bucket,
    Counters,
    budget_used,
    check,
    check_raise,
    grant,
    month_of,
    scope_standing,
    standing,
)
from gateway.access.limits import Admission, Grant, LimitExceeded, Refused, Scope, ScopeStanding, Standing
from gateway.access.redis_channel import Channel, RedisDown, look_at

SCRIPT: Final = (Path(__file__).parent / "counters.lua").read_text()
# One hash tag: the scopes of a request lie in one slot, so that one script can change them together.
PREFIX: Final = "{tierline}"
ALIVE_S: Final = 5.0
_SEED_TRIES: Final = 5
# Longer than this no request waits for the database; the reading itself goes on.
_SEED_WAIT_S: Final = 2.0
# Holds looked through in one call: few enough to be answered in time.
_PAGE: Final = 500

# Gives ids of requests. Awaited by the ledger within its reading: rows that this reading sees are of requests that
# were admitted before, so that their ids are among those.
Ids = Callable[[], Awaitable[Collection[str]]]
# The ledger's nano-dollars by scope id, of a month, of requests with ids before the text, but without the others.
Spent = Callable[[int, str, Ids], Awaitable[Mapping[str, int]]]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class SpendUnknown(RedisDown):
    """Redis has no sum for this month's budgets, and the ledger's database cannot give one now."""


class Beat(msgspec.Struct, frozen=True):
    """`processes` that share these counters; whether this one was `known`; whether it shall read the ledger again."""

    processes: int
    known: bool
    refresh: bool


class RedisLimiter:
    """Counters in Redis. `owner` names the journal behind this process; `new_cut` makes an id of now."""

    def __init__(
        self,
        channel: Channel,
        *,
        owner: str,
        spent: Spent,
        new_cut: Callable[[], str],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.channel = channel
        self.owner = owner
        self.expired_holds = 0  # reclaimed by this process's calls, whoever's they were
        # What scopes had used when they were last heard of: the month, and nano-dollars settled and held in it.
        self.known: dict[str, tuple[int, int]] = {}
        self._spent = spent
        self._new_cut = new_cut
        self._clock = clock
        self._seeding: asyncio.Task[None] | None = None

    async def admit(self, admission: Admission) -> Grant:
        if admission.tokens < 0 or admission.cost_nanousd < 0:
            raise ValueError(f"a hold needs amounts >= 0: {admission}")
        answer = await self._seeded("admit", self._admission(admission))
        if answer[0] == "gone":
            raise ValueError(f"hold {admission.hold_id} has expired; a new attempt needs a new hold")
        if answer[0] == "refused":
            index, now, states = answer[2:]
            raise self._refusal(admission, index - 1, now, states)
        taken = self._seen(admission.scopes, answer[2])
        return grant(admission.hold_id, taken)

    async def restore(self, admission: Admission) -> None:
        """Count a request that runs already, unless it is counted: it was admitted while Redis was away, or Redis has
        forgotten it. No limit is asked."""
        await self._call("admit", {**self._admission(admission), "restore": True})

    async def settle(self, hold_id: str, tokens: int, cost_nanousd: int) -> Standing | None:
        if tokens < 0 or cost_nanousd < 0:
            raise ValueError(f"hold {hold_id} cannot be settled with {tokens} tokens, {cost_nanousd} nano-dollars")
        answer = await self._call("settle", {"id": hold_id, "tokens": tokens, "cost": cost_nanousd})
        if answer[0] == "nothing":
            return None
        now, scopes, states = answer[2:]
        return standing(self._seen(_scopes(scopes), states), now)

    async def touch(self, hold_id: str, ttl_s: float, tokens: int = 0, cost_nanousd: int = 0) -> bool:
        arguments = {"id": hold_id, "ttl_s": ttl_s, "tokens": tokens, "cost": cost_nanousd}
        answer = await self._call("touch", arguments)
        if answer[0] == "nothing":
            return False
        if answer[0] == "refused":
            index, now, scopes, states, more = answer[2:]
            scope, counters = self._seen(_scopes(scopes), states)[index - 1]
            check_raise(scope, counters, round(more), month_of(now)[1] - now)
        else:
            self._seen(_scopes(answer[2]), answer[3])
        return True

    async def budget_used(self, scopes: Iterable[Scope]) -> dict[str, float]:
        asked = [scope for scope in scopes if scope.budget_nanousd is not None]
        return budget_used(await self._look(asked)) if asked else {}

    async def balance(self, scope_id: str) -> tuple[int, int]:
        """What a scope has settled and what is held, this month, in nano-dollars."""
        ((_, counters),) = await self._look([Scope(scope_id)])
        return counters.settled, counters.held

    async def standings(self, scopes: Sequence[Scope]) -> list[ScopeStanding]:
        """Where each scope stands now; nothing is taken."""
        answer = await self._seeded("look", {"scopes": _packed(scopes), "budgets": True})
        return [scope_standing(scope, counters, answer[3]) for scope, counters in self._seen(scopes, answer[2])]

    async def _look(self, scopes: Sequence[Scope]) -> list[tuple[Scope, Counters]]:
        answer = await self._seeded("look", {"scopes": _packed(scopes), "budgets": True})
        return self._seen(scopes, answer[2])

    async def beat(self, process: str) -> Beat:
        """Say that a process is alive. Once a second, so that the others know how many they are."""
        return Beat(*(await self._call("beat", {"process": process, "alive_s": ALIVE_S}))[2:])

    async def leave(self, process: str) -> None:
        await self._call("leave", {"process": process})

    async def owned(self, others: Collection[str] = ()) -> list[str]:
        """Ids of the holds of this owner, and of some others, that are not settled; expired ones too."""
        found: list[str] = []
        first = 0
        while True:
            page = {"owners": [self.owner, *others], "first": first, "count": _PAGE}
            _, _, ids, seen = await self._call("owned", page)
            found += ids
            first += seen
            if seen < _PAGE:
                return found

    async def read_ledger(self, *, start_over: bool = False) -> None:
        """Read again what was spent before the cut: rows of requests that ran then have arrived since.

        With `start_over` everything up to now goes to the ledger's side: what Redis should have been told got lost.

        Raises:
            SpendUnknown: the database is out. RedisDown: Redis is.
        """
        _, _, month, cut = await self._call("cut", {"cut": self._new_cut(), "force": start_over})

        async def early() -> Collection[str]:
            return list((await self._call("early", {"month": month}))[2])

        try:
            spent = await self._spent(month, cut, early)
        except RedisDown:
            raise
        except Exception as error:
            raise SpendUnknown(f"the ledger's database does not tell what is spent: {error}") from error
        base = [part for pair in spent.items() for part in pair]
        await self._call("base", {"month": month, "cut": cut, "base": base})

    async def seed(self) -> None:
        """Make sure that Redis knows this month's sums."""
        answer = await self._call("look", {"scopes": [], "budgets": True})
        if answer[0] == "seed":
            await self.read_ledger()

    async def _seeded(self, operation: str, arguments: dict[str, Any]) -> list[Any]:
        """Call, and give Redis the ledger's sums first where it has none of this month."""
        for _ in range(_SEED_TRIES):
            answer = await self._call(operation, arguments)
            if answer[0] != "seed":
                return answer
            if self._seeding is None or self._seeding.done():
                self._seeding = asyncio.create_task(self.read_ledger(), name="seed-budgets")
                self._seeding.add_done_callback(look_at)
            # Everybody waits for the same reading; one that gives up must not end it for the others.
            done, _ = await asyncio.wait({self._seeding}, timeout=_SEED_WAIT_S)
            if not done:
                raise SpendUnknown(f"reading the ledger's sums takes longer than {_SEED_WAIT_S} s")
            await self._seeding
        raise SpendUnknown("Redis keeps losing the sums of this month's budgets")

    async def _call(self, operation: str, arguments: dict[str, Any]) -> list[Any]:
        if self._clock is not None:
            arguments["now"] = self._clock()
        arguments["run"] = self.channel.run_id
        answer: list[Any] = _decode(await self.channel.call(operation, _encode(arguments)))
        self.expired_holds += answer[1]
        return answer

    def _admission(self, admission: Admission) -> dict[str, Any]:
        return {
            "id": admission.hold_id,
            "owner": self.owner,
            "scopes": _packed(admission.scopes),
            "unlimited": admission.unlimited,
            "tokens": admission.tokens,
            "cost": admission.cost_nanousd,
            "ttl_s": admission.ttl_s,
        }

    def _seen(self, scopes: Iterable[Scope], states: Iterable[Sequence[float]]) -> list[tuple[Scope, Counters]]:
        """The counters that Redis answered with, which are remembered in case that it goes away."""
        seen = [(scope, _counters(state)) for scope, state in zip(scopes, states, strict=True)]
        month, _ = month_of(time.time())
        for scope, counters in seen:
            self.known[scope.id] = (month, counters.settled + counters.held)
        return seen

    def _refusal(self, admission: Admission, index: int, now: float, states: list[list[float]]) -> Refused:
        """The refusal that `counting.check` makes of these numbers: the words are the same for every limiter."""
        seen = self._seen(admission.scopes, states)
        scope, counters = seen[index]
        refusal: Refused = LimitExceeded(scope.id, "requests_per_minute", SOON_S, f"{scope.id} has no room now.")
        try:
            check(scope, counters, admission, now, month_of(now)[1] - now)
        except Refused as worded:
            refusal = worded
        refusal.standing = standing(seen, now)
        return refusal


def _packed(scopes: Iterable[Scope]) -> list[list[Any]]:
    """As `counters.lua` takes them: -1 for no limit."""
    return [[-1 if value is None else value for value in msgspec.structs.astuple(scope)] for scope in scopes]


def _scopes(packed: Iterable[Sequence[Any]]) -> list[Scope]:
    fields = Scope.__struct_fields__
    return [
        msgspec.convert(
            {field: None if value == -1 else value for field, value in zip(fields, scope, strict=True)}, Scope
        )
        for scope in packed
    ]


def _counters(state: Sequence[float]) -> Counters:
    requests, requests_at, tokens, tokens_at, settled, held, parallel = state
    return Counters(
        month=0,
        requests=Bucket(requests, requests_at),
        tokens=Bucket(tokens, tokens_at),
        settled=round(settled),
        held=round(held),
        parallel=round(parallel),
    )
