"""Adapters in a step (arXiv 2106.09685): each adds `x down^T up^T` to a block's products, for its own rows' tokens.

The base model's weights stay as they are, packed or not, so rows of several adapters and of none run in one step, and
the base product is computed for all of them at once. Every adapter's share is computed for its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.adapters.peft import Adapter, Pair
from engine.adapters.targets import Product
from engine.layers.attention import IntArray
from engine.layers.linear import Linear
from engine.layers.staging import upload
from engine.types import StepRow

# Products of fewer rows are summed in another order by the libraries behind torch, and a token's bits would depend on
# how many others are in the step. So an adapter's tokens are always a multiple of this; what is beyond them is dropped.
_TILE = 8

Key = tuple[int, Product]  # layer and product


class LowRank:
    """What an adapter adds to one product, its modules side by side."""

    def __init__(self, pairs: Sequence[Pair], dtype: torch.dtype, device: torch.device) -> None:
        self._down = torch.from_numpy(np.concatenate([pair.down for pair in pairs])).to(device, dtype)
        self._ranks = [len(pair.down) for pair in pairs]
        self._ups = [torch.from_numpy(pair.up).to(device, dtype) for pair in pairs]
        self._starts = [pair.target.start for pair in pairs]
        self.num_bytes = self._down.nbytes + sum(up.nbytes for up in self._ups)

    def add(self, x: torch.Tensor, y: torch.Tensor, group: Group) -> None:
        """Add to `y` `[tokens, out]` what `x` `[tokens, in]` yields, at the tokens of `group`."""
        inner = torch.nn.functional.linear(x.index_select(0, group.padded), self._down)  # [padded, ranks]
        for part, up, start in zip(inner.split_with_sizes(self._ranks, dim=1), self._ups, self._starts, strict=True):
            delta = torch.nn.functional.linear(part, up)[: group.count]
            target = y[:, start : start + len(up)]
            if group.span is not None:
                target[group.span] += delta
            else:
                target.index_add_(0, group.padded[: group.count], delta)


class AdapterWeights:
    """One adapter on its device. `rank`: the largest of its modules; `digest`: of its content."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, device: torch.device) -> None:
        self.rank, self.digest = adapter.rank, adapter.digest
        by_key: dict[Key, list[Pair]] = {}
        for layer, pairs in adapter.layers.items():
            for pair in pairs:
                by_key.setdefault((layer, pair.target.product), []).append(pair)
        self.products = {key: LowRank(pairs, dtype, device) for key, pairs in by_key.items()}
        self.num_bytes = sum(product.num_bytes for product in self.products.values())


@dataclass(frozen=True, slots=True)
class Group:
    """The tokens of one adapter in a step."""

    weights: AdapterWeights
    padded: torch.Tensor  # int64: their indices, and some of them again up to a multiple of `_TILE`
    count: int
    span: slice | None  # the same tokens, where they lie side by side


class StepAdapters:
    """The adapters of the step that runs. `loaded`: by id; to be changed between steps only."""

    def __init__(self, device: torch.device) -> None:
        self.loaded: dict[int, AdapterWeights] = {}
        self.groups: list[Group] = []
        self._device = device

    def begin(self, rows: Sequence[StepRow], query_starts: IntArray) -> dict[int, str]:
        """Prepare for one step, whose row `r` has the tokens from `query_starts[r]` to before `query_starts[r + 1]`.

        Returns the faults of rows.
        """
        faults: dict[int, str] = {}
        tokens: dict[int, list[range]] = {}
        for index, row in enumerate(rows):
            if row.adapter in self.loaded:
                part = range(int(query_starts[index]), int(query_starts[index + 1]))
                tokens.setdefault(row.adapter, []).append(part)
            elif row.adapter:
                faults[index] = f"adapter {row.adapter} is not loaded"
        self.groups = [self._group(self.loaded[adapter], ranges) for adapter, ranges in tokens.items()]
        return faults

    def _group(self, weights: AdapterWeights, ranges: list[range]) -> Group:
        indices = np.concatenate([np.arange(part.start, part.stop) for part in ranges])
        first, last, count = int(indices[0]), int(indices[-1]), len(indices)
        padded = np.concatenate([indices, np.full(-count % _TILE, last)])
        span = slice(first, last + 1) if last + 1 - first == count else None
        return Group(weights, upload(padded, self._device), count, span)


class AdaptedLinear:
    """`inner`, and what the adapters of the step add to it."""

    def __init__(self, inner: Linear, step: StepAdapters, key: Key) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.num_bytes = inner.num_bytes
        self._inner, self._step, self._key = inner, step, key

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._inner(x)
        for group in self._step.groups:
            product = group.weights.products.get(self._key)
            if product is not None:
                product.add(x, y, group)
        return y
