"""The layers of a decoder that is held in parts: products whose terms, rows or columns lie on several ranks."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.layers.linear import Linear
from engine.layers.ops import BlockOps
from engine.parallel.calls import Logits
from engine.parallel.peers import Peers


class Network(Protocol):
    """What stands between the norms of a block: a feed-forward network, or experts."""

    @property
    def num_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, ops: BlockOps) -> torch.Tensor: ...


class SummedLinear:
    """The sum of what the ranks of a stage compute, each with its columns of the matrix."""

    def __init__(self, inner: Linear, peers: Peers) -> None:
        self.in_features, self.out_features, self.num_bytes = inner.in_features, inner.out_features, inner.num_bytes
        self._inner, self._peers = inner, peers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._peers.total(self._inner(x))


class SummedNetwork:
    """The sum of what the ranks of a stage compute, each with its columns of a network or its experts."""

    def __init__(self, inner: Network, peers: Peers) -> None:
        self.num_bytes = inner.num_bytes
        self._inner, self._peers = inner, peers

    def __call__(self, x: torch.Tensor, ops: BlockOps) -> torch.Tensor:
        return self._peers.total(self._inner(x, ops))


class SplitOutput:
    """Logits for rank 0, each rank of the last stage with its tokens of the vocabulary.

    Rank 0 announces a product, hands out its states and joins the logits; the others call this when they are told to.
    """

    def __init__(self, inner: Linear, peers: Peers, vocab_size: int) -> None:
        self.in_features, self.out_features, self.num_bytes = inner.in_features, vocab_size, inner.num_bytes
        self._inner, self._peers = inner, peers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers.place.leads:
            self._peers.announce(Logits(len(x)))
        return self._peers.joined(self._inner(self._peers.handed_out(x)), self.out_features)


def embed(table: torch.Tensor, first: int, token_ids: torch.Tensor, peers: Peers) -> torch.Tensor:
    """`[tokens, hidden]`, each rank with the rows of the tokens from `first` on. token_ids: int64 `[tokens]`."""
    local = token_ids - first
    elsewhere = (local < 0) | (local >= len(table))
    rows = table.index_select(0, local.masked_fill(elsewhere, 0))
    return peers.total(rows.masked_fill(elsewhere.unsqueeze(1), 0))
