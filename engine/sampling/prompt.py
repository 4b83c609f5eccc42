"""Log-probabilities of a prompt's own tokens: each from the state of the token before it, as the prompt is computed.

A chunk of a prompt has many positions, and each of them takes a row of the vocabulary's size. So logits are made a few
rows at a time, and take no more memory than sampling does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.limits import DRAWN_AT_ONCE
from engine.sampling.logprobs import token_logprobs
from engine.types import StepRow, TokenLogprob


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What is to be scored in one step, one entry per position, in the order of the rows."""

    indices: npt.NDArray[np.int64]  # of the positions among the step's tokens
    rows: list[int]
    tokens: list[int]  # the prompt's token after the position
    counts: list[int]  # of likeliest tokens to report

    @classmethod
    def wanted(cls, rows: Sequence[StepRow], query_starts: npt.NDArray[np.int32]) -> PromptScores:
        """From a plan's rows and where they begin among the step's tokens, as `StepGeometry` has it."""
        scores = cls(np.empty(0, dtype=np.int64), [], [], [])
        pieces = [scores.indices]
        for i, row in enumerate(rows):
            positions = _positions(row)
            if positions:
                pieces.append(int(query_starts[i]) - row.start + np.asarray(positions, dtype=np.int64))
                scores.rows.extend([i] * len(positions))
                scores.tokens.extend(row.all_token_ids[positions.start + 1 : positions.stop + 1])
                scores.counts.extend([row.params.prompt_logprobs or 0] * len(positions))
        return cls(np.concatenate(pieces), scores.rows, scores.tokens, scores.counts)

    def compute(
        self, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, tuple[TokenLogprob, ...]]:
        """By row. hidden: states `[positions, hidden]`; `logits` turns some of them into logits `[some, vocab]`."""
        found: dict[int, list[TokenLogprob]] = {}
        for start in range(0, len(self.rows), DRAWN_AT_ONCE):
            part = slice(start, start + DRAWN_AT_ONCE)
            made = logits(hidden[part])
            # A token that does not exist is the error of the row that computes it, in this chunk or the next.
            tokens = [token if 0 <= token < made.shape[1] else 0 for token in self.tokens[part]]
            scored = token_logprobs(made, tokens, self.counts[part])
            for row, entry in zip(self.rows[part], scored, strict=True):
                found.setdefault(row, []).append(entry)
        return {row: tuple(entries) for row, entries in found.items()}


def _positions(row: StepRow) -> range:
    """Positions of this row whose next token is one of the prompt's and has not been scored yet."""
    if row.score_from is None:
        return range(0)
    return range(max(row.start, row.score_from), min(row.start + len(row.token_ids), row.num_prompt_tokens - 1))
