"""What passes between the engine's parts: sampling parameters, one step's plan, one step's results.

The scheduler makes a `StepPlan`, the runner turns it into one `RowResult` per row, the loop hands those to the
scheduler and to the clients. No text crosses these types: tokens are ints, pages are ints, a pooled text is a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np

# Stands for a token that the step before this one draws: it is on the device, and nobody here knows it yet.
AWAITED = -1
# Packed bits `[rows, words]`: what `TokenMasks` writes.
Bitmask = np.ndarray[tuple[int, int], np.dtype[np.int32]]
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"  # its deadline passed, or could not be kept


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search in place of sampling; the names and their meaning are those of transformers.

    A finished answer's score is the sum of its log-probabilities, divided by `tokens ** length_penalty`. With
    `early_stopping` True the search ends at `width` finished answers, with False when the running ones can hardly get
    better, with "never" when they cannot.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Defaults are those of the OpenAI API, `top_k` and `min_p` off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; k: the chosen token and the k most likely
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    typical_p: float = 1.0  # 1: off
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the answer must not hold
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens from the second on
    beam: BeamParams | None = None


class GrammarFailed(Exception):
    """A grammar cannot go on. It ends the request that it belongs to and no other."""


class Masks(Protocol):
    """Which tokens a grammar allows next."""

    def fill(self, drafts: Sequence[int], out: Bitmask) -> int:
        """Write one packed row for the position after each prefix of `drafts` that the grammar accepts.

        `out`: `[1 + len(drafts), ceil(vocab / 32)]`; bit `t % 32` of word `t // 32` is set where token `t` is allowed.
        Stops at the first draft that is refused; returns the number of rows written, at least 1.

        Raises:
            GrammarFailed: there is no way on, or the grammar takes too much work.
        """
        ...


class TokenMasks(Masks, Protocol):
    """The state of one request in its grammar, which advances by `accept` alone."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance over tokens that were generated. Raises GrammarFailed if the grammar does not allow them."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing but the end can follow."""
        ...


@dataclass(frozen=True, slots=True)
class Draw:
    """Another request with the text of a row: it draws its first token from the same logits."""

    request_id: int
    params: SamplingParams
    grammar: Masks | None = None


@dataclass(slots=True)
class StepRow:
    """One sequence's share of a step: compute `token_ids` at positions `start, start + 1, ...`.

    While the step before this one is not over, `token_ids` may be `[AWAITED]`: what that draws for this request.

    `block_table` covers positions `0 .. start + len(token_ids) - 1`, page `p` holding positions
    `p * block_size .. (p + 1) * block_size - 1`. With `sample`, the last position yields the next token.

    The last `num_drafts` of `token_ids` are proposals and not yet part of `all_token_ids`. Such a row samples at the
    position before the first draft and at each draft, and yields the drafts that hold and one token more:
    1 to `num_drafts + 1` tokens.
    """

    request_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: bool
    params: SamplingParams
    # All tokens so far, prompt first: what penalties and seeds look at. Not to be kept or changed by the runner.
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_drafts: int = 0
    # From this position on, the row yields the log-probability of each next token that is the prompt's; None: of none.
    score_from: int | None = None
    grammar: Masks | None = None  # what the next tokens may be; None: anything
    adapter: int = 0  # the id of the adapter that changes the model for this row; 0: none
    draws: tuple[Draw, ...] = ()  # with `sample`: who else goes on from this text
    pool: range | None = None  # positions, of this row and of others, whose states are summed; None: of a text to go on


@dataclass(slots=True)
class StepPlan:
    """Rows with one new token come first, longer ones (prefill chunks) after them."""

    rows: list[StepRow]
    # Requests that ended since the last plan: whatever the runner keeps for them can go.
    finished: list[int] = field(default_factory=list)
    # Pages to copy before the step, all layers of them: from, to. No page is in both columns.
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms, before temperature and penalties. `top` is sorted, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 1: no token is likelier; 0: not known


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row yielded: tokens if the row samples, or the error that ends this request and no other.

    `logprobs` has one entry per token, or none at all.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the positions that `StepRow.score_from` asked for
    draws: tuple[RowResult, ...] = ()  # of `StepRow.draws`, in order, or none at all
    # Sum of the normed states at this row's positions in `StepRow.pool`, float32 `[hidden]`; None: it has none of them.
    pooled: Vector | None = field(default=None, compare=False)

    @property
    def token_id(self) -> int | None:
        """The first token, if there is one."""
        return self.token_ids[0] if self.token_ids else None


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The KV cache's shape. Page 0 is the null page: zeroed, never handed out."""

    num_blocks: int
    block_size: int
    bytes_per_token: int


def nothing() -> None:
    """What is done while the device works, where there is nothing to do."""


class Runner(Protocol):
    """Turns plans into tokens. Owns all tensors: weights, KV pages, scratch."""

    geometry: CacheGeometry
    max_model_len: int

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] = nothing) -> list[RowResult]:
        """One forward pass over all rows; one result per row, in order. A fault of one row is that row's `error`.

        `meanwhile` is called once at most, when the device has its work and before its results are waited for.
        """
        ...


class Flight(Protocol):
    """A step that has begun: its forward pass is on its way."""

    def draw(self) -> None:
        """Begin the choice of tokens. By now the rows' texts hold every token before the one to be drawn."""
        ...

    def results(self) -> list[RowResult]:
        """Wait for the step's end; one result per row, in order. After `draw`."""
        ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner that begins a step before the one before it is over."""

    def launch(self, plan: StepPlan) -> Flight:
        """Begin a step, and wait for nothing. Of the step before it, if that is not over, the draw has begun."""
        ...
