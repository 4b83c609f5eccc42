"""Before a request runs: who asks, what its headers and body say, and whether limits and budget allow it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from backends.dispatch import Candidate
from backends.protocol import whole_number
from gateway.access.budget_queue import Wait
from gateway.access.input_bound import input_bound
from gateway.access.limits import Admission, BudgetExhausted, Refused, Scope
from gateway.access.policy_scopes import terms_of
from gateway.access.principal import AuthenticationError, Principal
from gateway.cache_headers import read as read_cache_headers
from gateway.dialects.errors import (
    BadRequest,
    GatewayError,
    OutOfBudget,
    RateLimited,
    Unauthenticated,
    Unavailable,
)
from gateway.http import Exchange
from gateway.idempotency.step import idempotency_key
from gateway.ledger.prices import estimate
from gateway.ledger.rows import OWN_TAGS
from gateway.life import Life
from policies.load import Policy

if TYPE_CHECKING:
    from gateway.services import Services

MAX_TAGS = 16
MAX_TAG_LENGTH = 64
# The headers that `read_headers` takes into account; most requests have none.
_TAKEN = frozenset(
    (b"x-tierline-deadline-ms", b"x-tierline-tags", b"cache-control", b"x-tierline-cache", b"idempotency-key")
)
# A client library tries again on 429 by itself; beyond this wait that is in vain.
LONGEST_RETRY_S = 60.0


async def authenticate(services: Services, exchange: Exchange) -> Principal:
    """Who asks.

    Raises:
        Unauthenticated: no key, or one that is unknown, expired or revoked.
        BadRequest: two different keys.
    """
    header = exchange.header(b"authorization")
    given = exchange.header(b"x-api-key") if b"x-api-key" in exchange.headers() else None
    other = given.strip() if given else ""  # as the Anthropic SDKs send it
    if header is None:
        token = other
        if not token:
            raise Unauthenticated("No API key given. Send 'Authorization: Bearer YOUR_KEY'.", code="missing_api_key")
    else:
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("The Authorization header must be 'Bearer YOUR_KEY'.", code="invalid_authorization")
        if other and other != token:
            raise BadRequest("The request has one key in 'authorization' and another in 'x-api-key'; send one.")
    try:
        return await services.keys.authenticate_fresh(token)
    except AuthenticationError as error:
        raise Unauthenticated(f"{str(error)[0].upper()}{str(error)[1:]}.", code=error.code) from None


def read_headers(life: Life) -> None:
    """Take Tierline's own request headers into account.

    Raises:
        BadRequest: a header that cannot be understood or honoured.
    """
    exchange = life.exchange
    if _TAKEN.isdisjoint(exchange.headers()):
        return
    if (deadline := exchange.header(b"x-tierline-deadline-ms")) is not None:
        deadline_ms = whole_number(deadline, 8)
        if deadline_ms is None or not 0 < deadline_ms <= 86_400_000:
            raise BadRequest("'x-tierline-deadline-ms' must be a whole number of milliseconds, up to a day.")
        life.deadline = life.started + deadline_ms / 1000
    if (tags := exchange.header(b"x-tierline-tags")) is not None:
        life.tags = {**read_tags(tags, MAX_TAGS - len(life.tags)), **life.tags}
    life.cache_directives = read_cache_headers(exchange.header(b"cache-control"), exchange.header(b"x-tierline-cache"))
    if (key := exchange.header(b"idempotency-key")) is not None:
        life.idempotency_key = idempotency_key(key)


async def receive(services: Services, life: Life) -> bytes:
    """The body of a request whose key is known, read with its headers.

    Raises:
        RateLimited: the key has used up its requests, or the memory for its bodies; nothing more is read.
        BadRequest, TooLarge, RequestTimeout, Unavailable: a header or the body cannot be taken.
        ClientGone: the client left.
    """
    principal = life.principal
    assert principal is not None
    # One with such a key may be repeated, which counts for nothing; a line of a batch waits for its limits.
    if life.line is None and b"idempotency-key" not in life.exchange.headers():
        try:
            services.closed.check(principal.scopes)
        except Refused as error:
            raise _over_limit(services, life, error) from None
    read_headers(life)
    life.room = services.bodies.room(principal.key_id, life.deadline)
    return await life.exchange.body(services.settings.server.max_body_bytes, life.deadline, life.room)


def read_tags(header: str, most: int = MAX_TAGS) -> dict[str, str]:
    """The pairs of `x-tierline-tags`, at most so many. Raises BadRequest."""
    with suppress(UnicodeDecodeError):  # clients send UTF-8; what is none stays Latin-1, as HTTP once had it
        header = header.encode("latin-1").decode()
    tags: dict[str, str] = {}
    for pair in header.split(","):
        name, separator, value = pair.strip().partition("=")
        if not separator or not name or max(len(name), len(value)) > MAX_TAG_LENGTH:
            raise BadRequest(
                f"'x-tierline-tags' takes NAME=VALUE pairs separated by commas, each part at most {MAX_TAG_LENGTH} "
                f"characters.",
                code="invalid_tags",
            )
        name = name.strip()
        if name.casefold().startswith(OWN_TAGS):
            text = f"'x-tierline-tags' takes no names that begin with '{OWN_TAGS}': such tags are the gateway's own."
            raise BadRequest(text, code="invalid_tags")
        tags[name] = value.strip()
    if len(tags) > most:
        raise BadRequest(f"'x-tierline-tags' takes at most {most} pairs here.", code="invalid_tags")
    return tags


async def admit(services: Services, life: Life, *, free: bool = False) -> None:
    """Take the request off the limits and set its money aside, in one round trip; it may have to wait for its turn.

    `free`: it will ask no model, and does not wait.

    Raises:
        RateLimited, OutOfBudget: with `retry-after`.
        Unavailable: the request's deadline passed while it waited.
    """
    principal, policy = life.principal, life.policy
    assert principal is not None
    assert policy is not None
    scopes = terms_of(principal, policy).scopes
    tokens = cost_nanousd = 0
    costs = not (free or life.cache_directives.only_if_cached)
    if not costs:
        # It asks no model and costs nothing, so it needs no money and no tokens: a spent budget does not stop it.
        scopes = tuple(replace(scope, tokens_per_minute=None, budget_nanousd=None) for scope in scopes)
    else:
        assert life.asked is not None
        life.input_hold = await services.measuring.run(life, input_bound, life.asked.chat())
        tokens, cost_nanousd = set_aside(services, life, life.candidates)
    if life.internal:
        scopes = tuple(Scope(s.id, budget_nanousd=s.budget_nanousd, label=s.label) for s in scopes if s.budget_nanousd)
    admission = Admission(
        hold_id=life.request_id,  # so that the ledger knows what a hold came to
        scopes=scopes,
        tokens=tokens,
        cost_nanousd=cost_nanousd,
        ttl_s=services.settings.hold_ttl_seconds,
        unlimited=principal.unlimited,
    )
    waits = not (free or life.internal)
    for_money = _wait_for_money(services, life, policy, admission) if waits and costs else None
    try:
        if life.line is not None:
            life.grant = await life.line.admitted(life, admission, for_money)
        elif for_money is not None:
            life.grant = await services.budget_queue.admit(admission, principal.key_id, life.deadline, for_money)
        else:
            life.grant = await services.queue.admit(admission, principal.key_id, life.deadline, waits=waits)
    except TimeoutError:
        raise Unavailable(
            "The request's deadline passed while it waited for others to end.", status=504, code="backend_deadline"
        ) from None
    except Refused as error:
        _learn(services, principal, error)
        raise _over_limit(services, life, error) from None


def _wait_for_money(services: Services, life: Life, policy: Policy, admission: Admission) -> Wait | None:
    """How the request waits where a budget refuses it; None: it does not."""
    if not _queues(policy):
        return None
    assert policy.budget is not None
    principal = life.principal
    assert principal is not None

    def renew() -> tuple[Admission, bool]:
        asking = services.keys.known(principal.key_id)
        if asking is None:
            raise Unauthenticated(
                "The API key was revoked, or has expired, while the request waited for money.", code="revoked_api_key"
            )
        try:
            now = services.policies.current.named(policy.name)
        except KeyError:  # its file is gone: those who wait under it are the last that it applies to
            now = policy
        return replace(admission, scopes=terms_of(asking, now).scopes, unlimited=asking.unlimited), _queues(now)

    patience_s = policy.budget.queue_at_most if life.patient else services.settings.limits.queue_timeout_s
    return Wait(renew, patience_s)


def _queues(policy: Policy) -> bool:
    return policy.budget is not None and policy.budget.when_exhausted == "queue"


async def count_fault(services: Services, life: Life, fault: GatewayError) -> GatewayError:
    """Take a request at fault, refused before it was admitted, off the requests per minute: they bound such ones too.

    Returns:
        What to tell the client: the fault, or that the limit is exceeded.
    """
    principal, policy = life.principal, life.policy
    if principal is None or life.grant is not None or not 400 <= fault.status < 500 or fault.status == 429:
        return fault
    known = principal.scopes if policy is None else terms_of(principal, policy).scopes
    scopes = tuple(
        Scope(scope.id, scope.requests_per_minute, label=scope.label)
        for scope in known
        if scope.requests_per_minute is not None
    )
    if not scopes:
        return fault
    try:
        await services.limiter.admit(Admission(life.request_id, scopes, 0, 0, services.settings.hold_ttl_seconds))
    except Refused as error:
        _learn(services, principal, error)
        return _over_limit(services, life, error)
    life.standing = await services.limiter.settle(life.request_id, 0, 0)
    return fault


def _learn(services: Services, principal: Principal, error: Refused) -> None:
    if not services.limiter.degraded:  # a share of a limit grows again when Redis is back
        services.closed.learn(principal.scopes, error)


def _over_limit(services: Services, life: Life, error: Refused) -> GatewayError:
    services.metrics.limited.labels(error.limit).inc()
    life.standing = error.standing
    headers = error.headers()
    if error.retry_after_s > LONGEST_RETRY_S:
        headers["x-should-retry"] = "false"
    kind = OutOfBudget if isinstance(error, BudgetExhausted) else RateLimited
    return kind(error.message, headers=headers)


def set_aside(services: Services, life: Life, candidates: Sequence[Candidate]) -> tuple[int, int]:
    """Tokens and nano-dollars for the dearest candidate: an upper estimate of the input, and the expected output.

    A stream's hold is raised as it grows. A plain answer is seen only when it is whole, so where it has a bound, all of
    that is held.
    """
    asked, principal = life.asked, life.principal
    assert asked is not None
    assert principal is not None
    dearest = 0
    for model in {candidate.model for candidate in candidates}:
        settings = services.settings.models[model]
        limit = settings.max_output_tokens if asked.max_tokens is None else asked.max_tokens
        most = min(limit or settings.context_length, settings.context_length)
        life.output_limits[model] = asked.generated * most
        if limit is None or life.stream:
            most = services.estimator.estimate(principal.key_id, model, most)
        output = asked.generated * most
        life.output_hold = max(life.output_hold, output)
        price = services.prices.price_for(model, batch=life.line is not None)
        dearest = max(dearest, estimate(price, life.input_hold, output))
    return life.input_hold + life.output_hold, dearest
