"""Turns step plans into tokens: one forward pass over mixed prefill and decode rows, then sampling.

The runner owns every tensor: weights, KV pages, scratch. Here is the way to a step's states; what is made of them, once
they are on their way, is in `engine/flight.py`. Nothing here waits for the device.
`engine/load_runner.py` builds one from a model file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.adapters.low_rank import AdapterWeights, StepAdapters
from engine.adapters.peft import read_adapter
from engine.flight import ModelFlight, execute, memory_errors
from engine.geometry import sampled_tokens, step_geometry
from engine.graphs import DecodeGraphs, Recorder
from engine.inputs import Awaited, LastDrawn, StepInputs
from engine.layers.attention import AttentionBackend, LongArray, StepGeometry
from engine.layers.staging import upload
from engine.memory import MemoryLedger, kv_bytes_per_token, scratch_bytes
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.parallel.calls import CopyPages, Forward
from engine.parallel.peers import Peers
from engine.piecewise import MOST_TOKENS, PiecewiseGraphs
from engine.pooler import Pooler
from engine.sampler import Sampler
from engine.sampling.prompt import PromptScores
from engine.spec.state_reader import StateReader
from engine.trace import trace
from engine.types import AWAITED, CacheGeometry, RowResult, StepPlan, StepRow, nothing

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
        self.pooler = pooler
        self.reader: StateReader | None = None
        self.drawn = LastDrawn()
        # What was copied for a step that may have to be run again: by then its sources may have been written to.
        self._copied: list[tuple[int, int]] | None = None
        self._inputs = StepInputs(config, staged=config.device.type == "cuda")
        self._graphs: DecodeGraphs | None = None
        self._pieces: PiecewiseGraphs | None = None

    @property
    def is_led_by_others(self) -> bool:
        """Whether other ranks take part in every step, so that none can be begun again."""
        return self._peers is not None

    def record(self, recorder: Recorder, *, most_tokens: int = MOST_TOKENS) -> None:
        """Record steps, to be replayed from now on: of single tokens, and with prompts, these up to `most_tokens`.

        Raises RuntimeError where they cannot be recorded.
        """
        inputs = StepInputs(self._config, staged=True)
        decode = DecodeGraphs(self.decoder, self.attention, recorder, inputs)
        pieces = PiecewiseGraphs(self.decoder, self.attention, recorder, inputs, most_tokens)
        with torch.inference_mode():
            decode.capture()
            pieces.capture()
        self._inputs, self._graphs, self._pieces = inputs, decode, pieces

    def show_states(self, reader: StateReader) -> None:
        """Show every step's inner states to `reader`, from now on; recorded steps do not show them."""
        self._graphs = self._pieces = None
        self.reader = reader
        self.decoder.tap(reader.taps)

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] = nothing) -> list[RowResult]:
        """One result per row, in order; see `engine.types.Runner`.

        A step that finds too little memory is run again in pieces, down to single rows; a row that finds too little by
        itself has an error. Raises ValueError for a plan that breaks the contract (positions past `max_model_len`, a
        short block table, decode rows not first).
        """
        results = execute(self, plan, meanwhile)
        self._copied = None
        return results

    def launch(self, plan: StepPlan) -> ModelFlight:
        """As `begin`, for a step whose tokens the next one may await; see `engine.types.AheadRunner`."""
        flight = self.begin(plan)
        flight.is_followed = True
        return flight

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> ModelFlight:
        """Begin a step of at least one row.

        Raises ValueError as `execute`, EngineMemoryError when the GPU's memory runs out, which the next step need not
        share.
        """
        with memory_errors(plan, self._config.device):
            return self._begin(plan)

    def _begin(self, plan: StepPlan) -> ModelFlight:
        rows = plan.rows
        trace.phase("prepare")
        geometry = step_geometry(rows, self._config.block_size, self.max_model_len)
        token_ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows])
        awaited = self._awaited(rows, token_ids)
        faults = self._token_faults(token_ids, geometry) | self.adapters.begin(rows, geometry.query_starts)
        if plan.copies and plan.copies is not self._copied:
            self.copy_pages(plan.copies)
            self._copied = plan.copies
        trace.phase("forward")
        if self.pooler is not None:
            pooled = self.pooler.wanted(rows, geometry.query_starts)
            hidden = self.forward(token_ids, geometry, pooled.indices)
            return ModelFlight(self, plan, hidden, faults, pooled=pooled)
        scores = PromptScores.wanted(rows, geometry.query_starts)
        wanted = np.concatenate([sampled_tokens(rows, geometry), scores.indices])
        return ModelFlight(self, plan, self.forward(token_ids, geometry, wanted, awaited), faults, scores=scores)

    def _awaited(self, rows: Sequence[StepRow], token_ids: LongArray) -> Awaited | None:
        """Which tokens are still on the device. Those that are known by now are put into `token_ids`."""
        places: list[int] = []
        for at in (token_ids[: len(rows)] == AWAITED).nonzero()[0].tolist():
            row = rows[at]  # single tokens come first, so that row `at` has token `at`
            if len(row.token_ids) != 1 or row.request_id not in self.drawn:
                continue  # it is no token at all
            text = row.all_token_ids
            token_ids[at] = text[row.start] if row.start < len(text) else 0  # 0: it has ended, and nobody looks
            if token_ids[at] == AWAITED:
                token_ids[at] = 0
                places.append(at)
        return self.drawn.awaited(places, [rows[at].request_id for at in places])

    def forward(
        self, token_ids: LongArray, step: StepGeometry, wanted: LongArray, awaited: Awaited | None = None
    ) -> torch.Tensor:
        """Begin the step and run it: states `[rows, hidden]` of the tokens `wanted`, indices into the step's."""
        if self._peers is not None:
            self._peers.announce(Forward.of(step, token_ids, wanted))
        inputs = self._inputs
        inputs.send(token_ids, step.positions, wanted, awaited)
        if not self.adapters.groups:
            if self._graphs is not None and self._graphs.serves(step):
                states = self._graphs.hidden(step)  # of every row, in order
                return states if len(wanted) == len(states) else states.index_select(0, inputs.wanted)
            if self._pieces is not None and self._pieces.serves(step):
                return self._pieces.hidden(step, inputs.wanted)
        self.attention.begin(step)
        return self.decoder.hidden(inputs.token_ids, inputs.positions, inputs.wanted)

    def answer_logits(self, rows: int) -> None:
        """On a rank other than 0: compute what is here of the logits of `rows` states that rank 0 has."""
        if self.decoder.output is not None:
            config = self._config
            self.decoder.output(torch.empty((rows, self.spec.hidden_size), dtype=config.dtype, device=config.device))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `StepPlan.copies`. All sources are read before any page is written."""
        if self._peers is not None:
            self._peers.announce(CopyPages(list(copies)))
        sources, targets = upload(np.array(copies, dtype=np.int64), self._config.device).unbind(1)
        pages = self.attention.kv_cache
        pages.index_copy_(2, targets, pages.index_select(2, sources))
        if self.reader is not None:
            self.reader.copy_pages(sources, targets)

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
