"""From an engine's settings to its runner: the one place that knows which setting is which argument of `load_runner`.

Every rank of a model that is held in parts calls this, so that all of them are built from the same settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.adapters.targets import adapter_values
from engine.config import EngineConfig
from engine.load_runner import load_runner
from engine.loader import OpenModel
from engine.models.pooling import choose_task
from engine.runner import ModelRunner
from engine.spec.loading import demand_of
from engine.spec.speculator import MOST_DRAFTS

if TYPE_CHECKING:
    from engine.loader.eagle3 import HeadFiles
    from engine.parallel.peers import Peers


def open_runner(
    config: EngineConfig,
    model: OpenModel,
    *,
    threads: int,
    draft: OpenModel | HeadFiles | None = None,
    peers: Peers | None = None,
) -> ModelRunner:
    """The runner of `model`, or of this rank's part of it. `threads`: what `engine.threads.configure` returned;
    `draft`: what drafts for it, which will be loaded next. Raises as `load_runner`."""
    return load_runner(
        model,
        precision=config.precision,
        threads=threads,
        max_model_len=config.max_model_len,
        kv_cache_bytes=config.kv_cache_bytes,
        device=config.device if peers is None else str(peers.device),
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_drafts=0 if config.speculative == "off" else MOST_DRAFTS,
        draft=None if draft is None else demand_of(draft),
        pooling=choose_task(config.task, model.info.pooling),
        adapter_values=config.most_adapters * adapter_values(model.spec, config.max_lora_rank),
        graphs=config.graphs,
        deterministic=config.deterministic,
        kv_dtype=config.kv_dtype,
        peers=peers,
    )
