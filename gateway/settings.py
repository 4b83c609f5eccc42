"""`tierline.yaml`, the platform engineer's file: listeners, storage, tiers, models, backends, engines, cache.

Unknown keys are refused with file, line and a suggestion. Relative paths are relative to the file. Secrets never
stand in the file: a backend names the environment variable that holds its key.
"""

from __future__ import annotations

import functools
import ipaddress
import os
from decimal import Decimal
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.protocol import OutputLimitField
from gateway.settings_conflicts import conflicts
from policies import yamlfile
from policies.yamlfile import Document, InvalidFile
from tiers import TIERS

TierName = Literal["small", "medium", "large", "xlarge"]
Capability = Literal["tools", "vision", "json_schema", "logprobs", "reasoning", "prefill", "audio"]


class Strict(BaseModel):
    """Base of all configuration: unknown keys are errors, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LogSettings(Strict):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    prompts: bool = Field(False, description="Write prompts and answers to the log. Off unless you are debugging.")


class ServerSettings(Strict):
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    workers: int = Field(1, ge=1, le=64, description="More than one needs storage.redis_url: they share limits there.")
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024)
    max_held_body_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Of all requests of a process at once; what is over waits or is refused.",
    )
    read_timeout_seconds: float = Field(30.0, gt=0, description="For a request's head, and for a pause in its body.")
    body_timeout_seconds: float = Field(300.0, gt=0, description="Beyond that for a whole body, however large.")
    write_timeout_seconds: float = Field(60.0, gt=0, description="For a client that does not read its answer.")
    keep_alive_seconds: float = Field(
        15.0, ge=0, description="Longest silence of a stream that has begun: then a sign of life is sent; 0: never."
    )
    shutdown_delay_seconds: float = Field(
        0.0, ge=0, description="How long to serve on after SIGTERM, not ready, before the drain begins."
    )
    drain_seconds: float = Field(20.0, ge=0, description="How long running requests may finish after that.")
    log: LogSettings = LogSettings()


class StorageSettings(Strict):
    data_dir: Path = Field(Path("var"), description="Database, journal, models, sockets, first key.")
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: SQLite in data_dir.")
    redis_url: str | None = Field(
        None, pattern=r"^(redis|rediss|unix)://", description="Shares limits and budgets between gateway processes."
    )
    redis_timeout_ms: float = Field(50.0, gt=0, description="A slower Redis counts as away.")


class Price(Strict):
    """What a model costs, in US dollars per million tokens, with the name of its version for the ledger."""

    version: str = Field("local-1", min_length=1, max_length=64)
    input_usd_per_million: Decimal = Field(ge=0)
    output_usd_per_million: Decimal = Field(ge=0)
    cached_input_usd_per_million: Decimal | None = Field(None, ge=0, description="Default: the input price.")


class ModelSettings(Strict):
    """One public model name and where it is served. `price` overrides the bundled price list."""

    kind: Literal["chat", "embedding", "rerank"] = "chat"
    tier: TierName | None = Field(None, description="Of a chat model; the others have none.")
    backend: str
    upstream_model: str | None = Field(None, description="The backend's name of the model; default: the same.")
    parameters_billion: float | None = Field(None, gt=0)
    context_length: int = Field(8192, ge=128)
    max_output_tokens: int | None = Field(None, ge=1)
    capabilities: frozenset[Capability] = frozenset()
    price: Price | None = None
    price_as: str | None = Field(None, description="PROVIDER:MODEL in the bundled price list, such as openai:gpt-4o.")

    @model_validator(mode="after")
    def _tier_of_chat(self) -> Self:
        if (self.kind == "chat") != (self.tier is not None):
            raise ValueError("a chat model needs a 'tier'" if self.kind == "chat" else "only a chat model has a 'tier'")
        return self

    @property
    def shown_tier(self) -> str:
        """What ledger and headers say: the tier, or the kind of a model that has none."""
        return self.tier or self.kind


class Timeouts(Strict):
    """Deadlines of one attempt, in seconds."""

    connect_s: float = Field(2.0, gt=0)
    first_token_s: float = Field(60.0, gt=0)
    between_tokens_s: float = Field(30.0, gt=0)
    total_s: float = Field(600.0, gt=0)


class HedgeSettings(Strict):
    """A second request beside a stream that is slow to begin; the first answer counts, the other is cancelled."""

    after_quantile: float = Field(
        0.95, gt=0, lt=1, description="Of the backend's recent first-content times: then the second request goes out."
    )
    max_share: float = Field(0.05, gt=0, le=1, description="Most hedges per stream: what hedging may cost.")
    min_delay_s: float = Field(0.05, ge=0, description="Never hedge sooner than this.")


class BackendSettings(Strict):
    """A server that serves models: `engine` (the bundled one, by name), `embedder` (the cache's), or `base_urls`."""

    engine: str | None = None
    embedder: bool = Field(False, description="The cache process's embedding model; needs cache.embeddings_port.")
    base_urls: tuple[str, ...] = ()
    dialect: Literal["openai", "anthropic"] = Field("openai", description="The API that the servers speak.")
    output_limit_field: OutputLimitField | None = Field(
        None, description="What they call the most tokens of a chat answer; default: what the client calls it."
    )
    api_key_env: str | None = Field(None, description="Environment variable that holds the backend's API key.")
    headers: dict[str, str] = {}
    max_outstanding: int = Field(256, ge=1, description="Requests at once per replica.")
    max_queued: int = Field(256, ge=0, description="Requests that may wait for a replica when all are busy.")
    queue_timeout_s: float = Field(10.0, gt=0, description="How long one of them waits.")
    attempts: int = Field(2, ge=1, le=10, description="Tries per candidate, before the next candidate.")
    retry_share: float = Field(0.2, ge=0, le=1, description="Most retries per request, over all requests.")
    hedge: HedgeSettings | None = Field(None, description="Off unless given.")
    timeouts: Timeouts = Timeouts()

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if [bool(self.engine), self.embedder, bool(self.base_urls)].count(True) != 1:
            raise ValueError("give either 'engine', 'embedder: true' or 'base_urls'")
        if self.dialect != "openai" and not self.base_urls:
            raise ValueError("the bundled engine and embedder speak the dialect openai")
        if self.output_limit_field and (self.dialect != "openai" or self.embedder):
            raise ValueError("only servers of the dialect openai that chat have an 'output_limit_field'")
        for url in self.base_urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"a base URL starts with http:// or https://, got {url!r}")
        return self

    @functools.cached_property
    def limits_output_by(self) -> OutputLimitField | None:
        """The field for the most tokens of a chat answer: `output_limit_field`, or what OpenAI's own servers want."""
        if self.output_limit_field is None and self.dialect == "openai" and self.base_urls:
            hosts = [urlsplit(url).hostname or "" for url in self.base_urls]
            if all(host == "api.openai.com" or host.endswith(".openai.azure.com") for host in hosts):
                return "max_completion_tokens"
        return self.output_limit_field


