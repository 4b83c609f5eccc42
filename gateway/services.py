"""Everything a request needs, made once per process: opened in order, closed in reverse.

settings → database → keys, limiter, journal → writer
         → policies, classifier, prices, cache client, backends → dispatcher
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from backends.dispatch import Candidate, Dispatcher, Limits
from backends.http import HttpClient
from backends.pool import Pool
from cache.client import CacheClient, CacheUnavailable
from cache.flight import SingleFlight
from gateway import workers
from gateway.access.budget_queue import BudgetQueue
from gateway.access.closed import Closed
from gateway.access.counters_memory import MemoryLimiter
from gateway.access.holds import OutputEstimator
from gateway.access.keystore import KeyStore, open_secret
from gateway.access.queue import AdmissionQueue
from gateway.admin.service import AdminService
from gateway.backend_metrics import BackendCollector
from gateway.backend_pools import open_pool
from gateway.batches.working import Batches
from gateway.bodies import Bodies
from gateway.escalating import confidence
from gateway.escalating.confidence import Curves
from gateway.escalating.schemas import Schemas
from gateway.files.store import FileStore
from gateway.flights.messages import Landing
from gateway.guarding.checking import Checks
from gateway.idempotency.step import Idempotency, open_idempotency
from gateway.judging import Judges
from gateway.ledger.database import Database
from gateway.ledger.journal import Journal
from gateway.ledger.prices import PriceBook
from gateway.ledger.takeover import take_over
from gateway.ledger.writer import LedgerWriter
from gateway.life import Life
from gateway.limiter import open_limiter
from gateway.measuring import Measuring
from gateway.model_defaults import model_defaults
from gateway.outcomes.service import Outcomes
from gateway.outcomes.watching import Watching
from gateway.policy_news import IN_FORCE, REFUSED
from gateway.policy_record import PolicyRecord
from gateway.responses.store import ResponseStore
from gateway.rollouts.keeper import RolloutKeeper
from gateway.routing.embedding import SharedEmbedding
from gateway.routing.pace import Paces
from gateway.routing.placing import Placing, cache_salt, salted
from gateway.routing.precedence import precedence
from gateway.routing.record import Descriptions
from gateway.sessions.holding import Sessions, open_sessions
from gateway.settings import Settings
from gateway.telemetry import Metrics
from gateway.tracing import Tracing
from policies.watch import PolicyStore, Reload
from tiers.task import TaskClassifier, default_classifier

if TYPE_CHECKING:
    from gateway.access.counters_shared import SharedLimiter
    from gateway.flights.shared import SharedFlights
    from gateway.routing.shared_prefixes import SharedPrefixes

logger = logging.getLogger("tierline")
policy_logger = logging.getLogger("tierline.policies")

OBSERVE_INTERVAL_S = 1.0
PROMISES_INTERVAL_S = 10.0


class Services:
    """The running gateway, without its HTTP side. Make it with `open`, end it with `close`."""

    settings: Settings
    metrics: Metrics
    tracing: Tracing
    database: Database
    keys: KeyStore
    limiter: MemoryLimiter | SharedLimiter
    idempotency: Idempotency
    sessions: Sessions
    queue: AdmissionQueue
    budget_queue: BudgetQueue
    closed: Closed
    bodies: Bodies
    measuring: Measuring
    schemas: Schemas
    curves: Curves
    estimator: OutputEstimator
    paces: Paces
    journal: Journal
    writer: LedgerWriter
    policies: PolicyStore
    policy_record: PolicyRecord | None = None  # none yet while the policies are loaded
    rollouts: RolloutKeeper
    classifier: TaskClassifier
    embedding: SharedEmbedding
    outcomes: Outcomes
    watching: Watching
    prices: PriceBook
    descriptions: Descriptions
    model_defaults: Mapping[str, Mapping[str, object]]
    cache: CacheClient | None
    flight: SingleFlight[Landing]
    shared_flights: SharedFlights | None
    responses: ResponseStore
    files: FileStore
    batches: Batches
    admin: AdminService | None
    pools: dict[str, Pool]
    dispatcher: Dispatcher
    placing: Placing
    shared_prefixes: SharedPrefixes | None
    judges: Judges
    checks: Checks
    http: HttpClient

    def __init__(self, settings: Settings, worker: int = 1) -> None:
        self.settings = settings
        self.worker = worker
        self.draining = False
        self._stack = AsyncExitStack()
        self._background: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(cls, settings: Settings, *, worker: int = 1, tracing: Tracing | None = None) -> Self:
        """Open everything; what was opened is closed again if something fails. `worker`: which of server.workers.

        Raises:
            MissingSecret, MissingExtra, InvalidFile, InvalidPrice, JournalError, SQLAlchemyError: what is wrong and
            what to do.
        """
        services = cls(settings, worker)
        try:
            await services._open(tracing)
        except BaseException:
            await services.close()
            raise
        return services

    async def _open(self, tracing: Tracing | None) -> None:
        settings, stack = self.settings, self._stack
        data_dir = settings.storage.data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        self.metrics = Metrics()
        self.tracing = tracing or Tracing(settings.telemetry)
        stack.callback(self.tracing.close)
        self.prices = PriceBook(settings)
        self.descriptions = Descriptions(settings, self.prices)
        self.model_defaults = {name: model_defaults(settings, name) for name in settings.models}
        self.classifier = default_classifier()  # which the examples of policies use, too
        folder, tiers, models = settings.policies_dir, settings.tiers_served(), settings.models.keys()
        unmeasured = partial(confidence.uncalibrated, settings)
        opened = partial(PolicyStore, folder, tiers, models, self._policies_reloaded, uncalibrated=unmeasured)
        opened = partial(opened, last_good=data_dir / "policies-last-good")
        self.policies = await asyncio.to_thread(opened)
        self.policies.start()
        stack.callback(self.policies.close)
        self.database = await Database.open(settings.database_url())
        stack.push_async_callback(self.database.close)
        self.journal = Journal.open(workers.journal_path(settings, self.worker))
        stack.callback(self.journal.close)
        self.outcomes = Outcomes(self.database, self.metrics)
        await self.outcomes.start()
        stack.push_async_callback(self.outcomes.stop)
        self.writer = LedgerWriter(self.journal, self.database)
        await self.writer.flush()  # budgets start from the ledger, so what the last process left must be in it
        self.writer.start()
        stack.push_async_callback(self.writer.stop)
        self.metrics.journal_lag.set_function(lambda: self.writer.lag_rows)
        left = await take_over(workers.left_journals(settings, self.worker), self.database)
        self.limiter = await open_limiter(settings, self.database, [self.journal.directory, *left])
        stack.push_async_callback(self.limiter.stop)
        self.metrics.holds.set_function(lambda: self.limiter.open_holds)
        self.metrics.limiter_degraded.set_function(lambda: self.limiter.degraded)
        waiting = settings.limits
        self.queue = AdmissionQueue(
            self.limiter,
            most_running=waiting.max_concurrency,
            most_waiting=waiting.max_queued,
            patience_s=waiting.queue_timeout_s,
            waited=self.metrics.queue_wait.observe,
        )
        self.metrics.queued.set_function(lambda: self.queue.waiting)
        self.budget_queue = BudgetQueue(self.queue, most_waiting=waiting.max_queued)
        self.metrics.waiting_for_money.set_function(lambda: self.budget_queue.waiting)
        self.closed = Closed()
        self.bodies = Bodies(settings.server.max_held_body_bytes)
        self.measuring = Measuring()
        stack.callback(self.measuring.close)
        self.schemas = Schemas()
        stack.callback(self.schemas.close)
        self.curves = Curves(data_dir)
        self.metrics.body_bytes.set_function(lambda: self.bodies.held_bytes)
        self.estimator = OutputEstimator()
        self.paces = Paces()
        secret = await open_secret(self.database, data_dir / "secret")
        self.keys = KeyStore(self.database, secret, settings.default_limits)
        await self.keys.start()
        stack.push_async_callback(self.keys.stop)
        self.policy_record = PolicyRecord(self.database, self.policies, self.worker)
        self.policy_record.start()
        stack.push_async_callback(self.policy_record.stop)
        self.rollouts = RolloutKeeper(self.database, self.policies, self.metrics)
        await self.rollouts.start()
        self.outcomes.watch = self.rollouts.judged
        stack.push_async_callback(self.rollouts.stop)
        self.idempotency = await open_idempotency(settings, secret, self.metrics)
        stack.push_async_callback(self.idempotency.close)
        self.sessions = await open_sessions(settings, secret)
        stack.push_async_callback(self.sessions.close)
        self.cache = None
        if settings.cache.enabled:
            socket = settings.run_path("cache.sock")
            self.cache = CacheClient(socket, timeout_ms=settings.cache.lookup_timeout_ms)
            await self.cache.start()
            stack.push_async_callback(self.cache.close)
        self.embedding = SharedEmbedding(settings, self.cache, self.metrics.embeddings)
        self.flight = SingleFlight()
        self.shared_flights = None
        if settings.storage.redis_url is not None and settings.cache.enabled:
            from gateway.flights.shared import open_flights

            self.shared_flights = await open_flights(settings)
            stack.push_async_callback(self.shared_flights.stop)
        self.responses = ResponseStore(self.database, settings.responses)
        self.responses.start()
        stack.push_async_callback(self.responses.stop)
        kept = settings.batches
        self.files = FileStore(self.database, keep_days=kept.keep_days, max_project_bytes=kept.max_project_bytes)
        self.files.start()
        stack.push_async_callback(self.files.stop)
        self.http = HttpClient()
        stack.push_async_callback(self.http.aclose)
        self.admin = AdminService(settings, secret) if settings.admin_enabled() else None
        if self.admin is not None:
            stack.push_async_callback(self.admin.close)
        self.pools = {name: open_pool(settings, name, self.http) for name in settings.backends}
        for pool in self.pools.values():
            for one in (pool, *([pool.prefilling.pool] if pool.prefilling is not None else ())):
                if one.feeds is not None:
                    one.feeds.start()
            stack.push_async_callback(pool.aclose)
        self.shared_prefixes = None
        shared_key = None
        if settings.storage.redis_url is not None:
            from gateway.routing.shared_prefixes import open_shared_prefixes

            self.shared_prefixes = await open_shared_prefixes(settings, self.pools, self.metrics.prefixes_told)
            stack.push_async_callback(self.shared_prefixes.stop)
            shared_key = bytes.fromhex(secret.digest("placement"))  # or no gateway would know another's digests
        self.placing = Placing(settings, self.pools, self.estimator, shared_key)
        self.metrics.registry.register(BackendCollector(self.pools))
        self.dispatcher = Dispatcher(self.pools, Limits(settings.failover.max_attempts, settings.failover.total_s))
        self.watching = Watching(self)
        self.judges = Judges(self)
        self.checks = Checks(self)
        stack.push_async_callback(self.judges.close)
        self.batches = Batches(self)
        self.batches.start()
        stack.push_async_callback(self.batches.close)
        observer = asyncio.create_task(self._observe(), name="observe")
        stack.callback(observer.cancel)
        if self.cache is not None:
            watching = asyncio.create_task(self._watch_promises(self.cache), name="watch promises")
            stack.callback(watching.cancel)

    def at_close(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Have something ended before everything that was opened until now."""
        self._stack.push_async_callback(callback)

    async def close(self) -> None:
        """Finish background work and close everything, in reverse order."""
        if self._background:
            await asyncio.wait(self._background, timeout=5)
        await self._stack.aclose()

    def extra_fields(self, candidate: Candidate, life: Life, deadline: float | None) -> dict[str, Any]:
        """Fields added to a request for a candidate.

        The bundled engine keeps each team's prefix cache apart, and within it that of each salt the client sends; it
        shares itself fairly between teams, and is told how urgent a request is and until when (`deadline`).
        A model with an output limit gets it where the request names none.
        """
        fields: dict[str, Any] = {}
        asked = life.asked
        assert asked is not None
        if life.principal is not None and salted(self.settings, candidate.backend):
            fields["cache_salt"] = cache_salt(life.principal.team_id, asked.payload.get("cache_salt"))
        if self.settings.backends[candidate.backend].engines:
            fields |= precedence(life, deadline)
        most = self.settings.models[candidate.model].max_output_tokens
        if most is not None and asked.output_limit is None:
            fields["max_tokens"] = most
        if life.decision is not None and life.decision.escalate is not None:
            fields |= confidence.asked_of(self.settings, life, candidate)
        return fields

    def begin_span(self, life: Life) -> None:
        """Start the trace of a request, if traces go anywhere."""
        if self.tracing.enabled:
            parent = life.exchange.header(b"traceparent")
            headers = {"traceparent": parent} if parent else {}
            life.span = self.tracing.start("chat", life.requested_model, headers)

    def in_background(self, work: Any) -> None:
        """Run a coroutine beside the request; its failure is logged, and `close` waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work failed: %s: %s", type(error).__name__, error)

    def _policies_reloaded(self, reload: Reload) -> None:
        """In the thread that watches the folder."""
        self.metrics.policy_problems.set(len(reload.problems))
        self.metrics.policy_reloads.labels("ok" if reload.accepted else "refused").inc()
        for problem in reload.problems:
            policy_logger.error("%s%s", REFUSED, problem)
        if reload.accepted:
            if self.policy_record is not None:
                self.policy_record.saw(reload.policies)
            policy_logger.info("%s%s", IN_FORCE, reload.policies.version)

    async def _observe(self) -> None:
        """Keep the gauges that no event sets."""
        while True:
            self.idempotency.observe()
            for rate in self.metrics.rates:
                rate.look()
            self.metrics.cache_connected.set(1 if self.cache is not None and self.cache.connected else 0)
            for name, pool in self.pools.items():
                states = pool.snapshot()
                self.metrics.backend_up.labels(name).set(1 if any(s.state != "cooling" for s in states) else 0)
                self.metrics.outstanding.labels(name).set(sum(state.outstanding for state in states))
            await asyncio.sleep(OBSERVE_INTERVAL_S)

    async def _watch_promises(self, cache: CacheClient) -> None:
        """Ask the cache how its promises and its replicas stand."""
        while True:
            try:
                stats = await cache.stats()
                self.metrics.promises.take(stats)
                self.metrics.replicas.take(stats.replication)
            except CacheUnavailable:
                self.metrics.promises.forget()
                self.metrics.replicas.take(None)
            await asyncio.sleep(PROMISES_INTERVAL_S)
