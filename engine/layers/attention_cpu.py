"""Paged attention on a CPU: the compiled kernel, and torch's own attention over gathered pages where it does not serve.

The compiled kernel reads the pages where they lie. Without a C compiler, and where scores are capped, every row gathers
its pages and runs `scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.layers.attention import AttentionConfig, StepGeometry
from engine.layers.attention_native import build_native
from engine.limits import NUM_DRAFTS

# Rows with up to this many new tokens go through the compiled kernel token by token; longer ones gather.
_NATIVE_MAX_QUERY = NUM_DRAFTS + 1


@dataclass(frozen=True, slots=True)
class _GatherRow:
    """A row attended by gathering: its tokens, the pages of the keys that any of them sees, and who sees whom."""

    start: int  # first token in the step
    stop: int
    pages: torch.Tensor  # int64 [pages]
    skipped: int  # keys at the start of the first page that nobody sees any more
    length: int  # keys after those
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
        self._windows = [config.window(layer) for layer in range(config.num_layers)]
        self._gather_rows: dict[int, list[_GatherRow]] = {}  # by window
        self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, step: StepGeometry) -> None:
        if self.kernel is not None:
            self.kernel.begin(step)
            return
        self._slots = torch.from_numpy(step.slots)
        self._gather_rows = {
            window: [self._gather_row(step, row, window) for row in range(step.num_rows)]
            for window in set(self._windows)
        }

    def _gather_row(self, step: StepGeometry, row: int, window: int) -> _GatherRow:
        start, stop, length = int(step.query_starts[row]), int(step.query_starts[row + 1]), int(step.seq_lens[row])
        queries, block_size = stop - start, self.config.block_size
        first = max(0, length - queries - window + 1) if window else 0  # the first key that the first query sees
        narrow = bool(window) and window < length
        mask = None
        if queries > 1 and (narrow or queries < length):
            position = torch.arange(length - queries, length)[:, None]
            key = torch.arange(first, length)
            mask = key <= position
            if window:
                mask &= key > position - window
        pages = step.block_tables[row, first // block_size : -(-length // block_size)]
        return _GatherRow(start, stop, torch.from_numpy(pages).long(), first % block_size, length - first, mask)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        if self.kernel is not None:
            self.kernel.forward(layer, q, k, v, sinks, out)
            return out
        k_pages, v_pages = self._pages[layer]
        kv_heads, head_dim = k.shape[1:]
        k_pages.view(-1, kv_heads, head_dim).index_copy_(0, self._slots, k)
        v_pages.view(-1, kv_heads, head_dim).index_copy_(0, self._slots, v)
        for row in self._gather_rows[self._windows[layer]]:
            self._attend(row, q, k_pages, v_pages, sinks, out)
        return out

    def _attend(
        self,
        row: _GatherRow,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        kv_heads, head_dim = k_pages.shape[-2:]
        # [1, heads, tokens, head_dim]; what no query sees of the first and the last page is cut off: it may hold
        # anything. In float32: torch's kernel is faster in it than in bfloat16, the conversions included.
        seen = slice(row.skipped, row.skipped + row.length)
        keys = k_pages.index_select(0, row.pages).view(-1, kv_heads, head_dim)[seen].float().transpose(0, 1)
        values = v_pages.index_select(0, row.pages).view(-1, kv_heads, head_dim)[seen].float().transpose(0, 1)
        queries = row.stop - row.start
        query = q[row.start : row.stop].float().transpose(0, 1)
        if sinks is not None or self.config.softcap:
            out[row.start : row.stop] = self._attend_in_steps(query, keys, values, row, sinks).transpose(0, 1)
            return
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=row.mask,
            is_causal=queries > 1 and row.mask is None,
            scale=self.config.scale,
            enable_gqa=self.config.num_heads != kv_heads,
        )
        out[row.start : row.stop] = attended.squeeze(0).transpose(0, 1)

    def _attend_in_steps(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: _GatherRow, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """What torch's attention has no word for. `[heads, tokens, head_dim]` of such tensors, kv head by kv head, so
        that the scores of one are all that is held."""
        config = self.config
        group = config.num_heads // config.num_kv_heads
        queries = query.shape[1]
        mask = row.mask
        if mask is None and queries > 1:
            mask = torch.ones(queries, queries, dtype=torch.bool).tril_()
        out = torch.empty_like(query)
        for kv_head in range(config.num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            scores = (query[heads] @ keys[kv_head].T) * config.scale  # [group, queries, keys]
            if config.softcap:
                scores = torch.tanh(scores / config.softcap) * config.softcap
            if mask is not None:
                scores.masked_fill_(~mask, -torch.inf)
            total = scores.logsumexp(dim=-1, keepdim=True)
            if sinks is not None:
                total = torch.logaddexp(total, sinks[heads, None, None])
            out[heads] = (scores - total).exp_() @ values[kv_head]
        return out
