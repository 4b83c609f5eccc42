"""The geometry of a step: a plan's rows laid end to end, as attention and the model see them. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.layers.attention import LongArray, StepGeometry
from engine.types import StepRow


def sampled_tokens(rows: Sequence[StepRow], step: StepGeometry) -> LongArray:
    """Of each row its last token and, with drafts, as many before it: indices into the step's tokens, int64."""
    last = step.query_starts[1:].astype(np.int64) - 1
    if not any(row.num_drafts for row in rows):
        return last
    return np.concatenate([np.arange(end - row.num_drafts, end + 1) for row, end in zip(rows, last, strict=True)])


def step_geometry(rows: Sequence[StepRow], block_size: int, max_model_len: int) -> StepGeometry:
    """The rows of a plan laid end to end. Raises ValueError where they break the plan's contract."""
    lengths = [len(row.token_ids) for row in rows]
    num_decode_rows = next((i for i, length in enumerate(lengths) if length != 1), len(rows))
    widths = [-(-(row.start + length) // block_size) for row, length in zip(rows, lengths, strict=True)]
    tables = np.zeros((len(rows), max(widths)), dtype=np.int32)
    for i, (row, length, width) in enumerate(zip(rows, lengths, widths, strict=True)):
        if length < 1 or row.start < 0 or row.start + length > max_model_len:
            raise ValueError(
                f"request {row.request_id}: positions {row.start} to {row.start + length - 1} do not fit "
                f"max_model_len {max_model_len}"
            )
        if len(row.block_table) < width:
            raise ValueError(f"request {row.request_id}: {len(row.block_table)} pages for {row.start + length} tokens")
        tables[i, :width] = row.block_table[:width]
    starts = np.array([row.start for row in rows], dtype=np.int64)
    counts = np.array(lengths, dtype=np.int64)
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    owners = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(query_starts[-1]) - query_starts[owners] + starts[owners]
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    seq_lens = (starts + counts).astype(np.int32)
    return StepGeometry(
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=tables,
        positions=positions,
        slots=slots,
        num_decode_rows=num_decode_rows,
        max_query_len=max(lengths),
        max_seq_len=int(seq_lens.max()),
    )


def padded(step: StepGeometry, rows: int) -> StepGeometry:
    """A step of decode rows only, with rows of nobody added behind them until there are `rows`.

    A row of nobody has one token, at position 0 of the null page. Its slot is -1: nothing is written for it, so the
    null page stays zero, and what it computes is finite. Raises ValueError for a step with longer rows, or with more.
    """
    missing = rows - step.num_rows
    if missing < 0 or step.num_decode_rows != step.num_rows:
        raise ValueError(
            f"a step of {step.num_rows} rows, {step.num_decode_rows} of them of one token, is no decode step of {rows}"
        )
    return replace(
        step,
        query_starts=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.pad(step.seq_lens, (0, missing), constant_values=1),
        block_tables=np.pad(step.block_tables, ((0, missing), (0, 0))),
        positions=np.pad(step.positions, (0, missing)),
        slots=np.pad(step.slots, (0, missing), constant_values=-1),
        num_decode_rows=rows,
    )