class SamplingDefaults(Strict):
    """What counts where a request names no value; the defaults are the API's."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)


class EngineSettings(Strict):
    """One bundled engine process, started by `tierline up`."""

    model: str = Field(description="A pulled model's name or the path of a GGUF file.")
    host: str = "127.0.0.1"
    port: int = Field(8101, ge=0, le=65535)
    threads: int | None = Field(None, ge=1)
    max_model_len: int | None = Field(None, ge=128)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(512, ge=16)
    kv_cache_bytes: int | None = Field(None, ge=1 << 20)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    sampling: SamplingDefaults = SamplingDefaults()
    autostart: bool = True


class CacheSettings(Strict):
    enabled: bool = True
    embedder: str = "all-MiniLM-L6-v2"
    similarity_threshold: float = Field(0.95, gt=0, le=1)
    ttl_seconds: float = Field(86_400, gt=0)
    max_entries: int = Field(100_000, ge=1)
    max_bytes: int = Field(512 * 1024 * 1024, ge=1 << 20)
    max_batch_size: int = Field(8, ge=1)
    max_wait_ms: float = Field(2.0, ge=0)
    lookup_timeout_ms: float = Field(250.0, gt=0, description="A slower look-up counts as a miss.")
    threads: int = Field(1, ge=1)
    embeddings_port: int | None = Field(None, ge=1, le=65535, description="Serve the embedder over HTTP, for backends.")


class ResponsesSettings(Strict):
    """Answers of `/v1/responses` that are kept, with what was asked, so that clients can look them up and go on."""

    keep_days: int = Field(
        30, ge=0, le=3650, description="A conversation is kept so long after its last turn; 0: nothing is kept."
    )
    max_bytes: int = Field(
        4 * 1024**3, ge=1 << 20, description="Of all conversations; those that have rested longest go first."
    )


class IdempotencySettings(Strict):
    """Answers kept for requests that are sent again with their `Idempotency-Key`: in each process, and in Redis where
    `storage.redis_url` names one, with the same bounds there for all processes together."""

    ttl_seconds: float = Field(86_400, gt=0, description="How long an answer can be given again.")
    max_entries: int = Field(100_000, ge=1, description="The oldest answers go first.")
    max_bytes: int = Field(
        128 * 1024 * 1024, ge=1 << 20, description="Likewise; an answer larger than an eighth of it is not kept."
    )
    finish_seconds: float = Field(
        120.0, ge=0, description="How long a request with a key runs on when its client has left."
    )


class TelemetrySettings(Strict):
    service_name: str = "tierline"
    otlp_endpoint: str | None = Field(None, description="Base URL of an OTLP/HTTP collector; default: no export.")
    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    legacy_token_metric: bool = Field(False, description="Also emit the older gen_ai token counter.")


class FailoverSettings(Strict):
    """Bounds of one request, over all its candidates, attempts and waits."""

    max_attempts: int = Field(6, ge=1, le=100)
    total_s: float = Field(900.0, gt=0, description="From the first attempt to the end of the answer.")


class AdminSettings(Strict):
    """The admin API, `/admin/v1/…`, which has keys of its own."""

    enabled: bool | None = Field(None, description="Default: only where it listens on a loopback address.")
    listen: str | None = Field(
        None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+):[0-9]{1,5}$",
        description="HOST:PORT of its own; default: beside the models, on server.port.",
    )

    def address(self) -> tuple[str, int] | None:
        """The host and port of `listen`."""
        if self.listen is None:
            return None
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class LimitSettings(Strict):
    """Ceilings of a key that sets none of its own; a policy's limits apply as well."""

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    parallel: int | None = Field(None, ge=1)


