"""Loads a model for serving: which numbers, how many pages, which part of it, and what is tried before it is ready."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.graphs import CudaRecorder
from engine.kernels.jit_monitor import monitor as jit_monitor
from engine.layers import native
from engine.layers.attention import AttentionConfig
from engine.layers.device import build_attention, build_ops
from engine.loader import OpenModel, open_model
from engine.loader.errors import ModelFileError
from engine.loader.progress import reported
from engine.loader.source import ModelTensors
from engine.memory import (
    Demand,
    DraftDemand,
    choose_num_blocks,
    kv_bytes_per_token,
)
from engine.models.decoder import Decoder
from engine.models.pooling import PoolingSpec
from engine.parallel.decoder import PartDecoder
from engine.parallel.layout import part_of
from engine.parallel.peers import Peers
from engine.parallel.shards import PartTensors
from engine.pooler import Pooler
from engine.precision import choose_policy, free_bytes
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.text.tokenizer import end_ids
from engine.warm_up import rehearse, try_to_record, warm_up

if TYPE_CHECKING:
    from engine.sampling.on_device import DeviceSampling

logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16


def load_runner(
    model: OpenModel | Path | str,
    *,
    precision: str = "auto",
    threads: int | None = None,
    max_model_len: int | None = None,
    kv_cache_bytes: int | None = None,
    device: str | None = None,
    block_size: int | None = None,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 64,
    max_num_drafts: int = 0,
    draft: DraftDemand | None = None,
    pooling: PoolingSpec | None = None,
    adapter_values: int = 0,
    graphs: bool = True,
    deterministic: bool = False,
    kv_dtype: str = "auto",
    peers: Peers | None = None,
) -> ModelRunner:
    """Load a model, open already or the path of one, for serving.

    `precision`: "float32" is exact and reproduces transformers' greedy tokens; "bfloat16" rounds weights and
    activations; "auto" is the fastest that this machine does well (on a CPU: four-bit weights where the file has them
    for few rows, bfloat16 for many). `max_model_len` None: the model's own. `kv_cache_bytes` None: by the memory free.
    `device` None: "cuda" where there is one, else "cpu". `threads`: what `engine.threads.configure` returned.
    `max_num_drafts`: in one step. `draft`: what makes them; it will be loaded next, with as many pages.
    `pooling`: make vectors of texts, or scores, in place of answers. `adapter_values`: numbers in all adapters that
    will be there at a time, `engine.adapters.targets.adapter_values`; 0: none will. `graphs`: on a GPU, record
    steps. `deterministic`: on a GPU, attention and packed products that give a row the same result whatever runs beside
    it. `kv_dtype`: of keys and values, "auto" for that of the activations or, on a GPU, "fp8" for half of that.
    `peers`: load this rank's part, as each of them does; the others then follow what rank 0 announces.

    Raises ModelFileError (the file, or what it makes of a first text is not finite), EngineMemoryError (it does not
    fit), ValueError (a parameter out of range), LayoutError (it cannot be divided so).
    """
    if not isinstance(model, OpenModel):
        model = open_model(model)
    source: ModelTensors = model.tensors()
    part = None if peers is None else part_of(source.spec, peers.place)
    if part is not None:
        source = PartTensors(source, part)
    spec = source.spec
    max_model_len = spec.max_position if max_model_len is None else max_model_len
    if not 1 <= max_model_len <= spec.max_position:
        raise ValueError(
            f"max_model_len {max_model_len} is outside 1 to {spec.max_position}, the model's context length"
        )
    if max_num_batched_tokens < 1 or max_num_seqs < 1:
        raise ValueError("max_num_batched_tokens and max_num_seqs must be at least 1")
    if threads is not None:
        torch.set_num_threads(threads)
        native.set_threads(threads)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    block_size = block_size or DEFAULT_BLOCK_SIZE
    demand = Demand(
        spec,
        list(source.matrices(output=pooling is None)),
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs + max_num_drafts,  # each draft has logits of its own
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_bytes=kv_cache_bytes,
        adapter_values=adapter_values,
        kv_fp8=kv_dtype == "fp8",
        vocabulary=None if part is None else part.table_rows,
        ranks=1 if part is None or target.type == "cuda" else part.place.layout.num_ranks,
    )
    policy, plan = choose_policy(precision, target, demand)
    policy = replace(policy, deterministic=deterministic)
    draft_bytes = 0 if draft is None else draft.num_parameters * policy.dtype.itemsize
    element_bytes = policy.dtype.itemsize
    num_blocks = choose_num_blocks(
        bytes_per_token=kv_bytes_per_token(spec, element_bytes, fp8=demand.kv_fp8)
        + (0 if draft is None else draft.values_per_token * element_bytes),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        budget_bytes=kv_cache_bytes,
        free_bytes=max(0, free_bytes(target) // demand.ranks - plan.without_kv_bytes - draft_bytes),
        on_gpu=target.type == "cuda",
    )
    if peers is not None:  # all have as many pages, and all have asked for free memory before one takes any
        num_blocks = peers.least(num_blocks)
    config = AttentionConfig(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.score_scale,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=policy.dtype,
        device=target,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_blocks_per_seq=-(-max_model_len // block_size),
        windows=tuple(layer.window for layer in spec.layers),
        softcap=spec.attention_softcap,
        sinks=spec.sinks,
        fp8=demand.kv_fp8,
    )
    attention = build_attention(config, deterministic=deterministic)
    ops = build_ops(target)
    with reported(source, model.path.name) as counted:
        build = Decoder if part is None or peers is None else partial(PartDecoder, part=part, peers=peers)
        decoder = build(counted, policy, attention, ops, max_position=max_model_len, output=pooling is None)
    head = source.score(pooling.labels) if pooling is not None and pooling.labels else None
    runner = ModelRunner(
        decoder,
        attention,
        Sampler(end_ids(model.info.tokenizer), _sampling_on(target, max_num_seqs, spec.vocab_size)),
        max_model_len=max_model_len,
        precision=precision,
        max_num_drafts=max_num_drafts,
        pooler=None if pooling is None else Pooler(head, target),
        adapter_bytes=plan.adapter_bytes,
        peers=peers,
    )
    if peers is not None and not peers.place.leads:
        return runner
    if (fault := warm_up(runner)) is not None:
        raise ModelFileError(model.path, fault, "Its weights are damaged, or too large for this --precision")
    if target.type == "cuda":
        rehearse(runner)
        if graphs and pooling is None and peers is None:  # ranks are told of every step
            try_to_record(runner, CudaRecorder(target))
    jit_monitor.mark_warm()
    logger.info("loaded %s: %s", model.path, runner.describe())
    return runner


def _sampling_on(device: torch.device, texts: int, vocab: int) -> DeviceSampling | None:
    if device.type != "cuda":
        return None
    from engine.sampling.on_device import DeviceSampling

    return DeviceSampling(texts, vocab, device)
