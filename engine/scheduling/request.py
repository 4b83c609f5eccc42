"""One sequence on its way through the engine: its tokens, its pages and how far the forward pass has come.

A `Request` is data; the scheduler decides and the prefix cache owns the pages. What always holds:
`0 <= num_computed_tokens <= num_tokens`, and `block_table` covers every computed token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.kv.block_pool import PoolCorrupt
from engine.kv.prefix_history import Missed
from engine.spec.pace import PRIOR_RATE
from engine.types import FinishReason, SamplingParams, TokenMasks, Vector

if TYPE_CHECKING:
    from engine.scheduling.beams import Beams


class RequestStatus(StrEnum):
    WAITING = "waiting"  # no pages; either new or preempted
    RUNNING = "running"  # holds pages, gets tokens in every step that has room
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """State of one sequence. `token_ids` holds the prompt and then every generated token."""

    request_id: int
    arrival: int  # position in the order of admission; smaller is served first
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    max_total_tokens: int  # the prompt and what may be generated, already cut to what the engine can hold
    cache_root: bytes  # start of the chain of page digests: model, data type and salt

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list)  # of the leading full pages, filled when needed
    num_published_pages: int = 0
    expected_prefill: int = (
        0  # tokens to compute before its next one, as far as the cache was known when it began to wait
    )
    num_cached_tokens: int | None = None  # prompt tokens found in the cache when first scheduled
    cached_tokens_reported: bool = False
    num_preemptions: int = 0
    num_flights: int = 0  # steps that it is part of and that are not over
    beams: Beams | None = None  # the search that this is a beam of
    num_rows: int = 1  # rows of a step that are kept for it: those of all beams that it will become
    num_scored: int = 0  # positions of the prompt whose next token has its log-probability
    prediction: tuple[int, ...] = ()  # what the client expects the answer to be, or to hold
    draft_rate: float = PRIOR_RATE  # the chance that a draft holds if all before it do
    grammar: TokenMasks | None = None  # what the answer must be, and how far it has come
    adapter: int = 0  # the id of the adapter that it runs with; 0: none
    pool: range | None = None  # positions whose states are still to be added to the vector; None: it generates
    pooled: Vector | None = None  # the sum of those that were
    num_pooled: int = 0  # how many that were
    missed: Missed | None = None  # why full pages of the prompt were not in the prefix cache
    tenant: str = ""  # whose it is: tenants share the engine fairly
    priority: int = 0  # smaller is more urgent
    deadline: float | None = None  # monotonic seconds at which the whole answer must be there
    times_sought: int = 0  # preemptions after which its pages were looked for elsewhere
    awaits_pages: bool = False  # they are on their way from elsewhere; it starts when they are here, or too late
    entered: int = 0  # what its tenant had got of the engine when it came

    def copy(self, request_id: int) -> Request:
        """The same tokens under another id, without pages."""
        return replace(
            self,
            request_id=request_id,
            token_ids=list(self.token_ids),
            block_table=[],
            page_digests=list(self.page_digests),
        )

    @property
    def standing(self) -> tuple[int, int]:
        """Its place among those that run; when pages run out, the last gives up its own."""
        return self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def score_from(self) -> int | None:
        """The next position of the prompt to be scored; None: there is none, or nobody asked."""
        asked = self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens - 1
        return self.num_scored if asked else None

    @property
    def most_reusable(self) -> int:
        """So many of its first tokens may come from the cache: the others must run through the model.

        The last one always, or there is nothing to sample from; and what is still to be scored or pooled.
        """
        if self.pool is not None:
            return self.pool.start if self.pool else self.num_tokens - 1
        return self.num_tokens - 1 if self.score_from is None else self.score_from

    @property
    def looks_up(self) -> bool:
        """Whether it makes use of cached pages as a rule."""
        return self.score_from is None and (self.pool is None or self.pool.start > 0)

    @property
    def is_reproducible(self) -> bool:
        """Sampled with a seed: the same request must give the same answer, whatever happens to be cached.

        Keys and values of the same tokens differ in their last bits when they were computed in a batch of another
        shape, and that is enough to sample another token; so such a request computes its whole prompt itself.
        """
        return self.params.seed is not None and self.params.temperature > 0

    def take_pooled(self, part: Vector | None) -> None:
        """Add the states of this step's positions to the vector; `num_computed_tokens` is behind them already."""
        assert self.pool is not None
        if part is not None:
            self.pooled = part if self.pooled is None else self.pooled + part
        start = max(self.pool.start, min(self.num_computed_tokens, self.pool.stop))
        self.num_pooled += start - self.pool.start
        self.pool = range(start, self.pool.stop)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


def check_request(request: Request, block_size: int) -> None:
    """Verify what always holds of a living request, for pages of `block_size` tokens.

    Raises:
        PoolCorrupt: with the numbers that do not agree.
    """
    capacity = len(request.block_table) * block_size
    if not 0 <= request.num_computed_tokens <= min(request.num_tokens, capacity):
        raise PoolCorrupt(
            f"request {request.request_id}: computed {request.num_computed_tokens} of {request.num_tokens} "
            f"tokens in {len(request.block_table)} pages"
        )
    if request.status is RequestStatus.WAITING and request.block_table:
        raise PoolCorrupt(f"waiting request {request.request_id} holds pages {request.block_table}")
