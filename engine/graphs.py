"""Decode steps as recorded device work (CUDA graphs): the host starts hundreds of kernels with one call.

A recording is fixed in everything but the contents of its tensors, so there is one for each of some batch sizes
("buckets"), and a step is padded up to the next one with rows of nobody (`geometry.padded`). Lengths and pages are read
on the device, so a recording serves every length. Steps with longer rows: see `engine/piecewise.py`. The buckets are
recorded before the first request, largest first, so that the smaller ones use its memory.

`Recorder` is the seam: `CudaRecorder` on a GPU, a tape for a CPU in tests (`bench/gpu/tape.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from engine.geometry import padded
from engine.inputs import StepInputs
from engine.layers.attention import AttentionBackend, StepGeometry
from engine.models.decoder import Decoder

Work = Callable[[], None]


class Recorder(Protocol):
    """Records device work. What it launches must not depend on values on the host, and must not wait for the device."""

    def record(self, work: Work) -> Work:
        """Run `work` and return what does the same again, with the same tensors as they are by then."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        """See `Recorder`. Raises RuntimeError, torch's own, for work that cannot be recorded."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):  # once as it is: libraries allocate and choose kernels at their first call
            work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        replay: Work = graph.replay
        return replay


def buckets(max_rows: int) -> tuple[int, ...]:
    """Batch sizes to record, ascending, the last one `max_rows`: 1, 2, 4, then every 8th, from 64 every 16th, from 256
    every 32nd. So from 32 rows on less than a quarter of a step is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


class DecodeGraphs:
    """The recorded decode steps of one decoder."""

    def __init__(self, decoder: Decoder, attention: AttentionBackend, recorder: Recorder, inputs: StepInputs) -> None:
        """`attention` and `inputs` must keep their tensors where they are from step to step."""
        self._decoder = decoder
        self._attention = attention
        self._recorder = recorder
        config = attention.config
        self.buckets = buckets(min(config.max_num_seqs, config.max_num_batched_tokens))
        most = self.buckets[-1]
        self._token_ids, self._positions = inputs.recorded("token_ids"), inputs.recorded("positions")
        self._all = torch.arange(most, device=config.device)
        self._hidden = torch.zeros(most, decoder.spec.hidden_size, dtype=config.dtype, device=config.device)
        self._replays: dict[int, Work] = {}
        self.num_replays = 0

    def capture(self) -> None:
        """Record every bucket. Writes to no page. Raises RuntimeError where the model's work cannot be recorded."""
        for rows in reversed(self.buckets):
            self._attention.begin(self._longest(rows))
            self._replays[rows] = self._recorder.record(lambda rows=rows: self._step(rows))  # type: ignore[misc]

    def _longest(self, rows: int) -> StepGeometry:
        """A step of rows of nobody that says to be as long as any: kernels are started for that many keys."""
        config = self._attention.config
        nobody = StepGeometry(
            query_starts=np.zeros(1, dtype=np.int32),
            seq_lens=np.zeros(0, dtype=np.int32),
            block_tables=np.zeros((0, 1), dtype=np.int32),
            positions=np.zeros(0, dtype=np.int64),
            slots=np.zeros(0, dtype=np.int64),
            num_decode_rows=0,
            max_query_len=1,
            max_seq_len=1,
        )
        return replace(padded(nobody, rows), max_seq_len=config.max_blocks_per_seq * config.block_size)

    def _step(self, rows: int) -> None:
        states = self._decoder.hidden(self._token_ids[:rows], self._positions[:rows], self._all[:rows])
        self._hidden[:rows].copy_(states)

    def serves(self, step: StepGeometry) -> bool:
        """Whether this step can be replayed: it has rows of one token only."""
        return bool(self._replays) and step.num_decode_rows == step.num_rows <= self.buckets[-1]

    def hidden(self, step: StepGeometry) -> torch.Tensor:
        """The normed state of every row, `[rows, hidden]`, valid until the next call.

        The inputs have been sent: behind the step's own there is what was there before, for the rows of nobody. Begins
        the step at the attention backend itself.
        """
        rows = self.buckets[bisect_left(self.buckets, step.num_rows)]
        self._attention.begin(padded(step, rows))
        self._replays[rows]()
        self.num_replays += 1
        return self._hidden[: step.num_rows]
