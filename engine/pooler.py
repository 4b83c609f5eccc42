"""Vectors of texts in place of tokens: which states of a step are wanted, and what each row adds to its text's vector.

A text may be computed in several steps, so a row yields the sum over those of its positions that count, and the
scheduler adds the rows up. A score head is linear, so it may be applied to each of the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.models.tensors import FloatArray
from engine.types import RowResult, StepRow

_NOT_FINITE = "the model computed a value that is not finite"


@dataclass(frozen=True, slots=True)
class Wanted:
    """States of one step: first the last one of every row, to be looked at, then those that are pooled, row by row."""

    indices: npt.NDArray[np.int64]  # among the step's tokens
    counts: list[int]  # per row, how many are pooled


class Pooler:
    """Makes vectors of states or, with a head, scores."""

    def __init__(self, head: FloatArray | None, device: torch.device) -> None:
        """`head`: float32 `[labels, hidden]`."""
        self._head = None if head is None else torch.from_numpy(np.array(head, dtype=np.float32)).to(device)

    def wanted(self, rows: Sequence[StepRow], query_starts: npt.NDArray[np.int32]) -> Wanted:
        """From a plan's rows and where they begin among the step's tokens, as `StepGeometry` has it."""
        pieces = [query_starts[1:].astype(np.int64) - 1]
        counts: list[int] = []
        for row, first in zip(rows, query_starts[:-1].tolist(), strict=True):
            pool = row.pool or range(0)
            part = range(max(row.start, pool.start), min(row.start + len(row.token_ids), pool.stop))
            pieces.append(first - row.start + np.arange(part.start, part.stop, dtype=np.int64))
            counts.append(len(part))
        return Wanted(np.concatenate(pieces), counts)

    def results(
        self, rows: Sequence[StepRow], wanted: Wanted, hidden: torch.Tensor, faults: Mapping[int, str]
    ) -> list[RowResult]:
        """One per row. hidden: `[rows + pooled, hidden]`, the states `wanted`; `faults`: of rows, by their places.

        A value that is not finite reaches a row's last state through attention, so that one is looked at.
        """
        count = len(rows)
        finite = torch.isfinite(hidden[:count].float().sum(dim=-1)).tolist()
        parts = hidden[count:].float().split_with_sizes(wanted.counts)
        pooled = [part.sum(dim=0, dtype=torch.float32) for part in parts]
        results: list[RowResult] = []
        for i, (row, vector) in enumerate(zip(rows, pooled, strict=True)):
            if i in faults or not finite[i]:
                results.append(RowResult(row.request_id, error=faults.get(i, _NOT_FINITE)))
            elif wanted.counts[i]:
                made = vector if self._head is None else self._head @ vector
                results.append(RowResult(row.request_id, pooled=made.cpu().numpy()))
            else:
                results.append(RowResult(row.request_id))
        return results
