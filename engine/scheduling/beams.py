"""Beam search: the likeliest answers as a whole, found by following several beginnings at once.

`BeamSearch` is the algorithm, on tokens and log-probabilities alone, equal to transformers' one for one prompt. `Beams`
is one search among the scheduler's requests: every beam is a request of its own whose pages are shared with the beams
that it comes from, and the search moves on when all of them have been computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.limits import NeverFits
from engine.messages import NewRequest, Output
from engine.scheduling.request import Request
from engine.types import BeamParams, FinishReason, RowResult, SamplingParams


class Move(NamedTuple):
    """A beam of the next step: it goes on from beam `parent` of this step with `token_id`."""

    parent: int
    token_id: int


class Found(NamedTuple):
    """A finished answer."""

    score: float
    token_ids: tuple[int, ...]


class BeamSearch:
    """One search. Call `advance` until it returns nothing; `found` are the answers then, the best first."""

    def __init__(self, params: BeamParams, *, max_tokens: int, end_ids: frozenset[int]) -> None:
        self.found: list[Found] = []
        self.params = params
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        # So many candidates that enough of them go on, even if all the others end.
        self.num_candidates = max(2, 1 + len(end_ids)) * params.width
        self._beams = [Found(0.0, ())]  # those that go on, the likeliest first; scores are plain sums

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Move]:
        """Go one token on. candidates: of each beam the `num_candidates` likeliest tokens and their log-probabilities.

        Returns the beams of the next step, the likeliest first; none: the search is over.
        """
        width = self.params.width
        ranked = sorted(
            (
                (beam.score + logprob, parent, token_id)
                for parent, (beam, row) in enumerate(zip(self._beams, candidates, strict=True))
                for token_id, logprob in row
            ),
            key=lambda candidate: -candidate[0],
        )[: self.num_candidates]
        length = len(self._beams[0].token_ids) + 1
        going: list[tuple[float, Move]] = []
        for rank, (score, parent, token_id) in enumerate(ranked):
            if token_id not in self._end_ids and length < self._max_tokens:
                going.append((score, Move(parent, token_id)))
            elif rank < width:  # the others are only there to go on
                tokens = (*self._beams[parent].token_ids, token_id)
                self.found.append(Found(score / length**self.params.length_penalty, tokens))
        self.found = sorted(self.found, key=lambda found: -found.score)[:width]
        del going[width:]
        self._beams = [Found(score, (*self._beams[m.parent].token_ids, m.token_id)) for score, m in going]
        return [] if self._is_over(length) else [move for _, move in going]

    def _is_over(self, length: int) -> bool:
        """After `length` tokens: nothing goes on, or what goes on will not get better than what was found."""
        params = self.params
        if not self._beams:
            return True
        if len(self.found) < params.width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        best: float = self._beams[0].score / length**params.length_penalty
        return best <= self.found[-1].score


@dataclass(slots=True, eq=False)
class Beams:
    """A search and its requests. The best answer goes to the first of `request_ids`, and so on."""

    request_ids: list[int]
    search: BeamSearch
    params: SamplingParams  # of each beam's row: the likeliest tokens, and no draw
    end_ids: frozenset[int]
    live: list[Request] = field(default_factory=list)  # one per beam, in the search's order
    num_generated: int = 0
    _candidates: dict[Request, Sequence[tuple[int, float]]] = field(default_factory=dict)
    _unwanted: set[int] = field(default_factory=set)
    _cached_tokens: int | None = None
    _prompt_page: bytes | None = None

    @classmethod
    def of(cls, new: Sequence[NewRequest], *, room: int, eos_token_ids: frozenset[int]) -> Beams:
        """The search that these requests, which differ by their ids alone, ask for; `room` tokens fit in a beam."""
        asked = new[0].params
        assert asked.beam is not None
        end_ids = asked.stop_token_ids if asked.ignore_eos else asked.stop_token_ids | eos_token_ids
        limit = min(asked.max_tokens, room - len(new[0].prompt_token_ids))
        search = BeamSearch(asked.beam, max_tokens=limit, end_ids=end_ids)
        params = SamplingParams(temperature=0.0, logprobs=search.num_candidates, max_tokens=limit)
        return cls([request.request_id for request in new], search, params, end_ids)

    @property
    def width(self) -> int:
        return self.search.params.width

    def began(self, cached_tokens: int | None, prompt_page: bytes | None) -> None:
        """The prompt has been computed; this goes to the first answer."""
        self._cached_tokens, self._prompt_page = cached_tokens, prompt_page

    def take(self, request: Request, result: RowResult) -> bool:
        """A beam has been computed; True if all have, so that `moves` may follow."""
        self._candidates[request] = result.logprobs[0].top
        return len(self._candidates) == len(self.live)

    def lose(self, request: Request) -> None:
        """A beam has lost its pages: it will be computed again."""
        self._candidates.pop(request, None)

    def moves(self) -> list[Move]:
        """The beams of the next step, from those of this one; none: `outputs` follow."""
        moves = self.search.advance([self._candidates[request] for request in self.live])
        self._candidates.clear()
        self.num_generated += self.width
        return moves

    def leave(self, request_id: int) -> bool:
        """An answer is not wanted any more; True if none is."""
        self._unwanted.add(request_id)
        return len(self._unwanted) == len(self.request_ids)

    def outputs(self, error: str | None = None, failed: FinishReason = FinishReason.ERROR) -> list[Output]:
        """The last output of each request: its answer, after the last move, or the error, as what it `failed`."""
        found = self.search.found if error is None else []
        outputs = []
        for place, request_id in enumerate(self.request_ids):
            if place < len(found):
                tokens = list(found[place].token_ids)
                ended = tokens[-1] in self.end_ids
                reason = FinishReason.STOP if ended else FinishReason.LENGTH
                outputs.append(Output(request_id, tokens, None, reason, tokens[-1] if ended else None))
            else:
                text = error or f"The search found {len(found)} answers only."
                outputs.append(Output(request_id, [], finish_reason=failed, error=text))
        outputs[0].cached_tokens, outputs[0].prompt_page = self._cached_tokens, self._prompt_page
        outputs[0].tokens_beside = self.num_generated - sum(len(output.token_ids) for output in outputs)
        return [output for output in outputs if output.request_id not in self._unwanted]


def check_beams(new: NewRequest, *, max_num_seqs: int, room: int) -> None:
    """Raises NeverFits if a search has more beams than rows, or its beams more tokens than the cache holds of each."""
    assert new.params.beam is not None
    width, length = new.params.beam.width, len(new.prompt_token_ids)
    if width > max_num_seqs:
        raise NeverFits(f"{width} beams asked for; this engine runs at most {max_num_seqs} requests at a time.")
    if length + 1 > room:
        raise NeverFits(
            f"The prompt has {length} tokens and at least 1 must be generated, "
            f"but the KV cache holds {room} tokens for each of {width} beams."
        )
