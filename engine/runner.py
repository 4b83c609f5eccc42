"""Turns step plans into tokens: one forward pass over mixed prefill and decode rows, then sampling.

The runner owns every tensor: weights, KV pages, scratch. Each row's last state is checked for finiteness before it
yields anything: a NaN anywhere in a row reaches its last token through attention, so one look suffices, and no other
row can see it. A row with drafts is looked at and sampled at each of its positions (`engine/spec/verify.py`).
`engine/load_runner.py` builds one from a model file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from engine.adapters.low_rank import AdapterWeights, StepAdapters
from engine.adapters.peft import read_adapter
from engine.geometry import sampled_tokens, step_geometry
from engine.graphs import DecodeGraphs, Recorder
from engine.layers.attention import AttentionBackend, LongArray, StepGeometry
from engine.limits import DRAWN_AT_ONCE
from engine.memory import (
    EngineMemoryError,
    MemoryLedger,
    kv_bytes_per_token,
    scratch_bytes,
)
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.parallel.calls import CopyPages, Forward
from engine.parallel.peers import Peers
from engine.pooler import Pooler
from engine.sampler import Sampler
from engine.sampling.prompt import PromptScores
from engine.spec.state_reader import StateReader
from engine.spec.verify import collapse, expand
from engine.trace import trace
from engine.types import CacheGeometry, RowResult, StepPlan, StepRow, nothing

logger = logging.getLogger(__name__)


class ModelRunner:
    """`Runner` for one model on one device. Not thread-safe: one step at a time."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        max_model_len: int,
        precision: str = "auto",
        max_num_drafts: int = 0,
        pooler: Pooler | None = None,
        adapter_bytes: int = 0,
        peers: Peers | None = None,
    ) -> None:
        """`pooler`: what makes vectors of texts, in place of the sampler. `adapter_bytes`: what the adapters that come
        later may take; 0: there will be none. `peers`: the ranks that have the other parts of the model."""
        config = attention.config
        self.spec: ModelSpec = decoder.spec
        self.max_model_len = max_model_len
        per_token = kv_bytes_per_token(self.spec, config.dtype.itemsize, fp8=config.fp8)
        self.geometry = CacheGeometry(config.num_blocks, config.block_size, per_token)
        self.attention = attention
        self.decoder = decoder
        self.sampler = sampler
        self._config = config
        self._precision = precision
        self._max_num_drafts = max_num_drafts
        self._adapter_bytes = adapter_bytes
        self._peers = peers
        self.adapters = StepAdapters(config.device)
        if adapter_bytes:
            decoder.adapt(self.adapters)
        self._pooler = pooler
        self._reader: StateReader | None = None
        self._graphs: DecodeGraphs | None = None

    def record(self, recorder: Recorder) -> None:
        """Record decode steps, to be replayed from now on. Raises RuntimeError where they cannot be recorded."""
        graphs = DecodeGraphs(self.decoder, self.attention, recorder)
        with torch.inference_mode():
            graphs.capture()
        self._graphs = graphs

    def show_states(self, reader: StateReader) -> None:
        """Show every step's inner states to `reader`, from now on; recorded steps do not show them."""
        self._graphs = None
        self._reader = reader
        self.decoder.tap(reader.taps)

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] = nothing) -> list[RowResult]:
        """One result per row, in order; see `engine.types.Runner`.

        Raises ValueError for a plan that breaks the contract (positions past `max_model_len`, a short block table,
        decode rows not first); EngineMemoryError when the GPU's memory runs out, which the next step need not share.
        """
        try:
            return self._execute(plan, meanwhile) if plan.rows else []
        except torch.OutOfMemoryError as error:
            if self._config.device.type == "cuda":
                torch.cuda.empty_cache()  # what the failed step left in pieces
            raise EngineMemoryError(
                f"a step of {plan.num_tokens} tokens in {len(plan.rows)} rows found too little memory on the GPU: "
                "lower max_num_batched_tokens, max_num_seqs or kv_cache_bytes"
            ) from error

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, meanwhile: Callable[[], None]) -> list[RowResult]:
        rows = plan.rows
        trace.phase("prepare")
        geometry = step_geometry(rows, self._config.block_size, self.max_model_len)
        token_ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows])
        row_faults = self._token_faults(token_ids, geometry) | self.adapters.begin(rows, geometry.query_starts)
        if plan.copies:
            self.copy_pages(plan.copies)
        trace.phase("forward")
        if self._pooler is not None:
            wanted = self._pooler.wanted(rows, geometry.query_starts)
            hidden = self.forward(token_ids, geometry, wanted.indices)
            meanwhile()
            return self._pooler.results(rows, wanted, hidden, row_faults)
        scores = PromptScores.wanted(rows, geometry.query_starts)
        sampled = sampled_tokens(rows, geometry)
        hidden = self.forward(token_ids, geometry, np.concatenate([sampled, scores.indices]))
        trace.phase("meanwhile")
        meanwhile()
        trace.phase("sample")
        positions = expand(rows)
        hidden, scored = hidden[: len(positions)], hidden[len(positions) :]
        first = list(accumulate((row.num_drafts + 1 for row in rows), initial=0))
        faults = {first[row]: fault for row, fault in row_faults.items()}
        finite = torch.isfinite(hidden.float().sum(dim=-1))
        results = [RowResult(row.request_id, error=faults.get(i)) for i, row in enumerate(positions)]
        self._sample(hidden, positions, faults, results)
        for i, is_finite in enumerate(finite.tolist()):  # asked last: the answer waits for the device
            if not is_finite and i not in faults:
                results[i] = RowResult(positions[i].request_id, error="the model computed a value that is not finite")
        results = collapse(rows, results)
        for i, row in enumerate(rows):
            if row.draws and results[i].error is None:
                logits = self.decoder.logits(hidden[first[i] : first[i] + 1])
                at_once = min(DRAWN_AT_ONCE, self._config.max_num_seqs)
                results[i] = replace(results[i], draws=self.sampler.draw_siblings(logits, row, at_once=at_once))
        if self._reader is not None:
            self._reader.follow(rows, torch.cat(self.decoder.tapped, dim=-1), results)
        for i, entries in scores.compute(scored, self.decoder.logits).items():
            if results[i].error is None:
                results[i] = replace(results[i], prompt_logprobs=entries)
        return results

    def forward(self, token_ids: LongArray, step: StepGeometry, wanted: LongArray) -> torch.Tensor:
        """Begin the step and run it: states `[rows, hidden]` of the tokens `wanted`, indices into the step's."""
        if self._peers is not None:
            self._peers.announce(Forward.of(step, token_ids, wanted))
        if self._graphs is not None and not self.adapters.groups and self._graphs.serves(step):
            states = self._graphs.hidden(token_ids, step)  # of every row, in order
            return states if len(wanted) == len(states) else states[torch.from_numpy(wanted)]
        self.attention.begin(step)
        arrays = (token_ids, step.positions, wanted)
        return self.decoder.hidden(*(torch.from_numpy(array).to(self._config.device) for array in arrays))

    def answer_logits(self, rows: int) -> None:
        """On a rank other than 0: compute what is here of the logits of `rows` states that rank 0 has."""
        if self.decoder.output is not None:
            config = self._config
            self.decoder.output(torch.empty((rows, self.spec.hidden_size), dtype=config.dtype, device=config.device))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `StepPlan.copies`. All sources are read before any page is written."""
        if self._peers is not None:
            self._peers.announce(CopyPages(list(copies)))
        sources, targets = torch.tensor(copies, device=self._config.device).unbind(1)
        pages = self.attention.kv_cache
        pages.index_copy_(2, targets, pages.index_select(2, sources))
        if self._reader is not None:
            self._reader.copy_pages(sources, targets)

    def _sample(
        self, hidden: torch.Tensor, rows: Sequence[StepRow], faults: dict[int, str], results: list[RowResult]
    ) -> None:
        """Fill in the results of the rows that sample."""
        sampling = [i for i, row in enumerate(rows) if row.sample and i not in faults]
        if not sampling:
            return
        if len(sampling) < len(rows):
            hidden = hidden[sampling]
        logits = self.decoder.logits(hidden)
        finite = torch.isfinite(logits.sum(dim=-1)).tolist()
        sampled = self.sampler.sample(logits, [rows[i] for i in sampling])
        for i, is_finite, result in zip(sampling, finite, sampled, strict=True):
            if is_finite:
                results[i] = result
            else:
                results[i] = RowResult(rows[i].request_id, error="the model computed a logit that is not finite")

    def _token_faults(
        self, token_ids: np.ndarray[tuple[int], np.dtype[np.int64]], step: StepGeometry
    ) -> dict[int, str]:
        """Rows with token ids outside the vocabulary; those ids are replaced, so that the other rows can run."""
        bad = (token_ids < 0) | (token_ids >= self.spec.vocab_size)
        if not bad.any():
            return {}
        positions = bad.nonzero()[0]
        owners = np.searchsorted(step.query_starts, positions, side="right") - 1
        faults = {
            int(row): f"token id {int(token_ids[at])} is outside the vocabulary of {self.spec.vocab_size}"
            for row, at in zip(owners, positions, strict=True)
        }
        token_ids[bad] = 0
        return faults

    def ledger(self) -> MemoryLedger:
        """The memory this runner holds."""
        config = self._config
        return MemoryLedger(
            weights_bytes=self.decoder.num_bytes,
            kv_cache_bytes=self.attention.kv_cache.nbytes,
            scratch_bytes=scratch_bytes(
                self.spec,
                config.max_num_batched_tokens,
                config.max_num_seqs + self._max_num_drafts,
                config.dtype.itemsize,
            ),
            kv_bytes_per_token=self.geometry.bytes_per_token,
            kv_capacity_tokens=(config.num_blocks - 1) * config.block_size,
            adapter_bytes=self._adapter_bytes,
        )

    def load_adapter(self, folder: Path, *, most_rank: int) -> AdapterWeights:
        """The adapter in `folder`, ready for `adapters.loaded`; may be called beside the steps.

        Raises ModelFileError as `read_adapter`.
        """
        adapter = read_adapter(folder, self.spec, most_rank=most_rank)
        return AdapterWeights(adapter, self._config.dtype, self._config.device)

    @property
    def kv_element_bytes(self) -> int:
        """Of one number in the KV cache."""
        return self._config.dtype.itemsize

    def describe(self) -> dict[str, object]:
        """Model, device, numbers and memory, ready for JSON."""
        return {
            "architecture": self.spec.architecture,
            "parameters": self.spec.num_parameters,
            "device": str(self._config.device),
            "precision": self._precision,
            "dtype": str(self._config.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "max_model_len": self.max_model_len,
            "block_size": self._config.block_size,
            "num_blocks": self._config.num_blocks,
            "memory": self.ledger().as_dict(),
        }
