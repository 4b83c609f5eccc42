"""A request's turn at the cache: look up, or wait for the same question that is already on its way, or remember.

    join the flight of the exact key
      leader: look up ──hit──► give, land the flight
              └─miss─► backend ─► remember ─► land the flight
      waiter: gets what the leader landed, or goes on alone

The answer is in the cache before the flight lands, so a burst of one question costs one call, whenever it arrives.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, cast

import msgspec

from backends.attempt import Answer, Event
from backends.openai import decode_answer, decode_chunk
from cache import eligibility, replay
from cache.client import Lookup
from cache.entry import Entry
from cache.flight import Ticket
from cache.key import CacheKey, build_key
from gateway.accounting import Accounting
from gateway.dialects.dialect import Writer
from gateway.dialects.errors import Unavailable
from gateway.http import JSON_TYPE, SSE_HEADERS
from gateway.ledger.usage import Usage
from gateway.life import Life

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
        self._flight: AbstractAsyncContextManager[Ticket[Lookup]] | None = None
        self._ticket: Ticket[Lookup] | None = None
        self.key: CacheKey | None = None
        self.mode: eligibility.Mode = "off"
        self.reads = False
        self.writes = False
        self.only_if_cached = False
        self.oldest_s: float | None = None  # how old an answer may be

    async def __aenter__(self) -> Turn:
        self._prepare()
        if self.key is not None and self.reads:
            self._flight = self._services.flight.join(self.key.exact)
            self._ticket = await self._flight.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._flight.__aexit__(*error) if self._flight is not None else None

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
        model = life.candidates[0].model
        defaults = services.model_defaults[model]
        allowed = eligibility.check(
            asked.payload,
            mode=policy.mode,
            allow_temperature=policy.allow_temperature,
            default_temperature=cast("float | None", defaults.get("temperature")),
            scripts_covered=cache.scripts,
        )
        life.cache_reason = allowed.reason
        if allowed.mode == "off" or cache.fingerprint is None:
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
        self.key = build_key(
            asked.payload,
            scope=_scope(life, policy.share),
            model_group=model,
            embedder=cache.fingerprint,
            defaults=defaults,
        )

    async def look_up(self) -> Lookup | None:
        """An answer to give, or None: go to a backend.

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
        return found

    async def _find(self) -> Lookup | None:
        services, life, key, ticket = self._services, self._life, self.key, self._ticket
        assert key is not None
        assert ticket is not None
        assert services.cache is not None
        assert life.decision is not None
        found: Lookup | None = None
        if not ticket.leader:
            patience_s = FLIGHT_TIMEOUT_S
            if life.deadline is not None:  # once it has passed, the dispatcher asks nobody any more and says so
                patience_s = min(patience_s, life.deadline - time.monotonic())
            found = await ticket.result(patience_s)
        if found is None and ticket.leader:
            policy = life.decision.cache
            assert self.mode != "off"
            threshold = policy.threshold or services.settings.cache.similarity_threshold
            found = await services.cache.lookup(key, self.mode, threshold, policy.ttl)
            if found.entry is not None:
                ticket.complete(found)
        if found is None or found.outcome == "miss" or found.entry is None:
            life.cache_reason = life.cache_reason or (found.reason if found else None)
            life.cache_score = found.score if found else None
            return None
        life.cache = found.outcome
        life.cache_score = found.score
        return found

    async def remember(self, parts: list[bytes]) -> None:
        """Keep the answer that has just been delivered, if it is whole, and give it to whoever waits for it.

        Args:
            parts: the body of a plain answer, or the data of each event of a stream.
        """
        if not self.writes or self.key is None:
            return
        entry = self._entry(self.key, parts)
        if entry is not None and self._services.cache is not None and self.mode != "off":
            await self._services.cache.store(self.key, entry, self.mode)
        if self._ticket is not None and self._ticket.leader:
            self._ticket.complete(Lookup("exact", 1.0, entry) if entry is not None else None)

    def _entry(self, key: CacheKey, parts: list[bytes]) -> Entry | None:
        life = self._life
        row = life.served
        assert life.decision is not None
        # What a fallback answered must not pass for the answer of the model that was meant.
        if row is None or row.model != life.candidates[0].model:
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
        await exchange.respond(200, [JSON_TYPE, *life.headers(), life.cost_header()], body)
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


def _scope(life: Life, share: str) -> str:
    principal = life.principal
    assert principal is not None
    owner = {"key": principal.key_id, "team": principal.team_id, "organisation": principal.organisation_id}[share]
    return f"{share}:{owner}"


def _fold(parts: list[bytes]) -> dict[str, Any] | None:
    collector = replay.Collector()
    for part in parts:
        collector.add(_decode(part))
    return collector.answer()
