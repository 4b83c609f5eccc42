"""The whole of `tierline.yaml`: all sections, what follows from several of them together, and how the file is read."""

from __future__ import annotations

import functools
import ipaddress
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from gateway.settings import surroundings
from gateway.settings.batches import BatchSettings
from gateway.settings.conflicts import conflicts
from gateway.settings.limits import ConcurrencySettings, LimitSettings
from gateway.settings.process import AdminSettings, ServerSettings, TelemetrySettings
from gateway.settings.routing import RoutingSettings
from gateway.settings.serving import BackendSettings, EngineSettings, FailoverSettings, ModelSettings
from gateway.settings.storage import CacheSettings, IdempotencySettings, ResponsesSettings, StorageSettings
from gateway.settings.strict import BackendName, EngineName, ModelName, Strict
from policies import yamlfile
from policies.yamlfile import Document, InvalidFile, Problem
from policies.yamlread import Location
from tiers import TIERS


class Settings(Strict):
    """The whole file."""

    version: Literal[1] = 1
    server: ServerSettings = ServerSettings()
    storage: StorageSettings = StorageSettings()
    policies_dir: Path = Path("policies")
    models: dict[ModelName, ModelSettings] = Field({})
    backends: dict[BackendName, BackendSettings] = Field({})
    engines: dict[EngineName, EngineSettings] = Field({})
    failover: FailoverSettings = FailoverSettings()
    cache: CacheSettings = CacheSettings()
    routing: RoutingSettings = RoutingSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    responses: ResponsesSettings = ResponsesSettings()
    batches: BatchSettings = BatchSettings()
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

    @functools.cached_property
    def tells_languages(self) -> bool:
        """Whether any model says which languages it knows."""
        return any(model.languages for model in self.models.values())

    def abilities(self, name: str) -> frozenset[str]:
        """What model `name` can do: its capabilities, and what its backend brings along."""
        model = self.models[name]
        backend = self.backends[model.backend]
        if backend.dialect == "anthropic":
            return model.capabilities | {"anthropic"}
        if backend.engines and not backend.urls:
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
            return (self.engine_url(settings.engine),)
        if settings.replicas:
            return tuple(
                self.engine_url(replica.engine) if replica.engine else (replica.url or "").rstrip("/")
                for replica in settings.replicas
            )
        if settings.embedder:
            return (f"http://127.0.0.1:{self.cache.embeddings_port}/v1",)
        return tuple(url.rstrip("/") for url in settings.base_urls)

    def engine_url(self, engine: str) -> str:
        """Where a bundled engine is reached."""
        settings = self.engines[engine]
        return f"http://{settings.host}:{settings.port}/v1"

    def run_path(self, name: str) -> Path:
        """A file of the running system, such as a socket: `data_dir/run/NAME`."""
        return self.storage.data_dir / "run" / name


def load(path: Path | None = None, *, here: bool = False) -> Settings:
    """Read `tierline.yaml` (or `$TIERLINE_CONFIG`) and make its paths absolute.

    With `here`, all of its processes are to run on this machine: the folder of policies and the embedding model must be
    there. Elsewhere each process has only what it needs itself.

    Raises:
        InvalidFile: one problem per fault, each with file, line and column.
    """
    source = path or Path(os.environ.get("TIERLINE_CONFIG", "tierline.yaml"))
    text = yamlfile.read(source)
    try:
        document = yamlfile.parse(text, str(source))
    except InvalidFile as error:
        raise surroundings.with_hint(error, text.split("\n")) from error
    if problems := surroundings.unexpanded(document):
        raise InvalidFile(_in_order(problems))
    settings, root = yamlfile.validate(document, Settings), source.resolve().parent
    if here and (problems := list(surroundings.missing(settings, document, root))):
        raise InvalidFile(_in_order([*conflicts(settings, document), *problems]))
    return resolve(settings, document, root)


def where(path: Path, key: Location) -> str:
    """`FILE:LINE:COLUMN: ` of a setting, to stand before a message; empty where the file does not name it."""
    document = yamlfile.parse(yamlfile.read(path), str(path))
    if key not in document.keys:
        return ""
    line, column = document.position(key)
    return f"{path}:{line}:{column}: "


def resolve(settings: Settings, document: Document, root: Path) -> Settings:
    """Make paths absolute against `root` and check what only the whole file can tell.

    Raises:
        InvalidFile: every name that points nowhere and every clash, each with its position.
    """
    problems = list(conflicts(settings, document))
    if problems:
        raise InvalidFile(_in_order(problems))
    storage = settings.storage.model_copy(update={"data_dir": root / settings.storage.data_dir})
    cache = settings.cache.model_copy(update={"embedder": surroundings.embedder(settings, root)})
    update = {"storage": storage, "cache": cache, "policies_dir": root / settings.policies_dir}
    return settings.model_copy(update=update)


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
