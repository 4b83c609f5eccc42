"""What rank 0 tells the others to do with it.

Rank 0 alone knows of requests. Whatever it does that takes all ranks it announces first; the others do the same with
their part, in the same order. So ranks cannot disagree on what comes next: there is one that decides.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

from engine.layers.attention import IntArray, LongArray, StepGeometry


class Forward(msgspec.Struct, tag=True):
    """Run a step's tokens through the blocks. Arrays as bytes: see `StepGeometry`."""

    query_starts: bytes
    seq_lens: bytes
    block_tables: bytes
    positions: bytes
    slots: bytes
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    token_ids: bytes
    wanted: bytes

    @classmethod
    def of(cls, step: StepGeometry, token_ids: LongArray, wanted: LongArray) -> Self:
        """`token_ids`: int64 `[tokens]`; `wanted`: int64, of which of them the state is wanted."""
        return cls(
            query_starts=step.query_starts.tobytes(),
            seq_lens=step.seq_lens.tobytes(),
            block_tables=step.block_tables.tobytes(),
            positions=step.positions.tobytes(),
            slots=step.slots.tobytes(),
            num_decode_rows=step.num_decode_rows,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            token_ids=token_ids.tobytes(),
            wanted=wanted.tobytes(),
        )

    def step(self) -> StepGeometry:
        """The geometry that was given to `of`."""
        seq_lens = _ints(self.seq_lens)
        return StepGeometry(
            query_starts=_ints(self.query_starts),
            seq_lens=seq_lens,
            block_tables=_ints(self.block_tables).reshape(len(seq_lens), -1),
            positions=longs(self.positions),
            slots=longs(self.slots),
            num_decode_rows=self.num_decode_rows,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
        )


class Logits(msgspec.Struct, tag=True):
    """Multiply `rows` states, which rank 0 will hand out, by the part of the output matrix held here."""

    rows: int


class CopyPages(msgspec.Struct, tag=True):
    """See `StepPlan.copies`."""

    copies: list[tuple[int, int]]


Call = Forward | Logits | CopyPages


def longs(data: bytes) -> LongArray:
    """The int64 array of these bytes, to be written to."""
    return np.frombuffer(bytearray(data), dtype=np.int64)


def _ints(data: bytes) -> IntArray:
    return np.frombuffer(bytearray(data), dtype=np.int32)
