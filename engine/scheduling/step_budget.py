"""How many tokens a step may have, so that answers get their next token within a target time.

    measured: time per output token ──→ budget: size of the step × target / measured, or a little more ──→ next step

A step has a fixed part and one that grows with its tokens, so this share of its size is still too large, if anything,
and the budget comes down to where target and measurement meet. Where time grows faster, in long contexts, it may come
down too far for a moment. Where no answer is being written nobody waits for a next token, and a step may be as large as
it can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.types import RowResult, StepPlan

# A prompt that has started gets so many tokens of a step, whatever the target: this is what makes progress.
LEAST_CHUNK = 8
# One slow step may be the machine's doing, so it counts for so much at most; the way up is slower than the way down.
_MOST_DOWN, _MOST_UP = 0.7, 1.1
# A step that used less of the budget than this says nothing about whether more would do.
_USED = 0.8


class StepBudget:
    """The bound of the next step. Say in `timed` what each step took."""

    def __init__(self, most: int, target_seconds: float | None = None) -> None:
        """`most`: tokens of a step at most. `target_seconds`: per output token; None: every step may have `most`.

        Raises:
            ValueError: a target that is not positive.
        """
        if target_seconds is not None and not target_seconds > 0:
            raise ValueError(f"the target must be a positive time per output token, got {target_seconds} s")
        self._most = most
        self._target = target_seconds
        self._tokens = float(most)

    @property
    def tokens(self) -> int:
        """Tokens of a step in which answers are being written; 1 at least."""
        return int(self._tokens)

    def beside(self, answering: int, left: int, *, started: bool) -> int:
        """Tokens for prompts and drafts in a step in which so many answers get their next token.

        left: what `most` leaves. started: there are prompts that have begun, so they go on, if slowly.
        """
        if self._target is None or not answering:
            return left
        return min(left, max(self.tokens - answering, LEAST_CHUNK if started else 0))

    def rows(self, most: int) -> int:
        """How many requests may run: each will want a token of every step."""
        return min(most, self.tokens)

    def timed(self, plan: StepPlan, results: Sequence[RowResult], seconds: float) -> None:
        """A step took so long, everything included."""
        if self._target is None:
            return
        answering = [
            len(result.token_ids)
            for row, result in zip(plan.rows, results, strict=True)
            if row.sample and row.start >= row.num_prompt_tokens
        ]
        if not (generated := sum(answering)):
            return
        per_token = seconds * len(answering) / generated
        share = self._target / per_token
        if share < 1:
            # Of this step's size, not of the budget: rows that run cannot be taken back, and the same measurement
            # repeated must not bring the budget further down than it says.
            self._tokens = min(self._tokens, max(_MOST_DOWN * self._tokens, share * plan.num_tokens))
        elif plan.num_tokens >= _USED * self.tokens:
            self._tokens *= min(math.sqrt(share), _MOST_UP)
        self._tokens = max(1.0, min(self._tokens, float(self._most)))
