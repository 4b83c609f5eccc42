"""From logits to tokens: the whole batch at once, every row by its own `SamplingParams`.

The order: logit_bias, min_tokens and bad words; penalties; the grammar; temperature, min_p, typical_p, top_k, top_p.
The steps are in `engine.sampling`. Randomness is one number per token, a hash of (seed, position), so that a seeded
request repeats whatever runs beside it and however it was scheduled. Log-probabilities come from the raw logits. A
batch of plain greedy rows costs one argmax. On CUDA kernels draw the same tokens (`engine/kernels/sample.py`).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.limits import DRAWN_AT_ONCE
from engine.sampling.adjust import adjust_row, adjusts, fault_of
from engine.sampling.draw import draw, likeliest
from engine.sampling.grammar import constrain
from engine.sampling.logprobs import row_logprobs
from engine.sampling.truncate import scale
from engine.types import RowResult, StepRow

# Temperatures below this are taken as 0.
_GREEDY_BELOW = 1e-5


class Sampler:
    """Stateless but for a secret that seeds requests without a seed of their own."""

    def __init__(self, end_ids: frozenset[int]) -> None:
        """`end_ids`: the tokens that end an answer, masked while `min_tokens` is not reached."""
        self._end_ids = end_ids
        self._secret = os.urandom(16)

    def sample(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> list[RowResult]:
        """One result per row. logits: float32 `[rows, vocab]`, left unchanged.

        A row whose parameters do not fit the vocabulary, or leave nothing of it, gets an `error` and disturbs no other.
        """
        faults = [fault_of(row.params, logits.shape[1]) for row in rows]
        adjusted = self._adjust(logits, rows, faults)
        tokens = likeliest(adjusted)
        random = [i for i, row in enumerate(rows) if row.params.temperature >= _GREEDY_BELOW and faults[i] is None]
        if logits.device.type == "cuda":
            from engine.sampling import draw_triton

            by_kernels = [i for i in random if draw_triton.serves(rows[i].params)]
            params = [rows[i].params for i in by_kernels]
            draw_triton.draw_into(tokens, adjusted, by_kernels, params, [self._uniform(rows[i]) for i in by_kernels])
            random = [i for i in random if not draw_triton.serves(rows[i].params)]
        for start in range(0, len(random), DRAWN_AT_ONCE):
            part = random[start : start + DRAWN_AT_ONCE]
            params = [rows[i].params for i in part]
            uniform = torch.tensor([self._uniform(rows[i]) for i in part], dtype=torch.float64, device=logits.device)
            tokens[torch.tensor(part, device=tokens.device)] = draw(
                scale(adjusted[part], params), params, uniform.unsqueeze(1)
            )
        ids = tokens.tolist()
        logprobs = row_logprobs(logits, rows, ids)
        return [
            RowResult(row.request_id, error=fault)
            if fault is not None
            else RowResult(row.request_id, (ids[i],), (logprobs[i],) if i in logprobs else ())
            for i, (row, fault) in enumerate(zip(rows, faults, strict=True))
        ]

    def draw_siblings(self, logits: torch.Tensor, row: StepRow, *, at_once: int) -> tuple[RowResult, ...]:
        """One result per draw of a row, each with its own parameters, from logits `[1, vocab]` that they share.

        `at_once`: so many at most have logits of their own at a time.
        """
        own = [
            replace(row, request_id=draw.request_id, params=draw.params, grammar=draw.grammar, draws=())
            for draw in row.draws
        ]
        parts = [own[start : start + at_once] for start in range(0, len(own), at_once)]
        return tuple(result for part in parts for result in self.sample(logits.expand(len(part), -1), part))

    def _adjust(self, logits: torch.Tensor, rows: Sequence[StepRow], faults: list[str | None]) -> torch.Tensor:
        """Bans, biases and penalties; a copy only when some row asks for one. Adds to `faults`."""
        changing = [i for i, row in enumerate(rows) if faults[i] is None and (adjusts(row) or row.grammar is not None)]
        if not changing:
            return logits
        adjusted = logits.clone()
        for i in changing:
            adjust_row(adjusted[i], rows[i], self._end_ids)
        constrain(adjusted, logits, rows, faults)
        # Below infinity, and some token above minus infinity: no NaN compares so.
        best = adjusted[changing].amax(dim=-1).abs() < torch.inf
        for i, is_sound in zip(changing, best.tolist(), strict=True):
            if not is_sound and faults[i] is None:
                faults[i] = "bad_words, logit_bias and min_tokens leave no token to go on with"
        return adjusted

    def _uniform(self, row: StepRow) -> float:
        """A number in [0, 1) fixed by the request's seed and the position of the token to come."""
        if row.params.seed is None:
            key = self._secret + struct.pack("<q", row.request_id)
        else:
            key = b"seed" + struct.pack("<Q", row.params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        digest = hashlib.blake2b(struct.pack("<Q", len(row.all_token_ids)), key=key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2.0**53
