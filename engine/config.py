"""What an engine is started with: parsed by the HTTP process, handed to the core process as JSON."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from engine.limits import NUM_DRAFTS, MicroBatching

Precision = Literal["auto", "float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
KvDtype = Literal["auto", "fp8"]
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
Speculative = Literal["off", "ngram", "draft", "eagle3"]
SPECULATIVE: tuple[Speculative, ...] = get_args(Speculative)
AskedTask = Literal["auto", "generate", "embed", "score"]  # auto: what the model is made for
TASKS: tuple[AskedTask, ...] = get_args(AskedTask)
Role = Literal["both", "prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
_BATCHING = MicroBatching()


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that the core is to load under `adapter_id`, a number above 0 that no other one had or will have."""

    adapter_id: int
    path: str
    bounded: bool = False  # it must lie below `EngineConfig.lora_dir`
    digest: str = ""  # of its content, where it was loaded before: another one is refused
    replaces: int = 0  # the one whose place it takes, which goes when it serves; 0: of none


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine. None means: chosen by the engine from the model and the machine."""

    model_path: str
    served_name: str
    precision: Precision = "auto"
    device: str | None = None
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 256
    kv_cache_bytes: int | None = None
    block_size: int | None = None
    kv_dtype: KvDtype = "auto"  # of keys and values; auto: as activations
    prefix_cache: bool = True
    kv_host_bytes: int | None = None  # of a second pool for evicted pages; None: there is none
    kv_host_dir: str | None = None  # where it lies; None: in memory
    kv_redis_bytes: int = 4 << 30  # of pages of this model in the Redis that `transfer.address` knows
    kv_redis_ttl_seconds: int = 3600  # since the last use of a page there
    role: Role = "both"  # prefill: computes prompts for others; decode: others compute prompts for it
    kv_listen: str | None = None  # where it offers its pages to other engines, as `transfer.peer_address` reads it
    kv_address: str | None = None  # under which others reach that; None: as it listens
    kv_outbox_bytes: int = 1 << 30  # of pages that it offers
    kv_peers: tuple[str, ...] = ()  # engines whose pages it may fetch
    speculative: Speculative = "off"
    num_speculative_tokens: int = NUM_DRAFTS
    draft_model_path: str | None = None  # with `speculative` "draft" or "eagle3", and only then
    max_loras: int = 0  # adapters at a time; 0: none, and nothing is kept ready for them
    max_lora_rank: int = 64
    lora_dir: str | None = None  # below it lie those that may be loaded while the engine runs; None: none may
    adapters: tuple[AdapterEntry, ...] = ()  # to be loaded at start
    task: AskedTask = "auto"
    max_batch_size: int = _BATCHING.max_batch_size
    max_wait_ms: float = _BATCHING.max_wait_ms
    reload_dir: str | None = None  # where other weights may come from while the engine runs
    target_tpot_ms: float | None = None  # time per output token that steps are kept short for; None: no matter
    graphs: bool = True  # on a GPU, record steps before the first request
    tensor_parallel: int = 1  # processes that share each block
    pipeline_parallel: int = 1  # stages that the blocks are divided into, each of so many processes
    deterministic: bool = False  # on a GPU, a request's attention does not depend on what runs beside it
    overlap: bool = False  # begin each step while the device works on the one before it
    trace_path: str | None = None  # where the time of each step is written to

    @property
    def most_adapters(self) -> int:
        """Adapters in memory at a time: when one takes the place of another, both are there for a while."""
        return self.max_loras + (self.lora_dir is not None)
