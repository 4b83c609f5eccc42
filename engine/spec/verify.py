"""How drafts are checked: the model's own choice is made at every position, and a draft holds if it is that choice.

A row with k drafts has logits at k + 1 positions. `expand` makes a row of each position, with the drafts before it as
part of its text, so the sampler does there exactly what it would do in a step of its own: penalties, bias, masks,
truncation, log-probabilities, and the number that the request's seed gives to this position. `collapse` keeps the
choices up to and with the first that differs from its draft.

Why this is lossless: whatever was proposed, the tokens are the ones that the sampler chooses without drafts. So there
is no second distribution to correct for and no further randomness, and a seed gives the same text. Where drafts come
from a look-up it accepts as often as rejection sampling (arXiv 2211.17192): that accepts draft x with probability p(x),
which is how often the sampler chooses x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from engine.types import Bitmask, Masks, RowResult, StepRow


def expand(rows: Sequence[StepRow]) -> list[StepRow]:
    """One row per position that is sampled, in order; rows without drafts stay as they are."""
    expanded: list[StepRow] = []
    for row in rows:
        expanded.extend(_positions(row) if row.num_drafts else (row,))
    return expanded


def _positions(row: StepRow) -> Iterator[StepRow]:
    first = len(row.token_ids) - row.num_drafts - 1
    drafts = row.token_ids[first + 1 :]
    masks = None if row.grammar is None else _DraftMasks(row.grammar, drafts)
    for held in range(row.num_drafts + 1):
        yield replace(
            row,
            token_ids=row.token_ids[first + held : first + held + 1],
            start=row.start + first + held,
            all_token_ids=[*row.all_token_ids, *drafts[:held]],
            num_drafts=0,
            grammar=None if masks is None else _MaskAfter(masks, held),
        )


class _DraftMasks:
    """A grammar's masks at all positions of a row, made in one go when the first is asked for."""

    def __init__(self, grammar: Masks, drafts: Sequence[int]) -> None:
        self._grammar = grammar
        self._drafts = drafts
        self._filled: Bitmask | None = None

    def copy(self, held: int, out: Bitmask) -> None:
        """Write the mask behind `held` drafts to `out`, `[words]`.

        Where the grammar refuses one of these drafts every token is allowed: that position is not looked at.
        """
        if self._filled is None:
            filled = np.empty((len(self._drafts) + 1, len(out)), dtype=np.int32)
            filled[self._grammar.fill(self._drafts, filled) :] = -1
            self._filled = filled
        out[:] = self._filled[held]


class _MaskAfter:
    """`Masks` of one position: those of the row, behind its first `held` drafts."""

    def __init__(self, masks: _DraftMasks, held: int) -> None:
        self._masks = masks
        self._held = held

    def fill(self, drafts: Sequence[int], out: Bitmask) -> int:
        if drafts:
            raise ValueError("a position of a row has no drafts of its own")
        self._masks.copy(self._held, out[0])
        return 1


def collapse(rows: Sequence[StepRow], results: Sequence[RowResult]) -> list[RowResult]:
    """One result per row of what the rows of `expand` yielded. An error behind a draft that fails is nobody's."""
    collapsed: list[RowResult] = []
    position = iter(results)
    for row in rows:
        own = [next(position) for _ in range(row.num_drafts + 1)]
        collapsed.append(own[0] if not row.num_drafts else _accepted(row, own))
    return collapsed


def _accepted(row: StepRow, own: Sequence[RowResult]) -> RowResult:
    drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
    held = 0
    for result, draft in zip(own, drafts, strict=False):  # the last result has no draft to meet
        if result.error is not None or result.token_id != draft:
            break
        held += 1
    chosen = own[: held + 1]
    return RowResult(
        row.request_id,
        tuple(token for result in chosen for token in result.token_ids),
        tuple(logprob for result in chosen for logprob in result.logprobs),
        chosen[-1].error,
    )
