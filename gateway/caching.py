"""A request's turn at the cache: look up, or wait for the same question that is already on its way, or remember.

    join the flight of the exact key
      leader: look up ──hit──► give, land the flight
              └─miss─► backend ─► remember ─► land the flight
      waiter: gets what the leader landed, or goes on alone

The answer is in the cache before the flight lands, so a burst of one question costs one call, whenever it arrives.
Under a promise, some hits are not given (`audit`, `shadow`): the fresh answer goes to the client and, with the ticket
of its look-up, to the cache, which compares the two. A ticket that no answer comes for is given up.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any, cast

import msgspec

from backends.attempt import Answer, Event
from backends.openai import decode_answer, decode_chunk
from cache import eligibility, replay
from cache.client import Lookup
from cache.entry import Entry
from cache.flight import Following
from cache.key import CacheKey
from cache.promise.rule import Rule
from cache.wire import Asker
from gateway.accounting import Accounting
from gateway.cache_keys import larger_keys, own_key
from gateway.dialects.dialect import Writer
from gateway.dialects.errors import Unavailable
from gateway.flights.flying import Flying
from gateway.flights.messages import Landing
from gateway.http import JSON_LINE, SSE_HEADERS
from gateway.ledger.rows import LedgerRow
from gateway.ledger.usage import Usage
from gateway.life import Life
from policies.evaluate import Decision

if TYPE_CHECKING:
    from gateway.services import Services

FLIGHT_TIMEOUT_S = 120.0

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Turn:
    """What the cache may do for one request; while it is entered, the same question of others waits for its answer.

    `writes`: whether the answer is worth keeping while it passes.
    """

    def __init__(self, services: Services, life: Life) -> None:
        self._services = services
        self._life = life
        self._flying: Flying | None = None
        self._parts: list[bytes] = []
        self._to_compare = 0  # the ticket of an answer that the cache waits for
        self.key: CacheKey | None = None
        self.larger: list[CacheKey] = []  # under which larger models keep answers that will do
        self.mode: eligibility.Mode = "off"
        self.reads = False
        self.writes = False
        self.only_if_cached = False
        self.oldest_s: float | None = None  # how old an answer may be

    async def __aenter__(self) -> Turn:
        self._prepare()
        if self.key is not None and self.reads and self.writes:  # what is not kept, nobody can wait for
            self._flying = Flying(self._services, self._life, self.key.exact)
            await self._flying.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._compare_nothing()
        if self._flying is not None:
            await self._flying.__aexit__(*error)

    def _prepare(self) -> None:
        """Decide what is allowed: by policy, by the request's nature, and by the client, who can only be stricter."""
        services, life = self._services, self._life
        assert life.decision is not None
        assert life.principal is not None
        asked = life.asked
        assert asked is not None
        directives = life.cache_directives
        self.only_if_cached = directives.only_if_cached
        policy, cache = life.decision.cache, services.cache
        if asked.operation != "chat" or "anthropic" in asked.needs:
            # Only the words of a chat are compared; what the common form cannot say would not be compared at all.
            life.cache_reason = asked.operation if asked.operation != "chat" else "native_only"
            return
        if cache is None or policy.mode == "off":
            life.cache_reason = "disabled" if cache is None else "policy"
            return
        defaults = services.model_defaults[life.candidates[0].model]
        allowed = eligibility.check(
            asked.payload,
            mode=policy.mode,
            allow_temperature=policy.allow_temperature,
            default_temperature=cast("float | None", defaults.get("temperature")),
            scripts_covered=cache.scripts,
            allow=policy.allow,
        )
        life.cache_reason = allowed.reason
        if allowed.mode == "off" or cache.state is None:
            life.cache_reason = allowed.reason or "unavailable"
            return
        self.mode = allowed.mode
        self.reads = directives.forbids_reading is None
        self.writes = not directives.no_store
        self.oldest_s = directives.oldest_s(policy.ttl)
        if not self.reads:
            life.cache_reason = directives.forbids_reading
        else:
            life.cache = "miss"
        self.key = own_key(services, life)
        self.larger = larger_keys(services, life)

    async def look_up(self) -> Lookup | Following[Landing] | None:
        """An answer to give, or a stream that another request gets, or None: go to a backend.

        Raises:
            Unavailable: the client wants a cached answer or none, and there is none.
        """
        found = await self._find() if self.reads else None
        if found is None and self.only_if_cached:
            raise Unavailable(
                "The answer is not in the cache, and 'only-if-cached' forbids to ask a model.",
                status=504,
                type="not_in_cache",
                code="not_in_cache",
                headers={"x-should-retry": "false"},  # client libraries try again on 504 by themselves
            )
        if found is not None and (most_ms := self._services.settings.cache.hit_jitter_ms):
            await asyncio.sleep(random.uniform(0, most_ms) / 1000)
        return found

    async def _find(self) -> Lookup | Following[Landing] | None:
        """Wait for whoever asks the same, look up, or take off for all who wait."""
        flying = self._flying
        while True:
            if flying is not None and not flying.leads and not flying.alone:
                shared = await self._wait(flying)
                if shared is not None:
                    return shared
            found = await self._look()
            if found is not None:
                if flying is not None and flying.leads:
                    flying.land(Landing(msgspec.structs.replace(found, found_for=self._life.request_id)))
                return found
            if flying is None or not flying.leads or self.only_if_cached or await flying.take_off():
                return None
            self._compare_nothing()  # another process is on its way with the same question

    def _compare_nothing(self) -> None:
        """No fresh answer of this request will come for the ticket that it has."""
        ticket, self._to_compare = self._to_compare, 0
        if ticket and self._services.cache is not None:
            self._services.in_background(self._services.cache.verdict(ticket, None))

    async def _wait(self, flying: Flying) -> Lookup | Following[Landing] | None:
        services, life = self._services, self._life
        patience_s = FLIGHT_TIMEOUT_S
        if life.deadline is not None:  # once it has passed, the dispatcher asks nobody any more and says so
            patience_s = min(patience_s, life.deadline - time.monotonic())
        landed = await flying.wait(patience_s)
        if isinstance(landed, Following):
            life.cache, life.cache_reason = "exact", "in_flight"
            return landed
        if landed is None or landed.found is None or not self._may_take(landed.found):
            return None
        services.in_background(self._note_shared(landed.found.found_for))
        self._tell(landed.found)
        return landed.found

    async def _note_shared(self, answer_of: str) -> None:
        if self._services.cache is not None:
            await self._services.cache.shared(_asker(self._life), answer_of)

    async def _look(self) -> Lookup | None:
        """What the cache has to give."""
        services, life, key = self._services, self._life, self.key
        assert key is not None
        assert services.cache is not None
        assert life.decision is not None
        assert self.mode != "off"
        policy = life.decision.cache
        found = await services.cache.lookup(
            key,
            self.mode,
            policy.threshold or services.settings.cache.similarity_threshold,
            self.oldest_s,
            rule=_rule(life.decision),
            judge=policy.judge,
            asker=_asker(life),
            auditable=self.writes and not self.only_if_cached,
            larger=self.larger,
        )
        self._to_compare = found.ticket
        self._tell(found)
        return found if found.entry is not None else None

    def _tell(self, found: Lookup) -> None:
        """Note for the client, the ledger and the log what was found."""
        life = self._life
        life.cache = found.outcome
        life.cache_score, life.cache_p = found.score, found.p
        life.cache_age_s, life.cache_entry = found.age_s, found.entry_id
        if found.entry is None:
            life.cache_reason = life.cache_reason or found.reason

    def _may_take(self, landed: Lookup) -> bool:
        """Whether what another request found is what this one may get: its policy, and its client, may be stricter."""
        entry = landed.entry
        return landed.outcome == "exact" and entry is not None and not entry.expired(ttl_s=self.oldest_s)

    def keep(self, data: bytes) -> None:
        """A part of the answer in the common form: the body of a plain one, or the data of an event as it comes."""
        self._parts.append(data)
        if self._flying is not None and self._life.stream:
            self._flying.add(data)

    async def remember(self, of_one_model: bool) -> None:
        """Keep the answer that has just been delivered, if it is whole, and give it to whoever waits for it.

        Args:
            of_one_model: an answer that another model has continued is not the answer of one.
        """
        if not self.writes or self.key is None:
            return
        services, life = self._services, self._life
        entry = self._entry(self.key, self._parts) if of_one_model else None
        if entry is not None and services.cache is not None and self.mode != "off":
            ticket, self._to_compare = self._to_compare, 0
            stored = await services.cache.hand_in(self.key, entry, self.mode, asker=_asker(life), ticket=ticket)
            if stored.case is not None:
                services.judges.submit(stored.case, life)
        if self._flying is not None:
            found = None
            if entry is not None:
                found = Lookup("exact", 1.0, entry, age_s=0.0, entry_id=entry.id, found_for=life.request_id)
            self._flying.land(_landing(found, life.served))

    def _entry(self, key: CacheKey, parts: list[bytes]) -> Entry | None:
        life = self._life
        row = life.served
        assert life.decision is not None
        # What a fallback answered must not pass for the answer of the model that was meant.
        # One that a larger tier gave, after a check had failed, is what this request would get again.
        if row is None or (row.model != life.candidates[0].model and life.climb is None):
            return None
        answer = _fold(parts) if life.stream else _decode(parts[0])
        if answer is None or eligibility.storable(answer) is not None:
            return None
        now = time.time()
        return Entry(
            id=life.request_id,
            answer=replay.canonical_answer(answer),
            model=row.model,
            tier=row.tier,
            prompt_tokens=row.input_tokens,
            completion_tokens=row.output_tokens,
            cost_nanousd=row.cost_nanousd,
            created_at=now,
            expires_at=now + (life.decision.cache.ttl or self._services.settings.cache.ttl_seconds),
            question=key.text,
            tags=tuple(f"{name}={value}" for name, value in life.tags.items()),
            policy=life.decision.policy,
        )


