"""The attention interface: what the decoder asks for, whatever device answers.

An `AttentionBackend` owns the paged KV cache and attends over it. The runner calls `begin` once per step with the
step's geometry, then the decoder calls `forward` once per layer. `build_attention` chooses the implementation by
device: `attention_triton.TritonAttention` on CUDA, `attention_cpu.CpuAttention` on a CPU. Both are constructed from
one `AttentionConfig` and must give the same numbers within their dtype's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """What an attention backend is built from. All sizes are fixed for its lifetime.

    `max_num_seqs`, `max_num_batched_tokens` and `max_blocks_per_seq` bound every step's rows, tokens and block-table
    width, so that a backend can allocate its scratch (and capture graphs) once.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # scores are `scale * q . k`, usually head_dim ** -0.5
    num_blocks: int  # page 0, the null page, included
    block_size: int
    dtype: torch.dtype  # of q, k, v and, without `fp8`, of the KV cache
    device: torch.device
    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int
    windows: tuple[int, ...] = ()  # per layer: a token sees itself and the `window - 1` before it, 0: all; (): all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: as they are
    sinks: bool = False  # whether `forward` is given sinks
    fp8: bool = False  # keys and values as eight-bit floats, each head of a token with a scale; q, k and v in `dtype`

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.num_blocks < 2:
            raise ValueError("the KV cache needs the null page and at least one more: num_blocks >= 2")

    def window(self, layer: int) -> int:
        """How many tokens back a token of this layer sees, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int, int]:
        """`[layers, 2 (K, V), num_blocks, block_size, kv_heads, head_dim]`."""
        return (self.num_layers, 2, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class StepGeometry:
    """Where one step's tokens sit. Host arrays: a backend uploads what it needs, once, in `begin`.

    The step's tokens are the rows' tokens laid end to end. Row `r` owns tokens
    `query_starts[r] .. query_starts[r + 1] - 1`; they sit at positions `seq_lens[r] - query_len .. seq_lens[r] - 1`
    of their sequence, so that every one of them sees itself and all before it. The first `num_decode_rows` rows have
    exactly one token each; the rows after those have any number (one included).
    """

    query_starts: IntArray  # [rows + 1]
    seq_lens: IntArray  # [rows], keys a row's last token sees, itself included
    block_tables: IntArray  # [rows, width], padded with 0, the null page; width is that of the longest row
    positions: LongArray  # [tokens]
    slots: LongArray  # [tokens], where K and V go: page * block_size + offset
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class AttentionBackend(Protocol):
    """Paged causal attention with grouped query heads. Not thread-safe: one step at a time."""

    config: AttentionConfig
    # `config.kv_shape`, or with `config.fp8` uint8 `[layers, 2, num_blocks, bytes]`, zeroed at start.
    # Pages outside a row's block table may hold anything, NaN included, and must not reach that row's result; so may
    # the unused tail of its last page.
    kv_cache: torch.Tensor

    def begin(self, step: StepGeometry) -> None:
        """Prepare for one step: upload the geometry, choose kernels and splits."""
        ...

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write K and V of this step's tokens to their pages, then attend causally over the pages.

        sinks: float32 `[heads]`, a score per head that takes part in every softmax and has no value (arXiv 2309.17453);
        given if `config.sinks`.

        q: `[tokens, heads, head_dim]`; k, v: `[tokens, kv_heads, head_dim]`; q and k already rotated. All three have
        `config.dtype`, unit stride in the last dimension, and may be strided views of one fused QKV projection.
        Returns `[tokens, heads, head_dim]`, contiguous, valid until the next `forward`.
        """
        ...
