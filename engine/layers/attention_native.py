"""The compiled paged attention: K and V written to their slots, every token attended where the pages lie.

Used by `CpuAttention`; see `engine/kernels/cpu_attention.c` for the arithmetic. A token's result depends neither on
what else is in the step nor on how its prompt was cut into steps. It knows windows and sinks, but no capped scores.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from engine.layers import native
from engine.layers.attention import AttentionConfig, IntArray, LongArray, StepGeometry

_CHUNK = 128  # keys that are attended together, CHUNK in cpu_attention.c
# A row with more new tokens takes its chunks of keys for so many tokens at a time; one with fewer has each chunk of
# each token as an item of its own, so that there is something to share out to threads.
_TOKENS_APART = 4
_TOKENS_TOGETHER = 16
_MAX_HEAD_DIM = 256


class AttentionArguments(ctypes.Structure):
    """`attention_args` in cpu_kernels.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("token_rows", ctypes.c_void_p),
        ("token_first", ctypes.c_void_p),
        ("token_end", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("token_states", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("joins", ctypes.c_void_p),
        ("token_stride", ctypes.c_long),
        ("out_stride", ctypes.c_long),
        ("table_width", ctypes.c_long),
        ("block_size", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("head_dim", ctypes.c_long),
        ("num_items", ctypes.c_long),
        ("num_joins", ctypes.c_long),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step's tokens attend to under one window. The arrays live as long as their pointers are in use."""

    first: IntArray  # [tokens], the first key
    items: IntArray  # [items, 3], (token, 1, chunk) or (first token, tokens, -1), see cpu_kernels.h
    joins: IntArray  # [joins], tokens with several chunks, each an item
    states: LongArray  # [tokens], where the token's states begin
    num_states: int

    @classmethod
    def under(cls, window: int, starts: IntArray, ends: IntArray) -> _Work:
        """`starts`: the first token of each row, and their number; `ends`: of each token, the key after its last."""
        first = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        first_chunks = first // _CHUNK
        chunks = (ends - 1) // _CHUNK - first_chunks + 1
        together = np.repeat(np.diff(starts) > _TOKENS_APART, np.diff(starts))  # [tokens]
        blocks = [
            (token, min(_TOKENS_TOGETHER, stop - token), -1)
            for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            if stop - start > _TOKENS_APART
            for token in range(start, stop, _TOKENS_TOGETHER)
        ]
        blocks.sort(key=lambda block: -int(chunks[block[0] + block[1] - 1]))  # what takes longest begins first
        apart = np.flatnonzero(~together)
        owners = np.repeat(apart, chunks[apart])
        before = np.repeat(np.cumsum(chunks[apart]) - chunks[apart], chunks[apart])
        numbers = first_chunks[owners] + np.arange(len(owners)) - before
        singles = np.stack([owners, np.ones_like(owners), numbers], axis=1)
        items = np.concatenate([np.array(blocks, dtype=np.int32).reshape(-1, 3), singles.astype(np.int32)])
        held = np.where(chunks == 1, 0, np.where(together, 1, chunks))
        joins = apart[chunks[apart] > 1].astype(np.int32)
        return cls(first, items, joins, np.cumsum(held, dtype=np.int64) - held, int(held.sum()))


class NativeAttention:
    """Attends the tokens of a step and writes their K and V.

    `blocks_native` makes the same calls: `slots_pointer` and, for each layer, `layer_arguments`, which layers with the
    same window share, describe the step that `begin` has prepared; `layer_pointers` are the layer's K and V.
    """

    def __init__(self, library: ctypes.CDLL, config: AttentionConfig, kv_cache: torch.Tensor) -> None:
        self._attend, self._write = library.tl_paged_attention, library.tl_kv_write
        self._config = config
        windows = [config.window(layer) for layer in range(config.num_layers)]
        self._type = native.ELEMENT_TYPES[config.dtype]
        self._element_bytes = config.dtype.itemsize
        self._kv_bytes = config.num_kv_heads * config.head_dim * self._element_bytes
        self._cache = kv_cache  # kept alive: the pointers below are into it
        self.layer_pointers = [(kv_cache[i, 0].data_ptr(), kv_cache[i, 1].data_ptr()) for i in range(config.num_layers)]
        self._states = torch.empty(0, dtype=torch.float32)
        self._arguments = {
            window: AttentionArguments(
                block_size=config.block_size,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.scale,
            )
            for window in dict.fromkeys(windows)
        }
        self.layer_arguments = [self._arguments[window] for window in windows]
        self._work: list[_Work] = []  # what the arguments point to

    def begin(self, step: StepGeometry) -> None:
        """Prepare for a step."""
        self._step = step  # kept alive: arrays whose pointers are handed over
        lengths = np.diff(step.query_starts)
        self._rows = np.repeat(np.arange(step.num_rows, dtype=np.int32), lengths)
        self._ends = (step.positions + 1).astype(np.int32)
        self._work = [_Work.under(window, step.query_starts, self._ends) for window in self._arguments]
        config = self._config
        needed = max(work.num_states for work in self._work) * config.num_heads * (config.head_dim + 2)
        if self._states.numel() < needed:
            self._states = torch.empty(needed, dtype=torch.float32)
        for arguments, work in zip(self._arguments.values(), self._work, strict=True):
            arguments.states = self._states.data_ptr()
            arguments.block_tables = step.block_tables.ctypes.data
            arguments.table_width = step.block_tables.shape[1]
            arguments.token_rows = self._rows.ctypes.data
            arguments.token_end = self._ends.ctypes.data
            arguments.token_first = work.first.ctypes.data
            arguments.token_states = work.states.ctypes.data
            arguments.items, arguments.num_items = work.items.ctypes.data, len(work.items)
            arguments.joins, arguments.num_joins = work.joins.ctypes.data, len(work.joins)
        self.slots_pointer = step.slots.ctypes.data

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write k and v, then fill `out`. Shapes as in `AttentionBackend.forward`."""
        k_cache, v_cache = self.layer_pointers[layer]
        size = self._element_bytes
        self._write(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0) * size,
            v.stride(0) * size,
            k_cache,
            v_cache,
            self.slots_pointer,
            k.shape[0],
            self._kv_bytes,
        )
        arguments = self.layer_arguments[layer]
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
        arguments.k_cache, arguments.v_cache = k_cache, v_cache
        arguments.token_stride, arguments.out_stride = q.stride(0), out.stride(0)
        self._attend(ctypes.addressof(arguments), self._type)


def build_native(config: AttentionConfig, kv_cache: torch.Tensor) -> NativeAttention | None:
    """The compiled attention for this geometry, or None: no compiled kernels here, or sizes they do not serve."""
    library = native.library()
    if library is None or config.dtype not in native.ELEMENT_TYPES or config.softcap:
        return None
    if config.head_dim % 16 or config.head_dim > _MAX_HEAD_DIM:
        return None
    return NativeAttention(library, config, kv_cache)
