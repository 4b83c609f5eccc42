"""The engine's memory as arithmetic: what weights and KV cache take, and how many pages a budget buys.

Formulas only, no torch: `tierline models plan` uses them without loading a model, and the runner for what it reports.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from engine.models.spec import ModelSpec

# Share of the memory free after loading that the KV cache may take when no budget is given.
_CPU_SHARE = 0.25
_GPU_SHARE = 0.90


class EngineMemoryError(Exception):
    """The model does not fit. The message gives the bytes needed and available, and what to change."""


def kv_bytes_per_token(spec: ModelSpec, element_bytes: int) -> int:
    """K and V of one token in all layers: `2 * layers * kv_heads * head_dim * element_bytes`.

    Grouped-query attention enters by `kv_heads`, the key-value heads, not the query heads.
    """
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element_bytes


def weight_bytes(spec: ModelSpec, bits_per_weight: float) -> int:
    """All weights at an average width, e.g. 16 for bfloat16, 5 for Q4_1 (four bits and 32 shared ones per 32)."""
    return int(spec.num_parameters * bits_per_weight / 8)


def scratch_bytes(spec: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, element_bytes: int) -> int:
    """An upper bound on one step's activations: the widest block's inputs and outputs, and the float32 logits.

    The logits count three times: the sampler may hold an adjusted copy and a probability.
    """
    widest = 2 * spec.hidden_size + 3 * spec.intermediate_size + 2 * (spec.q_size + 2 * spec.kv_size)
    return max_num_batched_tokens * widest * element_bytes + 3 * max_num_seqs * spec.vocab_size * 4


def available_bytes() -> int:
    """Main memory this process can still take: the least of what the machine and the cgroup have left."""
    available = psutil.virtual_memory().available
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit_path, encoding="ascii") as limit, open(used_path, encoding="ascii") as used:
                return max(0, min(available, int(limit.read()) - int(used.read())))
        except (OSError, ValueError):  # no such cgroup version, or its limit is the word "max"
            continue
    return available


def choose_num_blocks(
    *,
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    budget_bytes: int | None,
    free_bytes: int,
    on_gpu: bool,
) -> int:
    """Pages of the KV cache, the null page included.

    With `budget_bytes`, what it buys; otherwise a share of `free_bytes`, but no more than `max_num_seqs` sequences of
    `max_model_len` can fill. Raises EngineMemoryError when not even one sequence of `max_model_len` fits.
    """
    block_bytes = bytes_per_token * block_size
    per_sequence = -(-max_model_len // block_size)
    share = int(free_bytes * (_GPU_SHARE if on_gpu else _CPU_SHARE))
    budget = share if budget_bytes is None else budget_bytes
    blocks = budget // block_bytes
    if budget_bytes is None:
        blocks = min(blocks, per_sequence * max_num_seqs + 1)
    if blocks < per_sequence + 1:
        needed = (per_sequence + 1) * block_bytes
        raise EngineMemoryError(
            f"one sequence of {max_model_len} tokens needs a KV cache of {needed:,} bytes, {budget:,} are to be had: "
            f"lower max_model_len (to {max(0, blocks - 1) * block_size} at most) or raise kv_cache_bytes"
        )
    return blocks


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """What an engine holds, in bytes, and the sizes it follows from."""

    weights_bytes: int
    kv_cache_bytes: int
    scratch_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.scratch_bytes

    def as_dict(self) -> dict[str, int]:
        return {
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "scratch_bytes": self.scratch_bytes,
            "total_bytes": self.total_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_capacity_tokens": self.kv_capacity_tokens,
        }
