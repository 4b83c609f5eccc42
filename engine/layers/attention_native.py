"""The compiled paged attention: K and V written to their slots, single query tokens attended where the pages lie.

Used by `CpuAttention`; see `engine/kernels/cpu_attention.c` for the arithmetic. A token's result does not
depend on what else is in the step.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from engine.layers import native
from engine.layers.attention import AttentionConfig, StepGeometry

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
        ("token_keys", ctypes.c_void_p),
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


class NativeAttention:
    """Attends the first tokens of a step (those of `begin`'s `num_rows` rows); writes K and V of all of them.

    `blocks_native` makes the same calls: `arguments`, `items` (pointer and count) and `slots_pointer` describe the step
    that `begin` has prepared, `layer_pointers` are K and V of every layer.
    """

    def __init__(self, library: ctypes.CDLL, config: AttentionConfig, kv_cache: torch.Tensor) -> None:
        self._attend, self._write = library.tl_paged_attention, library.tl_kv_write
        self._config = config
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
        self._num_tokens = 0

    def begin(self, step: StepGeometry, num_rows: int) -> None:
        """Prepare for a step whose first `num_rows` rows are to be attended here, token by token."""
        self._step = step  # kept alive: arrays whose pointers are handed over
        lengths = step.query_starts[1 : num_rows + 1] - step.query_starts[:num_rows]
        self._num_tokens = num_tokens = int(step.query_starts[num_rows])
        self._rows = np.repeat(np.arange(num_rows, dtype=np.int32), lengths)
        self._keys = (step.positions[:num_tokens] + 1).astype(np.int32)
        chunks = -(-self._keys // _CHUNK)
        self._max_chunks = int(chunks.max(initial=1))
        owners = np.repeat(np.arange(num_tokens, dtype=np.int32), chunks)
        firsts = np.cumsum(chunks) - chunks
        self._items = np.stack([owners, np.arange(len(owners), dtype=np.int32) - firsts[owners]], axis=1).astype(
            np.int32
        )
        arguments, config = self.arguments, self._config
        if self._max_chunks > 1:
            needed = num_tokens * config.num_heads * self._max_chunks * (config.head_dim + 2)
            if self._partials.numel() < needed:
                self._partials = torch.empty(needed, dtype=torch.float32)
            arguments.partials = self._partials.data_ptr()
        arguments.block_tables = step.block_tables.ctypes.data
        arguments.token_rows = self._rows.ctypes.data
        arguments.token_keys = self._keys.ctypes.data
        arguments.table_width = step.block_tables.shape[1]
        arguments.max_chunks = self._max_chunks
        self.slots_pointer = step.slots.ctypes.data
        self.items = (self._items.ctypes.data, len(self._items))
        self._arguments_pointer = ctypes.addressof(arguments)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
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
        arguments = self.arguments
        arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
        arguments.k_cache, arguments.v_cache = k_cache, v_cache
        arguments.token_stride, arguments.out_stride = q.stride(0), out.stride(0)
        self._attend(self._arguments_pointer, *self.items, self._num_tokens, self._type)


def build_native(config: AttentionConfig, kv_cache: torch.Tensor) -> NativeAttention | None:
    """The compiled attention for this geometry, or None: no compiled kernels here, or sizes they do not serve."""
    library = native.library()
    if library is None or config.dtype not in native.ELEMENT_TYPES:
        return None
    if config.head_dim % 16 or config.head_dim > _MAX_HEAD_DIM:
        return None
    return NativeAttention(library, config, kv_cache)
