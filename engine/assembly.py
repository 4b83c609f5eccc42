"""From settings to the parts of a core without weights: the scheduler with its cache, and the tiers behind that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from engine.adapters.store import LoadedAdapter
from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.kv.page_seed import page_seed
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.models.pooling import PoolingSpec
from engine.scheduling.scheduler import Scheduler
from engine.spec.speculator import Speculator
from engine.transfer.address import redis_url
from engine.transfer.courier import Tier
from engine.transfer.format import PageFormat
from engine.transfer.host_store import HostStore
from engine.transfer.page_memory import PageMemory
from engine.transfer.page_server import PageServer
from engine.transfer.peer_address import PeerAddress
from engine.transfer.peer_store import PeerStore
from engine.transfer.tiers import Tiers
from engine.types import Runner


def build_scheduler(
    config: EngineConfig,
    runner: Runner,
    digest: bytes,
    end_token_ids: frozenset[int],
    speculator: Speculator | None = None,
    pooling: PoolingSpec | None = None,
    adapters: Mapping[int, LoadedAdapter] = MappingProxyType({}),
) -> Scheduler:
    """The scheduler that fits the runner's cache geometry and context length. `pooling`, `adapters`: see `Roster`."""
    geometry = runner.geometry
    cache = PrefixCache(
        BlockPool(geometry.num_blocks),
        geometry.block_size,
        model_digest=digest,
        kv_dtype=f"{config.precision} {config.kv_dtype}",
        enabled=config.prefix_cache,
        seed=page_seed(),
    )
    bounds = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        max_model_len=runner.max_model_len,
        target_tpot_seconds=None if config.target_tpot_ms is None else config.target_tpot_ms / 1000,
    )
    return Scheduler(
        bounds, cache, eos_token_ids=end_token_ids, speculator=speculator, pooling=pooling, adapters=adapters
    )


def build_tiers(
    config: EngineConfig, cache: PrefixCache, memory: PageMemory, digest: bytes, *, on_gpu: bool
) -> Tiers | None:
    """Where pages go beyond the cache; None where the settings name no such place.

    Raises:
        ValueError: a setting makes no sense, or there is no room for what it says.
    """
    url = redis_url()
    if url is None and config.kv_host_bytes is None and config.kv_listen is None and not config.kv_peers:
        return None
    page_format = PageFormat(
        model_digest=digest, layout=memory.layout, page_bytes=memory.page_bytes, secret=cache.secret(b"kv pages")
    )
    host = shared = None
    if config.kv_host_bytes is not None:
        if config.kv_host_dir is None and not on_gpu:
            raise ValueError(
                "kv_host_bytes is for pages of a GPU: on a CPU they are in main memory already. "
                "Give kv_host_dir, a folder on a fast disk, or a larger kv_cache_bytes"
            )
        folder = None if config.kv_host_dir is None else Path(config.kv_host_dir)
        host = Tier(HostStore(config.kv_host_bytes, page_format.value_bytes, folder), page_format)
    if url is not None:
        from engine.transfer.redis_store import RedisStore

        store = RedisStore(
            url,
            space=page_format.space,
            value_bytes=page_format.value_bytes,
            capacity_bytes=config.kv_redis_bytes,
            ttl_s=config.kv_redis_ttl_seconds,
        )
        shared = Tier(store, page_format)
    secret, server = cache.secret(b"kv transfer"), None
    peers = {
        address: Tier(
            PeerStore(
                PeerAddress.parse(address), space=page_format.space, secret=secret, value_bytes=page_format.value_bytes
            ),
            page_format,
        )
        for address in config.kv_peers
    }
    if config.kv_listen is not None:
        listen = PeerAddress.parse(config.kv_listen)
        server = PageServer(listen, config.kv_outbox_bytes, page_format, secret, config.kv_address)
    return Tiers(cache, memory, host=host, shared=shared, peers=peers, server=server, max_waiting=config.max_waiting)
