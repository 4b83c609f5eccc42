"""One rank's part of a decoder: some of its blocks, and of these some heads, columns and experts.

first stage    embed, sum over the ranks
every stage    per block two sums over the ranks: what attention yields, and what the network or the experts yield
between        the sum of all blocks so far, float32, goes to the same tensor rank of the next stage
last stage     the normed states; rank 0 asks its stage for logits when it wants them
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.layers.attention import AttentionBackend
from engine.layers.linear import Linear, LinearPolicy
from engine.layers.ops import BlockOps
from engine.models.decoder import Decoder, Layer
from engine.models.spec import LayerSpec
from engine.models.tensors import LayerTensors, TensorSource
from engine.parallel.layers import SplitOutput, SummedLinear, SummedNetwork, embed
from engine.parallel.layout import Part
from engine.parallel.peers import Peers


class PartDecoder(Decoder):
    """`part` of a model, whose tensors `source` gives. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        source: TensorSource,
        policy: LinearPolicy,
        attention: AttentionBackend,
        ops: BlockOps,
        *,
        max_position: int,
        output: bool,
        part: Part,
        peers: Peers,
    ) -> None:
        self._part, self._peers = part, peers
        self._dtype = policy.dtype
        self.begins = part.place.is_first
        super().__init__(source, policy, attention, ops, max_position=max_position, output=output)

    def _build_embedding(self, source: TensorSource, policy: LinearPolicy) -> torch.Tensor:
        return super()._build_embedding(source, policy) if self.begins else torch.empty(0, device=policy.device)

    def _build_output(self, source: TensorSource, policy: LinearPolicy) -> Linear | None:
        if not self._part.place.is_last:
            return None
        output = super()._build_output(source, policy)
        if output is None or self._part.place.layout.tensor == 1:
            return output
        return SplitOutput(output, self._peers, self.spec.vocab_size)

    def _build_layer(self, layer: LayerSpec, tensors: LayerTensors, policy: LinearPolicy) -> Layer:
        built = super()._build_layer(layer, tensors, policy)
        if self._part.place.layout.tensor == 1:
            return built
        output = SummedLinear(built.attention_output, self._peers)
        return replace(built, attention_output=output, mlp=SummedNetwork(built.mlp, self._peers))

    def begin(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.begins:
            embedded = embed(self.embedding, self._part.vocabulary.start, token_ids, self._peers)
            return embedded, embedded.float()
        residual = self._peers.passed(len(token_ids), self.spec.hidden_size)
        return torch.zeros(residual.shape, dtype=self._dtype, device=residual.device), residual

    def end(self, delta: torch.Tensor, residual: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if self._part.place.is_last:
            return super().end(delta, residual, wanted)
        self._peers.pass_on(residual + delta)
        return residual[:0]  # the states are the next stage's