class WhenRedisIsDown(Strict):
    """What a gateway does with limits that it shares through Redis while Redis is away.

    `local_share`: go on with its part of each limit, and of what was left of each budget. `refuse`: refuse requests
    that have such a limit.
    """

    rates: Literal["local_share", "refuse"] = "local_share"
    budgets: Literal["local_share", "refuse"] = "local_share"


class ConcurrencySettings(Strict):
    """What happens to requests that only running ones keep out, and while the shared limits cannot be reached."""

    max_concurrency: int | None = Field(None, ge=1, description="Requests at once per gateway process.")
    max_queued: int = Field(
        256, ge=0, description="Requests per process that may wait for a place, their key's `parallel` included."
    )
    queue_timeout_s: float = Field(10.0, gt=0, description="How long one of them waits.")
    when_redis_is_down: WhenRedisIsDown = WhenRedisIsDown()


class Settings(Strict):
    """The whole file."""

    version: Literal[1] = 1
    server: ServerSettings = ServerSettings()
    storage: StorageSettings = StorageSettings()
    policies_dir: Path = Path("policies")
    models: dict[str, ModelSettings] = {}
    backends: dict[str, BackendSettings] = {}
    engines: dict[str, EngineSettings] = {}
    failover: FailoverSettings = FailoverSettings()
    cache: CacheSettings = CacheSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    responses: ResponsesSettings = ResponsesSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    admin: AdminSettings = AdminSettings()
    default_limits: LimitSettings = LimitSettings()
    limits: ConcurrencySettings = ConcurrencySettings()
    hold_ttl_seconds: float = Field(900.0, gt=0, description="A hold nobody settled is reclaimed after this long.")

    def admin_enabled(self) -> bool:
        """Whether there is an admin API: as it is said, else where nobody but this machine can reach it."""
        if self.admin.enabled is not None:
            return self.admin.enabled
        host, _ = self.admin.address() or (self.server.host, 0)
        return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)

    def tier_models(self, tier: str) -> list[str]:
        """Names of the models of a tier, in the order of the file."""
        return [name for name, model in self.models.items() if model.tier == tier]

    def abilities(self, name: str) -> frozenset[str]:
        """What model `name` can do: its capabilities, and what its backend brings along."""
        model = self.models[name]
        backend = self.backends[model.backend]
        if backend.dialect == "anthropic":
            return model.capabilities | {"anthropic"}
        if backend.engine is not None:
            return model.capabilities | {"prefill"}
        return model.capabilities

    def tiers_served(self) -> list[str]:
        """Tiers that have at least one model, smallest first."""
        return [tier for tier in TIERS if self.tier_models(tier)]

    def database_url(self) -> str:
        return self.storage.database_url or f"sqlite+aiosqlite:///{self.storage.data_dir}/tierline.db"

    def base_urls(self, backend: str) -> tuple[str, ...]:
        """Addresses of a backend's replicas, each ending in `/v1`."""
        settings = self.backends[backend]
        if settings.engine:
            engine = self.engines[settings.engine]
            return (f"http://{engine.host}:{engine.port}/v1",)
        if settings.embedder:
            return (f"http://127.0.0.1:{self.cache.embeddings_port}/v1",)
        return tuple(url.rstrip("/") for url in settings.base_urls)

    def run_path(self, name: str) -> Path:
        """A file of the running system, such as a socket: `data_dir/run/NAME`."""
        return self.storage.data_dir / "run" / name


def load(path: Path | None = None) -> Settings:
    """Read `tierline.yaml` (or `$TIERLINE_CONFIG`) and make its paths absolute.

    Raises:
        InvalidFile: one problem per fault, each with file, line and column.
    """
    source = path or Path(os.environ.get("TIERLINE_CONFIG", "tierline.yaml"))
    settings, document = yamlfile.load(source, Settings)
    return resolve(settings, document, source.resolve().parent)


def resolve(settings: Settings, document: Document, root: Path) -> Settings:
    """Make paths absolute against `root` and check what only the whole file can tell.

    Raises:
        InvalidFile: every name that points nowhere and every clash, each with its position.
    """
    problems = list(conflicts(settings, document))
    if problems:
        raise InvalidFile(sorted(problems, key=lambda problem: (problem.line, problem.column)))
    storage = settings.storage.model_copy(update={"data_dir": root / settings.storage.data_dir})
    return settings.model_copy(update={"storage": storage, "policies_dir": root / settings.policies_dir})


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