async def give(life: Life, accounting: Accounting, found: Lookup, writer: Writer) -> None:
    """Answer from the cache, as a stream or whole, under this request's id. It costs nothing and says what it saved."""
    entry = found.entry
    assert entry is not None
    assert life.asked is not None
    exchange = life.exchange
    usage = Usage(input_tokens=entry.prompt_tokens, output_tokens=entry.completion_tokens, source="reported")
    accounting.answered_from_cache(entry.model, entry.tier, usage, entry.cost_nanousd)
    await accounting.settle("cache_hit")
    answer_id, created = f"chatcmpl-{life.request_id.removeprefix('req-')}", int(time.time())
    life.status = 200
    if not life.stream:
        body = replay.replay_completion(entry.answer, id=answer_id, created=created)
        body = await writer.whole(Answer(body, decode_answer(body)))
        await exchange.answer(200, JSON_LINE + life.header_lines() + life.cost_line(), body)
        return
    await exchange.start(200, [*SSE_HEADERS, *life.headers()])
    usage_too = life.asked.wants_usage
    events = replay.replay_chunks(entry.answer, id=answer_id, created=created, include_usage=usage_too)
    for raw in events[:-1]:  # the last is [DONE], which the writer has of its own
        data = raw[len(b"data: ") : -len(b"\n\n")]
        for written in writer.event(Event(raw, data, decode_chunk(data))):
            await exchange.write(written)
    *ending, last = await writer.end(life.summary())
    for written in ending:
        await exchange.write(written)
    await exchange.end(last)


def _landing(found: Lookup | None, row: LedgerRow | None) -> Landing:
    if row is None:
        return Landing(found)
    return Landing(found, row.model, row.tier, row.input_tokens, row.output_tokens, row.cost_nanousd, row.finish_reason)


def _asker(life: Life) -> Asker:
    principal = life.principal
    assert principal is not None
    return Asker(life.request_id, principal.key_id, principal.team_id)


def _rule(decision: Decision) -> Rule | None:
    """The promise that hits in other words are given under; None: by threshold."""
    policy = decision.cache
    if policy.max_false_hit_rate is None:
        return None
    return Rule(
        policy=decision.policy,
        max_false_hit_rate=policy.max_false_hit_rate,
        audit_rate=policy.audit_rate,
        min_audited=policy.min_audited,
        mode=policy.promise,
    )


def _fold(parts: list[bytes]) -> dict[str, Any] | None:
    collector = replay.Collector()
    for part in parts:
        collector.add(_decode(part))
    return collector.answer()
