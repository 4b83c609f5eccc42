"""Which tokens texts have had, kept on the device: penalties need no round trip, and a step adds only what is new.

A text is the list that a request keeps of its tokens. It only grows, so its row is brought up to date by the tokens
behind those that are counted. Whoever has not been seen for the longest gives up its row, and is counted anew if it
comes back: nothing must be told of requests that end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.layers.staging import upload
from engine.types import StepRow


@dataclass(slots=True)
class _Text:
    slot: int
    tokens: Sequence[int]  # kept, so that no other list is taken for it
    num_prompt: int
    counted: int = 0


class TokenCounts:
    """`counts`: int32 `[texts, vocab]`, how often the answer has a token; `in_prompt`: uint8, 1 for the prompt's."""

    def __init__(self, texts: int, vocab: int, device: torch.device) -> None:
        """`texts`: how many are kept, and how many a call of `rows_of` may name."""
        self.texts = texts
        self.counts = torch.zeros(texts, vocab, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(texts, vocab, dtype=torch.uint8, device=device)
        self._vocab = vocab
        self._free = list(range(texts))
        self._known: OrderedDict[int, _Text] = OrderedDict()  # by identity, the least recently seen first

    def rows_of(self, rows: Sequence[StepRow]) -> list[int]:
        """Of each row's text the row of the tables, which are up to date for what is launched after this."""
        stale: list[int] = []
        prompts: list[npt.NDArray[np.int64]] = []
        answers: list[npt.NDArray[np.int64]] = []
        slots: list[int] = []
        for row in rows:
            text = self._find(row, stale)
            slots.append(text.slot)
            self._add(prompts, text, text.counted, text.num_prompt)
            self._add(answers, text, max(text.counted, text.num_prompt), len(text.tokens))
            text.counted = len(text.tokens)
        device = self.counts.device
        if stale:
            cleared = upload(np.array(stale, dtype=np.int64), device)
            self.counts.index_fill_(0, cleared, 0)
            self.in_prompt.index_fill_(0, cleared, 0)
        if prompts:
            self.in_prompt.view(-1).index_fill_(0, upload(np.concatenate(prompts), device), 1)
        if answers:
            places = upload(np.concatenate(answers), device)
            self.counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        return slots

    def _find(self, row: StepRow, stale: list[int]) -> _Text:
        """The text of a row, as the one seen last; its slot goes to `stale` where that holds something else."""
        tokens, num_prompt = row.all_token_ids, row.num_prompt_tokens
        text = self._known.pop(id(tokens), None)
        if text is None or text.counted > len(tokens) or text.num_prompt != num_prompt:
            if text is not None:
                slot = text.slot
            elif self._free:
                slot = self._free.pop()
            else:
                slot = self._known.popitem(last=False)[1].slot
            stale.append(slot)
            text = _Text(slot, tokens, num_prompt)
        self._known[id(tokens)] = text
        return text

    def _add(self, places: list[npt.NDArray[np.int64]], text: _Text, start: int, stop: int) -> None:
        if start < stop:
            new = np.asarray(text.tokens[start:stop], dtype=np.int64)
            places.append(text.slot * self._vocab + new[(new >= 0) & (new < self._vocab)])
