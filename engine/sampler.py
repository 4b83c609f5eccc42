"""From logits to tokens: the whole batch at once, every row by its own `SamplingParams`.

The order: logit_bias, min_tokens and bad words; penalties; the grammar; temperature, min_p, typical_p, top_k, top_p.
The steps are in `engine.sampling`. Randomness is one number per token, a hash of (seed, position), so that a seeded
request repeats whatever runs beside it and however it was scheduled. Log-probabilities come from the raw logits. A
batch of plain greedy rows costs one argmax. On CUDA kernels do the same (`engine/sampling/on_device.py`), and nothing
waits for the device before `Drawn.results` does.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.layers.staging import Download
from engine.limits import DRAWN_AT_ONCE
from engine.sampling.adjust import adjust_row, adjusts, fault_of
from engine.sampling.draw import draw, likeliest
from engine.sampling.grammar import constrain
from engine.sampling.logprobs import RowLogprobs
from engine.sampling.truncate import scale
from engine.types import RowResult, StepRow

if TYPE_CHECKING:
    from engine.sampling.on_device import DeviceSampling

# Temperatures below this are taken as 0.
_GREEDY_BELOW = 1e-5
_NOTHING_LEFT = "bad_words, logit_bias and min_tokens leave no token to go on with"


class Drawn:
    """Tokens that are being drawn. `tokens`: int64 `[rows]`, on the device."""

    def __init__(
        self,
        tokens: torch.Tensor,
        rows: Sequence[StepRow],
        faults: Sequence[str | None],
        best: torch.Tensor,
        adjusted: Collection[int],
        logprobs: RowLogprobs,
    ) -> None:
        """`faults`: of rows, as far as known. `best`: float32 `[rows]`, the largest logits, to be looked at where they
        were `adjusted`; `[0]` if none were."""
        self.tokens = tokens
        self._rows, self._faults = rows, faults
        self._adjusted = adjusted
        self._found = Download(tokens, best)
        self._logprobs = logprobs

    def results(self) -> list[RowResult]:
        """Wait for them; one per row. Of a row with an error the token means nothing."""
        tokens, best = (part.tolist() for part in self._found.get())
        logprobs = self._logprobs.get()
        results: list[RowResult] = []
        for i, (row, token, fault) in enumerate(zip(self._rows, tokens, self._faults, strict=True)):
            # Below infinity, and some token above minus infinity: no NaN compares so.
            if fault is None and i in self._adjusted and not abs(best[i]) < math.inf:
                fault = _NOTHING_LEFT
            if fault is not None:
                results.append(RowResult(row.request_id, error=fault))
            else:
                results.append(RowResult(row.request_id, (token,), (logprobs[i],) if i in logprobs else ()))
        return results


class Sampler:
    """Stateless but for a secret that seeds requests without a seed of their own."""

    def __init__(self, end_ids: frozenset[int], on_device: DeviceSampling | None = None) -> None:
        """`end_ids`: the tokens that end an answer, masked while `min_tokens` is not reached. `on_device`: by kernels
        and without waiting for the device; None: by torch."""
        self._end_ids = end_ids
        self._on_device = on_device
        self._secret = os.urandom(16)

    def sample(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> list[RowResult]:
        """One result per row. logits: float32 `[rows, vocab]`, left unchanged.

        A row whose parameters do not fit the vocabulary, or leave nothing of it, gets an `error` and disturbs no other.
        """
        return self.draw(logits, rows).results()

    def draw(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> Drawn:
        """Begin to draw a token for each row; see `sample`."""
        faults = [fault_of(row.params, logits.shape[1]) for row in rows]
        adjusted, changed = self._adjust(logits, rows, faults)
        tokens = likeliest(adjusted) if self._on_device is None else adjusted.argmax(dim=-1)
        random = [i for i, row in enumerate(rows) if row.params.temperature >= _GREEDY_BELOW and faults[i] is None]
        uniform = [self._uniform(rows[i]) for i in random]
        if self._on_device is not None:
            self._on_device.draw_into(tokens, adjusted, random, [rows[i].params for i in random], uniform)
        else:
            for start in range(0, len(random), DRAWN_AT_ONCE):
                part = random[start : start + DRAWN_AT_ONCE]
                params = [rows[i].params for i in part]
                numbers = torch.tensor(uniform[start : start + DRAWN_AT_ONCE], dtype=torch.float64).to(logits.device)
                tokens[part] = draw(scale(adjusted[part], params), params, numbers.unsqueeze(1))
        best = adjusted.amax(dim=-1) if changed else tokens.new_empty(0)
        return Drawn(tokens, rows, faults, best, changed, RowLogprobs(logits, rows, tokens))

    def draw_siblings(self, logits: torch.Tensor, row: StepRow, *, at_once: int) -> list[Drawn]:
        """Begin to draw for all draws of a row, in order, each with its own parameters, from logits `[1, vocab]` that
        they share.

        `at_once`: so many at most have logits of their own at a time.
        """
        own = [
            replace(row, request_id=draw.request_id, params=draw.params, grammar=draw.grammar, draws=())
            for draw in row.draws
        ]
        parts = [own[start : start + at_once] for start in range(0, len(own), at_once)]
        return [self.draw(logits.expand(len(part), -1), part) for part in parts]

    def _adjust(
        self, logits: torch.Tensor, rows: Sequence[StepRow], faults: list[str | None]
    ) -> tuple[torch.Tensor, frozenset[int]]:
        """Bans, biases, penalties and grammars: the logits, a copy only when some row asks for one, and which rows are
        changed. Adds to `faults`."""
        changing = [i for i, row in enumerate(rows) if faults[i] is None and adjusts(row)]
        held = [i for i, row in enumerate(rows) if faults[i] is None and row.grammar is not None]
        if not changing and not held:
            return logits, frozenset()
        adjusted = logits.clone(memory_format=torch.contiguous_format)
        if self._on_device is not None:
            self._on_device.adjust(adjusted, rows, changing, self._end_ids)
        else:
            for i in changing:
                adjust_row(adjusted[i], rows[i], self._end_ids)
        constrain(adjusted, logits, rows, faults)
        return adjusted, frozenset(changing + held)

    def _uniform(self, row: StepRow) -> float:
        """A number in [0, 1) fixed by the request's seed and the position of the token to come."""
        if row.params.seed is None:
            key = self._secret + struct.pack("<q", row.request_id)
        else:
            key = b"seed" + struct.pack("<Q", row.params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        digest = hashlib.blake2b(struct.pack("<Q", len(row.all_token_ids)), key=key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2.0**53
