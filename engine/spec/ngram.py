"""Prompt look-up: what followed the last time that the text ended as it does now (arXiv 2304.04487, section 2.3).

It pays where an answer repeats its prompt: extraction, edits of a text or of code, quotes, summaries; and wherever an
answer repeats itself. There is no index: a request's tokens lie in one array of 4 bytes each, and a search compares
that array as a whole, 10 µs for 10,000 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.scheduling.request import Request

IntArray = npt.NDArray[np.int32]

# Shorter repetitions happen by chance; beyond the longest one more tokens say nothing new.
MIN_MATCH = 2
MAX_MATCH = 8
# Between a prediction and the prompt: equal to no token.
_SEPARATOR = -1


class NgramProposer:
    """`Proposer` that searches prompt, answer and, where the client sent one, the predicted answer."""

    waits_for_copies = False
    seconds_per_draft = 0.0  # next to nothing

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def offers(self, requests: Sequence[Request], most: int) -> list[int]:
        return [len(self._text(request).continuation(most)) for request in requests]

    def propose(self, counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        found = {request: self._text(request).continuation(count) for request, count in counts.items()}
        return {request: drafts for request, drafts in found.items() if drafts}

    def forget(self, request: Request) -> None:
        self._texts.pop(request.request_id, None)

    def _text(self, request: Request) -> _Text:
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = _Text(_before(request))
        text.extend(request.token_ids)
        return text


def _before(request: Request) -> list[int]:
    """What stands before a request's tokens in its array: the prediction, behind the end of the prompt.

    So an answer that begins as predicted finds the prediction from its first token on.
    """
    if not request.prediction:
        return []
    end_of_prompt = request.token_ids[: request.num_prompt_tokens][-MAX_MATCH:]
    return [*end_of_prompt, *request.prediction, _SEPARATOR]


class _Text:
    """The tokens of one request in an array that doubles when it is full."""

    def __init__(self, before: list[int]) -> None:
        self._values: IntArray = np.array(before, dtype=np.int32)
        self._num_before = self._length = len(before)

    def extend(self, token_ids: list[int]) -> None:
        """Take over the tokens that are new. Those that it has do not change."""
        new = token_ids[self._length - self._num_before :]
        needed = self._length + len(new)
        if needed > len(self._values):
            self._values = np.concatenate([self._values[: self._length], np.empty(needed, dtype=np.int32)])
        self._values[self._length : needed] = new
        self._length = needed

    def continuation(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest earlier occurrence of the end, the latest of several.

        A repetition that overlaps the end goes on in its period.
        """
        values = self._values[: self._length]
        starts = np.flatnonzero(values[:-1] == values[-1]) + 1  # where a continuation would begin
        matched = 1
        while matched < min(MAX_MATCH, len(values)):
            longer = starts[starts > matched]
            longer = longer[values[longer - 1 - matched] == values[-1 - matched]]
            if not longer.size:
                break
            starts = longer
            matched += 1
        if matched < MIN_MATCH or not starts.size:
            return []
        drafts: list[int] = np.resize(values[starts[-1] :], most).tolist()
        return drafts[: drafts.index(_SEPARATOR)] if _SEPARATOR in drafts else drafts
