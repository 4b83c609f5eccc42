"""A step of the model runner from its states to its results, and what is done where it finds too little memory.

`ModelFlight.draw` begins everything that is made of the states; `results` waits for it. Each row's last state is looked
at before it yields anything: a NaN anywhere in a row reaches its last token through attention, so one look suffices,
and no other row can see it. A row with drafts is looked at and sampled at each of its positions
(`engine/spec/verify.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.layers.staging import Download, upload
from engine.limits import DRAWN_AT_ONCE
from engine.memory import EngineMemoryError
from engine.pooler import Wanted
from engine.sampler import Drawn
from engine.sampling.prompt import PromptScores
from engine.spec.verify import collapse, expand
from engine.trace import trace
from engine.types import RowResult, StepPlan, StepRow, TokenLogprob, nothing

if TYPE_CHECKING:
    from engine.runner import ModelRunner

logger = logging.getLogger(__name__)

_BAD_STATE = "the model computed a value that is not finite"
_BAD_LOGIT = "the model computed a logit that is not finite"


class ModelFlight:
    """One step whose forward pass has begun."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        hidden: torch.Tensor,
        faults: Mapping[int, str],
        *,
        pooled: Wanted | None = None,
        scores: PromptScores | None = None,
    ) -> None:
        """hidden: `[states, hidden]`, of every position that is sampled and then of those that `scores` asks for, or
        those that are `pooled`; `faults`: of rows, by their places."""
        self.is_followed = False  # by a step that begins before this one is over, and may await its tokens
        self._runner, self._plan = runner, plan
        self._hidden = hidden
        self._faults = faults
        self._pooled, self._scores = pooled, scores
        self._positions: list[StepRow] = []
        self._sampling: list[int] = []  # among the positions
        self._drawn: Drawn | None = None
        self._siblings: dict[int, list[Drawn]] = {}  # by row
        self._finite: list[Download] = []  # of the positions' states, and of the logits of those that are sampled
        self._prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}

    @torch.inference_mode()
    def draw(self) -> None:
        """See `engine.types.Flight`. Raises EngineMemoryError."""
        trace.phase("sample")
        with memory_errors(self._plan, self._hidden.device):
            if self._pooled is None:
                self._draw()

    def _draw(self) -> None:
        runner, rows = self._runner, self._plan.rows
        self._positions = positions = expand(rows)
        hidden, scored = self._hidden[: len(positions)], self._hidden[len(positions) :]
        first = list(accumulate((row.num_drafts + 1 for row in rows), initial=0))
        bad = {first[row] for row in self._faults}
        self._sampling = sampling = [i for i, row in enumerate(positions) if row.sample and i not in bad]
        self._finite = [Download(torch.isfinite(hidden.float().sum(dim=-1)))]
        if sampling:
            states = hidden
            if len(sampling) < len(positions):
                states = hidden.index_select(0, upload(np.array(sampling, dtype=np.int64), hidden.device))
            logits = runner.decoder.logits(states)
            self._finite.append(Download(torch.isfinite(logits.sum(dim=-1))))
            self._drawn = runner.sampler.draw(logits, [positions[i] for i in sampling])
            if self.is_followed:
                runner.drawn.keep([positions[i].request_id for i in sampling], self._drawn.tokens)
        at_once = min(DRAWN_AT_ONCE, runner.attention.config.max_num_seqs)
        for i, row in enumerate(rows):
            if row.draws and i not in self._faults:
                logits = runner.decoder.logits(hidden[first[i] : first[i] + 1])
                self._siblings[i] = runner.sampler.draw_siblings(logits, row, at_once=at_once)
        if self._scores is not None:
            self._prompt_logprobs = self._scores.compute(scored, runner.decoder.logits)

    @torch.inference_mode()
    def results(self) -> list[RowResult]:
        """See `engine.types.Flight`. Raises EngineMemoryError."""
        trace.phase("wait")
        with memory_errors(self._plan, self._hidden.device):
            return self._results()

    def _results(self) -> list[RowResult]:
        runner, rows = self._runner, self._plan.rows
        if self._pooled is not None and runner.pooler is not None:
            return runner.pooler.results(rows, self._pooled, self._hidden, self._faults)
        results = collapse(rows, self._of_positions())
        for i, drawn in self._siblings.items():
            if results[i].error is None:
                draws = tuple(result for part in drawn for result in part.results())
                results[i] = replace(results[i], draws=draws)
        if runner.reader is not None:
            runner.reader.follow(rows, torch.cat(runner.decoder.tapped, dim=-1), results)
        for i, entries in self._prompt_logprobs.items():
            if results[i].error is None:
                results[i] = replace(results[i], prompt_logprobs=entries)
        return results

    def _of_positions(self) -> list[RowResult]:
        """One result per position: what was drawn, unless there is a fault."""
        first = accumulate((row.num_drafts + 1 for row in self._plan.rows), initial=0)
        faults = {at: self._faults[row] for row, at in enumerate(first) if row in self._faults}
        results = [RowResult(row.request_id, error=faults.get(i)) for i, row in enumerate(self._positions)]
        states, *logits = (flags.tolist() for download in self._finite for flags in download.get())
        if self._drawn is not None:
            for i, is_finite, result in zip(self._sampling, logits[0], self._drawn.results(), strict=True):
                results[i] = result if is_finite else RowResult(result.request_id, error=_BAD_LOGIT)
        for i, is_finite in enumerate(states):
            if not is_finite and i not in faults:
                results[i] = RowResult(results[i].request_id, error=_BAD_STATE)
        return results


def execute(runner: ModelRunner, plan: StepPlan, meanwhile: Callable[[], None]) -> list[RowResult]:
    """Run a step to its end; see `ModelRunner.execute`."""
    if not plan.rows:
        return []
    began = False
    try:
        flight = runner.begin(plan)
        trace.phase("meanwhile")
        began = True
        meanwhile()
        flight.draw()
        return flight.results()
    except EngineMemoryError as error:
        if runner.is_led_by_others:
            raise
        logger.warning("%s; its rows are run in pieces", error)
        if not began:
            meanwhile()
        return _in_pieces(runner, plan, error)


def _in_pieces(runner: ModelRunner, plan: StepPlan, error: EngineMemoryError) -> list[RowResult]:
    """The two halves of a step that found too little memory, one after the other; a single row has the error.

    What was computed of it is computed again, to the same keys and values in the same pages.
    """
    if len(plan.rows) == 1:
        return [RowResult(plan.rows[0].request_id, error=f"{error} (also alone)")]
    half = len(plan.rows) // 2
    results: list[RowResult] = []
    for rows in (plan.rows[:half], plan.rows[half:]):
        results += execute(runner, StepPlan(rows, copies=plan.copies), nothing)  # copied once, by whoever can first
    return results


@contextmanager
def memory_errors(plan: StepPlan, device: torch.device) -> Iterator[None]:
    """Turn torch's error into one that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the failed step left in pieces
        raise EngineMemoryError(
            f"a step of {plan.num_tokens} tokens in {len(plan.rows)} rows found too little memory on the GPU: "
            "lower max_num_batched_tokens, max_num_seqs or kv_cache_bytes"
        ) from error
