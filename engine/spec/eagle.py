"""EAGLE-3 as proposer (arXiv 2503.01840): a head of one layer that sees the model's own states, step by step.

The runner shows it every step's states (`follow`), prompts included, so its pages are as complete as the model's. To
draft, it goes on by itself, one token of every request per pass, and draws with each request's parameters, seed and
position, as the model will. It keeps nothing of a request but its pages, so there is nothing to forget.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from engine.sampler import Sampler
from engine.scheduling.request import Request
from engine.spec.eagle_head import EagleHead, Entries
from engine.types import RowResult, SamplingParams, StepRow

log = logging.getLogger("engine.spec")

_PASS_WEIGHT = 0.2


class EagleProposer:
    """`Proposer` by a head; for the runner, a `StateReader`."""

    waits_for_copies = True  # its pages are copied with the model's, when the step begins

    def __init__(self, head: EagleHead, sampler: Sampler, *, max_model_len: int) -> None:
        """`sampler`: the model's own, for the same numbers."""
        self._head = head
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._is_broken = False
        self.seconds_per_draft = 0.0

    # --- as the runner sees it -----------------------------------------------------------------------------------

    @property
    def taps(self) -> tuple[int, ...]:
        return self._head.spec.taps

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self._head.copy_pages(sources, targets)

    def follow(self, rows: Sequence[StepRow], states: torch.Tensor, results: Sequence[RowResult]) -> None:
        """Take over a step. A fault ends the drafting and not the step."""
        if self._is_broken:
            return
        try:
            self._follow(rows, states, results)
        except Exception:
            log.exception("the EAGLE-3 head failed")
            self._is_broken = True

    def _follow(self, rows: Sequence[StepRow], states: torch.Tensor, results: Sequence[RowResult]) -> None:
        head, size = self._head, self._head.block_size
        fused = head.fuse(states)
        entries: list[Entries] = []
        # The states before the entries: of the page that ends before the row (by number), else of the step itself.
        before: list[int] = []
        pages: list[int] = []
        ends: dict[int, int] = {}  # page to the last of the step's tokens in it
        start = 0
        for row, result in zip(rows, results, strict=True):
            count = len(row.token_ids) - row.num_drafts + max(0, len(result.token_ids) - 1)
            if result.error is None:
                skipped = 0 if row.start else 1
                if row.start:
                    before.append(len(fused) + len(pages))
                    pages.append(row.block_table[(row.start - 1) // size])
                if count > skipped:
                    table = row.block_table[: -(-(row.start + count) // size)]
                    entries.append(Entries(row.token_ids[skipped:count], row.start + skipped, table))
                before += range(start, start + count - 1)
                for index in range(row.start // size, (row.start + count - 1) // size + 1):
                    last = min((index + 1) * size, row.start + count) - 1
                    ends[row.block_table[index]] = start + last - row.start
            start += len(row.token_ids)
        if entries:
            found = torch.cat([fused, head.last_fused[pages]]) if pages else fused
            head.forward(entries, found[before])
        if ends:
            head.last_fused[list(ends)] = fused[list(ends.values())]

    # --- as the speculator sees it -------------------------------------------------------------------------------

    def offers(self, requests: Sequence[Request], most: int) -> list[int]:
        if self._is_broken:
            raise RuntimeError("the EAGLE-3 head failed in an earlier step")
        limit = self._max_model_len
        return [max(0, min(most, limit - r.num_tokens)) if r.num_tokens > 1 else 0 for r in requests]

    @torch.inference_mode()
    def propose(self, counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        head, size = self._head, self._head.block_size
        requests = list(counts)
        params = {request: replace(request.params, logprobs=None) for request in requests}
        found: dict[Request, list[int]] = {request: [] for request in requests}
        fused = head.last_fused[[request.block_table[(request.num_tokens - 2) // size] for request in requests]]
        while requests:
            began = time.monotonic()
            states = head.forward([self._next(request, found[request]) for request in requests], fused)
            rows = [self._row(request, params[request], found[request]) for request in requests]
            drawn = self._sampler.sample(head.logits(states), rows)
            for request, result in zip(requests, drawn, strict=True):
                found[request] += result.token_ids
            seconds = time.monotonic() - began
            self.seconds_per_draft += _PASS_WEIGHT * (seconds - self.seconds_per_draft)
            going = [
                i
                for i, (request, result) in enumerate(zip(requests, drawn, strict=True))
                if result.error is None and len(found[request]) < counts[request]
            ]
            requests, fused = [requests[i] for i in going], states[going]
        return {request: drafts for request, drafts in found.items() if drafts}

    def forget(self, request: Request) -> None:
        pass

    def _next(self, request: Request, found: Sequence[int]) -> Entries:
        """The entry of the last token so far."""
        slot = request.num_tokens - 1 + len(found)
        token = found[-1] if found else request.token_ids[-1]
        return Entries([token], slot, request.block_table[: slot // self._head.block_size + 1])

    def _row(self, request: Request, params: SamplingParams, found: Sequence[int]) -> StepRow:
        """What the sampler must know to draw the token behind these drafts."""
        text = [*request.token_ids, *found]
        return StepRow(
            request_id=request.request_id,
            token_ids=text[-1:],
            start=len(text) - 1,
            block_table=request.block_table,
            sample=True,
            params=params,
            all_token_ids=text,
            num_prompt_tokens=request.num_prompt_tokens,
        )
