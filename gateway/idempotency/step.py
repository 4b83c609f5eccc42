"""The pipeline's step for requests that have an `Idempotency-Key`: give the answer of the first, or record this one's.

A key belongs to the project of the API key that sent it and to what that may use, so that a new API key can repeat what
an old one has begun, and none gets an answer that it may not ask for. It stands for one request: the same route, body,
tier and betas. What is remembered, and what is not, is in docs/decisions/015-idempotency-keys.md.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

from gateway.access.principal import Principal
from gateway.access.secret import ServerSecret
from gateway.dialects.errors import BadRequest, GatewayError, Unavailable
from gateway.http import Header
from gateway.idempotency.answers import ANSWER_SHARE, Answers
from gateway.idempotency.recorder import Recorder
from gateway.idempotency.recording import Broken, Recording, Released, TooLarge, Unreachable
from gateway.idempotency.replay import Source, replay
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.idempotency.shared import Lease, SharedAnswers
    from gateway.life import Life
    from gateway.telemetry import Metrics

_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
# On an answer that other processes cannot repeat, because Redis is away.
_LOCAL: Final[Header] = (b"x-tierline-idempotency", b"local")
_LARGE_BYTES: Final = 1024 * 1024
# Headers that change what is asked.
_ASKS: Final = (b"x-tierline-tier", b"anthropic-beta")


def idempotency_key(header: str) -> str:
    """The value of the header, checked.

    Raises:
        BadRequest: it is no key.
    """
    if not _KEY.fullmatch(header):
        raise BadRequest(
            "'idempotency-key' must be 1 to 255 visible ASCII characters, such as a UUID.",
            code="invalid_idempotency_key",
        )
    return header


class Idempotency:
    """The answers by key: this process's own, and through Redis those of all."""

    def __init__(
        self, settings: Settings, secret: ServerSecret, metrics: Metrics, shared: SharedAnswers | None = None
    ) -> None:
        bounds = settings.idempotency
        self.answers = Answers(bounds.ttl_seconds, bounds.max_entries, bounds.max_bytes)
        self._shared = shared
        self._max_answer_bytes = bounds.max_bytes // ANSWER_SHARE
        self._finish_s = bounds.finish_seconds
        self._secret = secret
        self._metrics = metrics

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.stop()

    def observe(self) -> None:
        """Keep the gauges that no request sets."""
        metrics = self._metrics
        metrics.idempotent_answers.set(len(self.answers))
        metrics.idempotent_bytes.set(self.answers.bytes)
        metrics.idempotent_evicted.labels("memory").value = self.answers.evicted
        if self._shared is not None:
            metrics.idempotent_evicted.labels("redis").value = self._shared.evicted

    async def repeated(self, life: Life, body: bytes) -> bool:
        """Whether this request repeats another: then it has been answered as that one. Else it is recorded from now on.

        Raises:
            GatewayError: the key belongs to another request, or the answer cannot be given again.
        """
        assert life.principal is not None
        assert life.idempotency_key is not None
        id = self._secret.fingerprint(*_owner(life.principal), life.idempotency_key.encode())
        asks = [(life.exchange.header(name) or "").encode("latin-1") for name in _ASKS]
        parts = (life.dialect.route.encode(), *asks, body)
        if len(body) > _LARGE_BYTES:  # hashed beside the event loop
            fingerprint = await asyncio.to_thread(self._secret.fingerprint, *parts)
        else:
            fingerprint = self._secret.fingerprint(*parts)
        while True:
            lease, found = None, self._found(id)
            if found is None and self._shared is not None:
                lease, elsewhere = await self._shared.begin(id, fingerprint)
                # Another request of this process may have begun meanwhile; a lease taken in vain ends by itself.
                found = self._found(id) or elsewhere
            if found is None:
                self._lead(life, id, fingerprint, lease)
                return False
            if found.fingerprint != fingerprint:
                self._count("reused")
                raise BadRequest(
                    "This 'idempotency-key' was used for another request: another route, body, 'x-tierline-tier' or "
                    "'anthropic-beta'. Send a new key, or the same request.",
                    status=422,
                    code="idempotency_key_reuse",
                )
            if await self._follow(life, found):
                return True

    def _found(self, id: str) -> Source | None:
        return self.answers.find(id)

    def _lead(self, life: Life, id: str, fingerprint: str, lease: Lease | None) -> None:
        """Record what this request answers, for those who send it again."""
        recording = Recording(life.request_id, fingerprint)
        self.answers.open(id, recording)
        local = self._shared is not None and lease is None
        self._count("local" if local else "first")
        life.recorder = Recorder(life, id, recording, self.answers, self._finish_s, (_LOCAL,) if local else ())
        if lease is not None:
            lease.publish(recording)

    async def _follow(self, life: Life, source: Source) -> bool:
        """Answer as another request does or did. False: it has ended without an answer, and nothing was given.

        Raises:
            GatewayError: there is none, or it breaks off.
        """
        how = "joined" if source.running else "replayed"
        patience_s = None if life.deadline is None else max(0.0, life.deadline - time.monotonic())
        try:
            with source.joined():
                await replay(life, source, patience_s)
        except Released:
            return False
        except Broken:
            if not life.exchange.started:
                return False
            raise Unavailable(
                "The answer broke off: the request that this one joined has ended. What was sent so far is incomplete.",
                status=502,
                code="stream_cut",
            ) from None
        except TooLarge:
            self._count("too_large")
            raise self._too_large() from None
        except Unreachable:
            raise Unavailable(
                "Another gateway process has the answer to this 'idempotency-key'; it cannot be read now. Try again.",
                code="idempotency_unavailable",
                headers={"retry-after": "1"},
            ) from None
        except TimeoutError:
            raise Unavailable(
                "The request's deadline passed before the answer that it joined was complete.",
                status=504,
                code="backend_deadline",
            ) from None
        self._count(how)
        return True

    def _too_large(self) -> GatewayError:
        return GatewayError(
            f"The answer to this 'idempotency-key' has more than {self._max_answer_bytes} bytes, which is too much to "
            "keep: it cannot be given again, and was not asked for again. Send a new key to have a new answer.",
            status=409,
            type="invalid_request_error",
            code="idempotency_answer_too_large",
            headers={"x-should-retry": "false"},  # client libraries try again on 409 by themselves
        )

    def _count(self, result: str) -> None:
        self._metrics.idempotent.labels(result).inc()


def _owner(principal: Principal) -> tuple[bytes, bytes]:
    allowed = (principal.allowed_models, principal.allowed_tiers, principal.allowed_routes)
    return principal.project_id.encode(), repr([one if one is None else sorted(one) for one in allowed]).encode()


async def open_idempotency(settings: Settings, secret: ServerSecret, metrics: Metrics) -> Idempotency:
    """The step, connected to Redis where the settings have one. End it with `close`."""
    if settings.storage.redis_url is None:
        return Idempotency(settings, secret, metrics)
    from gateway.access.redis_shared import open_channel
    from gateway.idempotency.shared import SCRIPT, Bounds, SharedAnswers

    bounds = settings.idempotency
    channel = open_channel(settings.storage, SCRIPT)
    shared = SharedAnswers(channel, Bounds(bounds.ttl_seconds, bounds.max_entries, bounds.max_bytes))
    await shared.start()
    return Idempotency(settings, secret, metrics, shared)
