"""A second, smaller model of the same vocabulary as proposer. It is a `Runner` like the one that it drafts for.

It uses the request's own block table with KV pages of its own under the same numbers, so nothing is allocated or freed
here. It runs only when drafts are wanted: what it has not seen of a request by then (the prompt, tokens from steps
without drafts, the last accepted draft, which it proposed but never read) it computes first. Its KV of a draft that
failed is overwritten like the big model's.

It draws with the request's parameters, seed and position, as the big model will: where both distributions agree, the
same number leads to the same token. A draft from wrong or stale KV would be a poor guess and never a wrong answer.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.scheduling.request import Request
from engine.types import RowResult, Runner, SamplingParams, StepPlan, StepRow

_PASS_WEIGHT = 0.2


@dataclass(slots=True)
class _Progress:
    """How far the draft model has come with one request."""

    params: SamplingParams
    num_computed: int = 0  # leading tokens whose KV is in the pages
    keys: list[int] = field(default_factory=list)  # of the full pages among them
    proposed: list[int] = field(default_factory=list)  # drafts that it computed in the last round, not all checked yet


class DraftModel:
    """`Proposer` by a model."""

    waits_for_copies = False  # it knows by their text what pages hold

    def __init__(self, runner: Runner, *, max_num_batched_tokens: int) -> None:
        self._runner = runner
        self._block_size = runner.geometry.block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self.seconds_per_draft = 0.0
        self._progress: dict[int, _Progress] = {}
        # What a page holds, for pages taken over from the prefix cache: a hash of the text up to its end.
        self._page_keys: dict[int, int] = {}

    def offers(self, requests: Sequence[Request], most: int) -> list[int]:
        limit = self._runner.max_model_len
        return [max(0, min(most, limit - request.num_tokens)) for request in requests]

    def propose(self, counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        drafts: dict[Request, list[int]] = {}
        rows = self._catch_up(counts)
        depth = 1
        while rows:
            rows.sort(key=lambda pair: len(pair[1].token_ids) > 1)
            results = self._execute([row for _, row in rows])
            for (request, row), result in zip(rows, results, strict=True):
                if result.error is None:
                    self._computed(request, row)
                    if result.token_id is not None:
                        drafts.setdefault(request, []).append(result.token_id)
            depth += 1
            rows = [
                (request, self._row(request, [*request.token_ids, *found], request.num_tokens + depth - 2))
                for request, found in drafts.items()
                if len(found) == depth - 1 < counts[request]
            ]
        for request, found in drafts.items():
            self._progress[request.request_id].proposed = found[:-1]
        return drafts

    def _execute(self, rows: list[StepRow]) -> list[RowResult]:
        start = time.monotonic()
        results = self._runner.execute(StepPlan(rows))
        if all(len(row.token_ids) == 1 for row in rows):  # what is caught up with is done once
            seconds = time.monotonic() - start
            self.seconds_per_draft += _PASS_WEIGHT * (seconds - self.seconds_per_draft)
        return results

    def forget(self, request: Request) -> None:
        self._progress.pop(request.request_id, None)

    def _catch_up(self, requests: Mapping[Request, int]) -> list[tuple[Request, StepRow]]:
        """Rows that bring these requests up to their last token, as far as one step of the draft model goes."""
        rows: list[tuple[Request, StepRow]] = []
        budget = self._max_num_batched_tokens
        for request in requests:
            if budget == 0:
                break
            progress = self._progress.get(request.request_id)
            if progress is None:
                progress = self._progress[request.request_id] = self._begin(request)
            for draft in progress.proposed:
                if progress.num_computed == request.num_tokens or request.token_ids[progress.num_computed] != draft:
                    break
                progress.num_computed += 1
            progress.proposed = []
            start = progress.num_computed
            row = self._row(request, request.token_ids, start, min(start + budget, request.num_tokens))
            rows.append((request, row))
            budget -= len(row.token_ids)
        return rows

    def _begin(self, request: Request) -> _Progress:
        """A request that is new here: the pages at its beginning may hold what this model computed for another one."""
        progress = _Progress(replace(request.params, logprobs=None))
        for index in range((request.num_tokens - 1) // self._block_size):
            key = self._page_key(progress, request.token_ids, index)
            if self._page_keys.get(request.block_table[index]) != key:
                break
            progress.keys.append(key)
        progress.num_computed = len(progress.keys) * self._block_size
        return progress

    def _row(self, request: Request, token_ids: list[int], start: int, stop: int | None = None) -> StepRow:
        stop = len(token_ids) if stop is None else stop
        return StepRow(
            request_id=request.request_id,
            token_ids=token_ids[start:stop],
            start=start,
            block_table=request.block_table[: -(-stop // self._block_size)],
            sample=stop == len(token_ids),
            params=self._progress[request.request_id].params,
            all_token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
        )

    def _computed(self, request: Request, row: StepRow) -> None:
        """Take note of what a row left in the pages."""
        progress, size = self._progress[request.request_id], self._block_size
        stop = row.start + len(row.token_ids)
        for index in range(row.start // size, -(-stop // size)):
            self._page_keys.pop(row.block_table[index], None)
        progress.num_computed = min(stop, request.num_tokens)  # drafts count once they are accepted
        while len(progress.keys) < progress.num_computed // size:
            index = len(progress.keys)
            key = self._page_key(progress, request.token_ids, index)
            progress.keys.append(key)
            self._page_keys[row.block_table[index]] = key

    def _page_key(self, progress: _Progress, token_ids: Sequence[int], index: int) -> int:
        page = array("I", token_ids[index * self._block_size : (index + 1) * self._block_size])
        return hash((progress.keys[-1] if progress.keys else 0, page.tobytes()))
