"""Steps with prompts in them as recorded pieces: all but attention, whose work depends on the lengths of the rows.

    piece 0     embed, and block 0 up to its attention
    piece i     block i - 1 from its attention on, and block i up to its attention
    last piece  the last block from its attention on

Between two pieces attention starts kernel by kernel. So a step of 32 blocks is started by 33 calls and three or four
launches per block, in place of a dozen. A piece is fixed in the number of its tokens: there is one for each of some
numbers, and a step is padded to the next of them with tokens of nobody, which attention never sees. Larger steps keep a
GPU busy for longer than they take to start, and run kernel by kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import torch

from engine.graphs import Recorder, Work
from engine.inputs import StepInputs
from engine.layers.attention import AttentionBackend, StepGeometry
from engine.models.decoder import Decoder

_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384)
MOST_TOKENS = 512


def token_buckets(most: int) -> tuple[int, ...]:
    """Numbers of tokens to record, ascending, the last one `most`. From 33 tokens on a third of a step is padding at
    most."""
    return (*(size for size in _BUCKETS if size < most), most)


class PiecewiseGraphs:
    """The recorded pieces of one decoder."""

    def __init__(
        self, decoder: Decoder, attention: AttentionBackend, recorder: Recorder, inputs: StepInputs, most_tokens: int
    ) -> None:
        """`most_tokens`: of a step that is recorded. `inputs` must keep their tensors where they are."""
        self._decoder = decoder
        self._attention = attention
        self._recorder = recorder
        config, spec = attention.config, decoder.spec
        self.buckets = token_buckets(min(most_tokens, config.max_num_batched_tokens))
        most = self.buckets[-1]
        self._token_ids, self._positions = inputs.recorded("token_ids"), inputs.recorded("positions")
        empty = partial(torch.zeros, dtype=config.dtype, device=config.device)
        # What passes between the pieces and attention, side by side as a projection yields it.
        qkv = empty(most, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        self._qkv = qkv.split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        self._attended = empty(most, spec.num_heads, spec.head_dim)
        self._delta = empty(most, spec.hidden_size)
        self._residual = torch.zeros(most, spec.hidden_size, dtype=torch.float32, device=config.device)
        self._pieces: dict[int, list[Work]] = {}
        self.num_replays = 0

    def capture(self) -> None:
        """Record every bucket, the largest first. Touches no page. Raises RuntimeError for work that cannot be."""
        for tokens in reversed(self.buckets):
            pieces = range(len(self._decoder.layers) + 1)
            self._pieces[tokens] = [self._recorder.record(partial(self._piece, index, tokens)) for index in pieces]

    def _piece(self, index: int, tokens: int) -> None:
        decoder, residual = self._decoder, self._residual[:tokens]
        if index == 0:
            delta, embedded = decoder.begin(self._token_ids[:tokens])
            residual.copy_(embedded)
        else:
            delta = decoder.after_attention(index - 1, self._attended[:tokens], residual)
        if index == len(decoder.layers):
            self._delta[:tokens].copy_(delta)
            return
        found = decoder.before_attention(index, delta, residual, self._positions[:tokens])
        for place, values in zip(self._qkv, found, strict=True):
            place[:tokens].copy_(values)

    def serves(self, step: StepGeometry) -> bool:
        """Whether there is a recording for so many tokens."""
        return bool(self._pieces) and step.num_tokens <= self.buckets[-1]

    def hidden(self, step: StepGeometry, wanted: torch.Tensor) -> torch.Tensor:
        """The normed states of the tokens `wanted`, `[wanted, hidden]`.

        The inputs have been sent: behind the step's own there is what was there before, for the tokens of nobody.
        Begins the step at the attention backend itself.
        """
        tokens = step.num_tokens
        *pieces, last = self._pieces[self.buckets[bisect_left(self.buckets, tokens)]]
        self._attention.begin(step)
        q, k, v = (part[:tokens] for part in self._qkv)
        for index, piece in enumerate(pieces):
            piece()
            attended = self._attention.forward(index, q, k, v, self._decoder.layers[index].sinks)
            self._attended[:tokens].copy_(attended)
        last()
        self.num_replays += 1
        return self._decoder.end(self._delta[:tokens], self._residual[:tokens], wanted)
