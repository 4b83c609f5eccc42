"""Paged attention on a CPU: torch's own attention over gathered pages, and the compiled kernel for single tokens.

A row with many new tokens gathers its pages and runs `scaled_dot_product_attention`. A row with one token is bound by
reading K and V: gathering would double that, so the compiled kernel reads the pages where they lie. Without a C
compiler every row takes the first way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.layers.attention import AttentionConfig, StepGeometry
from engine.layers.attention_native import build_native

# Rows with up to this many new tokens go through the compiled kernel token by token; longer ones gather.
_NATIVE_MAX_QUERY = 4


@dataclass(frozen=True, slots=True)
class _GatherRow:
    """A row attended by gathering: its tokens, its pages and who sees whom."""

    start: int  # first token in the step
    stop: int
    pages: torch.Tensor  # int64 [pages]
    length: int  # keys
    mask: torch.Tensor | None  # bool [queries, keys], None when every query sees every key or the square is causal


class CpuAttention:
    """`AttentionBackend` for CPUs. Deterministic: a row's result does not depend on the other rows."""

    def __init__(self, config: AttentionConfig, *, use_native: bool = True) -> None:
        self.config = config
        # Zeroed by the system, page by page as it is first written: memory is taken when it is used, not before.
        zeros = np.zeros(math.prod(config.kv_shape) * config.dtype.itemsize, dtype=np.uint8)
        self.kv_cache = torch.from_numpy(zeros).view(config.dtype).view(config.kv_shape)
        self.kernel = build_native(config, self.kv_cache) if use_native else None
        self._pages = [(self.kv_cache[layer, 0], self.kv_cache[layer, 1]) for layer in range(config.num_layers)]
        self._gather_rows: list[_GatherRow] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    @property
    def gathers(self) -> bool:
        """Whether some row of this step takes torch's way."""
        return self.kernel is None or bool(self._gather_rows)

    def begin(self, step: StepGeometry) -> None:
        self._slots = torch.from_numpy(step.slots)
        first_gathered = 0
        if self.kernel is not None:
            lengths = step.query_starts[1:] - step.query_starts[:-1]
            while first_gathered < step.num_rows and lengths[first_gathered] <= _NATIVE_MAX_QUERY:
                first_gathered += 1
            self.kernel.begin(step, first_gathered)
        self._gather_rows = [self._gather_row(step, row) for row in range(first_gathered, step.num_rows)]

    def _gather_row(self, step: StepGeometry, row: int) -> _GatherRow:
        start, stop, length = int(step.query_starts[row]), int(step.query_starts[row + 1]), int(step.seq_lens[row])
        queries = stop - start
        mask = None
        if 1 < queries < length:
            mask = torch.ones(queries, length, dtype=torch.bool).tril_(length - queries)
        num_pages = -(-length // self.config.block_size)
        pages = torch.from_numpy(step.block_tables[row, :num_pages]).long()
        return _GatherRow(start, stop, pages, length, mask)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k_pages, v_pages = self._pages[layer]
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.kernel is None:
            kv_heads, head_dim = k.shape[1:]
            k_pages.view(-1, kv_heads, head_dim).index_copy_(0, self._slots, k)
            v_pages.view(-1, kv_heads, head_dim).index_copy_(0, self._slots, v)
        else:
            self.kernel.forward(layer, q, k, v, out)
        for row in self._gather_rows:
            self._attend(row, q, k_pages, v_pages, out)
        return out

    def _attend(
        self, row: _GatherRow, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor
    ) -> None:
        kv_heads, head_dim = k_pages.shape[-2:]
        # [1, heads, tokens, head_dim]; the tail of the last page is cut off: it may hold anything.
        # In float32: torch's kernel is faster in it than in bfloat16, the conversions included.
        keys = k_pages.index_select(0, row.pages).view(-1, kv_heads, head_dim)[: row.length].float().transpose(0, 1)
        values = v_pages.index_select(0, row.pages).view(-1, kv_heads, head_dim)[: row.length].float().transpose(0, 1)
        queries = row.stop - row.start
        attended = torch.nn.functional.scaled_dot_product_attention(
            q[row.start : row.stop].float().transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=row.mask,
            is_causal=queries > 1 and row.mask is None,
            scale=self.config.scale,
            enable_gqa=self.config.num_heads != kv_heads,
        )
        out[row.start : row.stop] = attended.squeeze(0).transpose(0, 1)
