"""Which processes `tierline up` runs, with which arguments: from `tierline.yaml` to command lines.

    stage 0   engines and the cache, side by side
    stage 1   the gateway, or all its workers, once they answer

The engine and the cache are other programs to the gateway: they are named here by module, never imported.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from gateway import workers
from gateway.child import Probe, ProcessSpec, http_probe, http_socket_probe, socket_probe
from gateway.policy_news import PolicyNews
from gateway.settings import Settings
from gateway.settings.placing import Role
from policies.yamlread import Location

# A Unix socket's path must fit into sockaddr_un.sun_path, its final zero included.
_SOCKET_PATH_BYTES = 107
# How long engines and the cache may take to finish; the gateway's times are in `server`.
_DRAIN_S = 10.0
_KILL_AFTER_DRAIN_S = 5.0

# Waiting threads sleep instead of spinning: with as many threads as cores, spinning starves the gateway.
_PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


class CannotStart(Exception):
    """The configuration cannot run on this machine as it is; the message says what to change.

    `key` is the path of the setting to blame, where it is one.
    """

    def __init__(self, message: str, key: Location | None = None) -> None:
        super().__init__(message)
        self.key = key


def process_specs(
    settings: Settings,
    config: Path,
    model_paths: Mapping[str, Path],
    draft_paths: Mapping[str, Path] = MappingProxyType({}),
) -> list[ProcessSpec]:
    """The processes of one `tierline up`. `model_paths` gives each autostarted engine its weights, `draft_paths` those
    of its draft model where it has one.

    Raises:
        CannotStart: an engine is asked for under two names, or a path is too long for a socket.
    """
    # One for all engines, so that the pages of those that serve the same model can be compared.
    page_seed = secrets.token_hex(32)
    specs = [
        engine_spec(settings, name, model_paths[name], page_seed, draft_paths.get(name), base=config.parent)
        for name in autostarted(settings)
    ]
    if settings.cache.enabled:
        specs.append(cache_spec(settings))
    return [*specs, *gateway_specs(settings, config)]


def autostarted(settings: Settings) -> list[str]:
    """Names of the engines that `tierline up` starts."""
    return [name for name, engine in settings.engines.items() if engine.autostart]


def engine_process(name: str) -> str:
    """What the process of an engine is called: in the log's name, in events and in the state file."""
    return f"engine-{name}"


def engine_spec(
    settings: Settings, name: str, model: Path, page_seed: str, draft: Path | None = None, *, base: Path
) -> ProcessSpec:
    """`base`: where relative paths of the file begin."""
    engine = settings.engines[name]
    repeated = [("--lora", f"{adapter}={base / folder}") for adapter, folder in engine.lora.items()]
    repeated += [("--kv-peer", address) for address in _peers(settings, name)]
    threads = engine.threads or default_threads(available_cores())
    options: dict[str, object] = {
        "--model": model,
        "--served-name": served_name(settings, name),
        "--host": engine.host,
        "--port": engine.port,
        "--threads": threads,
        "--tensor-parallel": engine.tensor_parallel,
        "--pipeline-parallel": engine.pipeline_parallel,
        "--max-model-len": engine.max_model_len,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--kv-cache-bytes": engine.kv_cache_bytes,
        "--kv-host-bytes": engine.kv_host_bytes,
        "--kv-host-dir": None if engine.kv_host_dir is None else base / engine.kv_host_dir,
        "--kv-redis-bytes": engine.kv_redis_bytes,
        "--kv-redis-ttl-seconds": engine.kv_redis_ttl_seconds,
        **_role_options(settings, name),
        "--precision": engine.precision,
        "--kv-dtype": engine.kv_dtype,
        "--trace": None if engine.trace is None else base / engine.trace,
        "--task": engine.task,
        "--max-batch-size": engine.max_batch_size,
        "--max-wait-ms": engine.max_wait_ms,
        "--target-tpot-ms": engine.target_tpot_ms,
        "--speculative": engine.speculative,
        "--num-speculative-tokens": engine.num_speculative_tokens,
        "--draft-model": draft,
        "--tool-parser": engine.tool_parser,
        "--reasoning-parser": engine.reasoning_parser,
        "--lora-dir": None if engine.lora_dir is None else base / engine.lora_dir,
        "--max-loras": engine.max_loras,
        "--max-lora-rank": engine.max_lora_rank,
        "--temperature": engine.sampling.temperature,
        "--top-p": engine.sampling.top_p,
        "--data-dir": settings.storage.data_dir,
    }
    flags = {"--no-graphs": not engine.graphs, "--deterministic": engine.deterministic, "--overlap": engine.overlap}
    # What counts where a request says nothing stands in tierline.yaml, and the answer cache goes by that.
    switches = [*(flag for flag, is_set in flags.items() if is_set), "--no-recommended-sampling"]
    return ProcessSpec(
        name=engine_process(name),
        argv=(*_module("engine", options), *(part for pair in repeated for part in pair), *switches),
        ready=http_probe(_reachable(engine.host), engine.port, "/health"),
        env=_unless_set({**_PASSIVE_THREADS, "OMP_NUM_THREADS": str(threads), "TIERLINE_PAGE_SEED": page_seed}),
        stop_timeout_s=_DRAIN_S + _KILL_AFTER_DRAIN_S,
        address=f"{engine.host}:{engine.port}",
    )


