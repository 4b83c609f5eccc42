"""The compiled paged attention: K and V written to their slots, single query tokens attended where the pages lie.

Used by `CpuAttention`; see `engine/kernels/cpu_attention.c` for the arithmetic. A token's result does not
depend on what else is in the step. It knows windows and sinks, but no capped scores.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from engine.layers import native
from engine.layers.attention import AttentionConfig, IntArray, StepGeometry

_CHUNK = 128  # keys per work item, CHUNK in cpu_attention.c
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
        ("partials", ctypes.c_void_p),
        ("token_stride", ctypes.c_long),
        ("out_stride", ctypes.c_long),
        ("table_width", ctypes.c_long),
        ("block_size", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("head_dim", ctypes.c_long),
        ("max_chunks", ctypes.c_long),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step's tokens attend to under one window. The arrays live as long as their pointers are in use."""

    first: IntArray  # [tokens], the first key
    items: IntArray  # [items, 2], (token, chunk)
    max_chunks: int

    @classmethod
    def under(cls, window: int, ends: IntArray) -> _Work:
        first = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
        chunks = -(-(ends - first) // _CHUNK)
        owners = np.repeat(np.arange(len(ends), dtype=np.int32), chunks)
        before = np.cumsum(chunks) - chunks
        numbers = np.arange(len(owners), dtype=np.int32) - before[owners]
        return cls(first, np.stack([owners, numbers], axis=1).astype(np.int32), int(chunks.max(initial=1)))


class NativeAttention:
    """Attends the first tokens of a step (those of `begin`'s `num_rows` rows); writes K and V of all of them.

    `blocks_native` makes the same calls: `arguments`, `items` (pointer and count) and `slots_pointer` describe the step
    that `begin` has prepared, for layers like the first; `layer_pointers` are K and V of every layer.
    """

    def __init__(self, library: ctypes.CDLL, config: AttentionConfig, kv_cache: torch.Tensor) -> None:
        self._attend, self._write = library.tl_paged_attention, library.tl_kv_write
        self._config = config
        self._windows = [config.window(layer) for layer in range(config.num_layers)]
        self._type = native.ELEMENT_TYPES[config.dtype]
        self._element_bytes = config.dtype.itemsize
        self._kv_bytes = config.num_kv_heads * config.head_dim * self._element_bytes
        self._cache = kv_cache  # kept alive: the pointers below are into it
        self.layer_pointers = [(kv_cache[i, 0].data_ptr(), kv_cache[i, 1].data_ptr()) for i in range(config.num_layers)]
        self._partials = torch.empty(0, dtype=torch.float32)
        self.arguments = AttentionArguments(
            block_size=config.block_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.scale,
        )
        self._arguments_pointer = ctypes.addressof(self.arguments)
        self._num_tokens = 0
        self._work: dict[int, _Work] = {}
        self._window = -1  # of the work that `arguments` describes

    def begin(self, step: StepGeometry, num_rows: int) -> None:
        """Prepare for a step whose first `num_rows` rows are to be attended here, token by token."""
        self._step = step  # kept alive: arrays whose pointers are handed over
        lengths = step.query_starts[1 : num_rows + 1] - step.query_starts[:num_rows]
        self._num_tokens = num_tokens = int(step.query_starts[num_rows])
        self._rows = np.repeat(np.arange(num_rows, dtype=np.int32), lengths)
        self._ends = (step.positions[:num_tokens] + 1).astype(np.int32)
        self._work = {window: _Work.under(window, self._ends) for window in set(self._windows)}
        arguments, config = self.arguments, self._config
        max_chunks = max(work.max_chunks for work in self._work.values())
        if max_chunks > 1:
            needed = num_tokens * config.num_heads * max_chunks * (config.head_dim + 2)
            if self._partials.numel() < needed:
                self._partials = torch.empty(needed, dtype=torch.float32)
            arguments.partials = self._partials.data_ptr()
        arguments.block_tables = step.block_tables.ctypes.data
        arguments.token_rows = self._rows.ctypes.data
        arguments.token_end = self._ends.ctypes.data
        arguments.table_width = step.block_tables.shape[1]
        self.slots_pointer = step.slots.ctypes.data
        self._take_window(self._windows[0])

    def _take_window(self, window: int) -> None:
        work = self._work[window]
        self._window = window
        self.arguments.token_first = work.first.ctypes.data
        self.arguments.max_chunks = work.max_chunks
        self.items = (work.items.ctypes.data, len(work.items))

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write all of k and v, then fill the first tokens of `out`. Shapes as in `AttentionBackend.forward`."""
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
        if not self._num_tokens:
            return
        if self._windows[layer] != self._window:
            self._take_window(self._windows[layer])
        arguments = self.arguments
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
        arguments.k_cache, arguments.v_cache = k_cache, v_cache
        arguments.token_stride, arguments.out_stride = q.stride(0), out.stride(0)
        self._attend(self._arguments_pointer, *self.items, self._num_tokens, self._type)


def build_native(config: AttentionConfig, kv_cache: torch.Tensor) -> NativeAttention | None:
    """The compiled attention for this geometry, or None: no compiled kernels here, or sizes they do not serve."""
    library = native.library()
    if library is None or config.dtype not in native.ELEMENT_TYPES or config.softcap:
        return None
    if config.head_dim % 16 or config.head_dim > _MAX_HEAD_DIM:
        return None
    return NativeAttention(library, config, kv_cache)