def _role_options(settings: Settings, name: str) -> dict[str, object]:
    engine = settings.engines[name]
    role = role_of(settings, name)
    listens = engine.kv_listen is not None or role == "prefill"
    return {
        "--role": role,
        "--kv-listen": engine.kv_listen or (_offered_at(settings, name) if role == "prefill" else None),
        "--kv-address": engine.kv_address,
        "--kv-outbox-bytes": engine.kv_outbox_bytes if listens else None,
    }


def role_of(settings: Settings, engine: str) -> Role:
    """What an engine does for the backends that name it.

    Raises:
        CannotStart: they say different things.
    """
    roles = {backend.roles[engine] for backend in settings.backends.values() if engine in backend.roles}
    if len(roles) > 1:
        raise CannotStart(f"engine '{engine}' has several roles ({', '.join(sorted(roles))}): give it one.")
    return roles.pop() if roles else "both"


def _peers(settings: Settings, name: str) -> list[str]:
    """Where an engine may fetch pages: of the prefilling engines beside it, and as its settings say."""
    found = []
    if role_of(settings, name) == "decode":
        for backend in settings.backends.values():
            beside = [other for other, role in backend.roles.items() if role == "prefill"]
            found += [_offered_at(settings, other) for other in beside if name in backend.roles]
    return list(dict.fromkeys((*found, *settings.engines[name].kv_peers)))


def _offered_at(settings: Settings, name: str) -> str:
    """The address at which others fetch a prefilling engine's pages."""
    engine = settings.engines[name]
    return engine.kv_address or engine.kv_listen or f"shm://{settings.run_path(f'{name}.pages').resolve()}"


def cache_spec(settings: Settings) -> ProcessSpec:
    cache = settings.cache
    check_sockets(settings)
    if cache.encryption_key_env is not None and not os.environ.get(cache.encryption_key_env):
        raise CannotStart(
            f"cache.encryption_key_env names {cache.encryption_key_env}, which is not set: "
            "give it base64 of 32 random bytes (openssl rand -base64 32)."
        )
    path = settings.run_path("cache.sock")
    options: dict[str, object] = {
        "--socket": path,
        "--embedder": cache.embedder,
        "--embedder-backend": cache.embedder_backend,
        "--embedders-dir": settings.storage.data_dir / "embedders",
        "--max-entries": cache.max_entries,
        "--max-bytes": cache.max_bytes,
        "--max-disk-bytes": cache.max_disk_bytes,
        "--encryption-key-env": cache.encryption_key_env,
        "--max-batch-size": cache.max_batch_size,
        "--max-wait-ms": cache.max_wait_ms,
        "--load-wait-ms": cache.load_wait_ms,
        "--threads": cache.threads,
        "--data-dir": settings.storage.data_dir,
        "--embeddings-port": cache.embeddings_port,
        "--redis-max-bytes": cache.redis_max_bytes,
    }
    env = _unless_set({**_PASSIVE_THREADS, "OMP_NUM_THREADS": str(cache.threads)})
    if settings.storage.redis_url is not None:
        env["TIERLINE_CACHE_REDIS_URL"] = settings.storage.redis_url
    return ProcessSpec(
        name="cache",
        argv=_module("cache", options),
        ready=socket_probe(path),
        env=env,
        stop_timeout_s=_DRAIN_S + _KILL_AFTER_DRAIN_S,
        essential=False,  # without it every look-up is a miss, and the gateway serves on
        address=str(path),
    )


def gateway_specs(settings: Settings, config: Path) -> list[ProcessSpec]:
    """One gateway, or several that share the port; each of several is asked on a socket of its own."""
    check_sockets(settings)
    server = settings.server
    news = PolicyNews()  # one for all: they watch the same folder
    if server.workers == 1:
        probe = http_probe(_reachable(server.host), server.port, "/health/ready")
        return [_gateway_spec(settings, config, 1, probe, news)]
    specs = []
    for worker in range(1, server.workers + 1):
        path = workers.socket_path(settings, worker)
        specs.append(_gateway_spec(settings, config, worker, http_socket_probe(path, "/health/ready"), news))
    return specs


def _gateway_spec(settings: Settings, config: Path, worker: int, ready: Probe, news: PolicyNews) -> ProcessSpec:
    server = settings.server
    return ProcessSpec(
        name=workers.name(settings, worker),
        argv=_module("gateway", {"--config": config, "--worker": worker if server.workers > 1 else None}),
        ready=ready,
        stage=1,
        stop_timeout_s=server.shutdown_delay_seconds + server.drain_seconds + _KILL_AFTER_DRAIN_S,
        address=f"{server.host}:{server.port}",
        notable=news,
    )


def check_plan(settings: Settings) -> None:
    """What `process_specs` would refuse, said before any model is pulled.

    Raises:
        CannotStart: as `process_specs`; or there is no folder of policies, which the file need not name.
    """
    if not settings.policies_dir.is_dir():
        raise CannotStart(
            f"the folder of policies, {settings.policies_dir}, is not there: make it, or set policies_dir."
        )
    check_sockets(settings)
    for name in autostarted(settings):
        served_name(settings, name)
        role_of(settings, name)


def check_sockets(settings: Settings) -> None:
    """Refuse a data folder whose path leaves no room for the sockets in it.

    Raises:
        CannotStart: names the path, its length and the most.
    """
    paths = [settings.run_path("cache.sock")] if settings.cache.enabled else []
    paths += [
        settings.run_path(f"{name}.pages").resolve()
        for name in autostarted(settings)
        if role_of(settings, name) == "prefill" and settings.engines[name].kv_listen is None
    ]
    if settings.server.workers > 1:
        paths.append(workers.socket_path(settings, settings.server.workers))  # the last has the longest name
    for path in paths:
        if (length := len(os.fsencode(path))) > _SOCKET_PATH_BYTES:
            raise CannotStart(
                f"{path} is too long for a Unix socket ({length} bytes, at most {_SOCKET_PATH_BYTES}): "
                "give storage.data_dir a shorter path."
            )


def served_name(settings: Settings, engine: str) -> str:
    """The model name under which the gateway will ask this engine, its adapters' names apart.

    Raises:
        CannotStart: two models ask for it under different names.
    """
    adapters = settings.engines[engine].lora
    names = {
        model.upstream_model or name
        for name, model in settings.models.items()
        if engine in settings.backends[model.backend].engines and (model.upstream_model or name) not in adapters
    }
    if len(names) > 1:
        listed = ", ".join(sorted(names))
        raise CannotStart(
            f"engine '{engine}' would serve under several names ({listed}): give them one upstream_model, "
            f"or name its adapters under engines.{engine}.lora."
        )
    return names.pop() if names else engine


def default_threads(cores: int) -> int:
    """Threads of an engine that sets none: all cores up to two, beyond that all but the one the gateway needs."""
    return cores if cores <= 2 else min(cores - 1, 32)


def available_cores() -> int:
    """Cores that this process may use: its affinity, further limited by a container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: no quota that could be read
    return max(1, cores)


def listening_url(host: str, port: int) -> str:
    """The address to give to a person: a wildcard host is reached through the loopback one."""
    host = _reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def _module(module: str, options: Mapping[str, object]) -> tuple[str, ...]:
    pairs = [(name, str(value)) for name, value in options.items() if value is not None]
    return (sys.executable, "-m", module, *(part for pair in pairs for part in pair))


def _unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in os.environ}
