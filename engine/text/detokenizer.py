"""Token ids to text, piece by piece, for one answer: whole characters only, stop strings cut, everything aligned.

`push` takes tokens as they are generated and returns a `Delta` that may go to the client. The concatenated deltas equal
the text of all tokens decoded at once (cut at the stop string), for every way of splitting the tokens into pushes.
It works on bytes: a token is a few bytes, and an incremental UTF-8 decoder holds an unfinished character back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.types import FinishReason, TokenLogprob


class Vocabulary(Protocol):
    """What the detokenizer needs of a tokenizer."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)
class Delta:
    """News of one answer. `logprobs`, if asked for, has one entry per token id; a token comes with its last character.

    `text` may be empty while tokens arrive (special tokens have no text). `stop` is the stop string or token that
    ended the answer.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Where each token's text starts in the answer, in characters.
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None

    def merge(self, later: Delta) -> None:
        """Append `later`: what a slow reader has not fetched yet becomes one delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.text_offsets += later.text_offsets
        self.finish_reason = later.finish_reason
        self.stop = later.stop
        self.error = later.error


@dataclass(slots=True)
class _Pending:
    """A token whose text has not been emitted completely."""

    token_id: int
    logprob: TokenLogprob | None
    start: int  # characters of the answer before this token
    end: int  # characters that must be out before this token is


class Detokenizer:
    """State of one answer.

    Stop strings: generation ends at the first character that completes one of them; if one character completes several,
    the longest counts. The text is cut before the stop string (after it with `include_stop`), while the tokens
    up to the completing one stay, because they were generated and are counted. Text that may be the beginning of a stop
    string, at most `max(len(stop)) - 1` characters, is held back. Before `min_tokens` tokens nothing stops.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
        opens_with_space: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`opens_with_space`: a space that the text begins with is the model's and no part of it. `shown`: special
        tokens that have a text even with `skip_special`.

        Raises ValueError for an empty stop string.
        """
        if any(not text for text in stop):
            raise ValueError("a stop string must not be empty")
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._longest_stop = max((len(text) for text in stop), default=0)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._opens_with_space = opens_with_space
        self._hidden = vocabulary.special_ids - shown if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tail = ""  # decoded text that is not emitted yet
        self._emitted = 0  # characters
        self._pending: list[_Pending] = []
        self.num_tokens = 0
        self.is_finished = False

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> Delta:
        """Take generated tokens in order; with `finish_reason` everything held back comes out.

        When the returned delta has a finish reason that was not given, a stop string matched: the caller ends the
        request in the engine. Tokens after the completing one are dropped.

        Raises:
            RuntimeError: the answer is finished already.
        """
        if self.is_finished:
            raise RuntimeError("push() after the end of the answer")
        delta = Delta()
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            ends_answer = position == last and stop_token_id is not None
            logprob = None if logprobs is None else logprobs[position]
            matched = self._take(token_id, logprob, hide=ends_answer and not self._include_stop)
            if matched is not None:
                return self._finish(delta, FinishReason.STOP, matched)
        if finish_reason is not None:
            self._tail += self._decoder.decode(b"", final=True)
            return self._finish(delta, finish_reason, stop_token_id)
        self._emit(delta, len(self._tail) - self._held_back())
        return delta

    def _take(self, token_id: int, logprob: TokenLogprob | None, *, hide: bool) -> str | None:
        """Add one token to the tail; returns the stop string that it completes, if any, with the tail cut."""
        before = len(self._tail)
        # A character that is still incomplete belongs to the token that began it.
        start = self._emitted + before
        if not hide and token_id not in self._hidden:
            data = self._vocabulary.token_bytes(token_id)
            if self._opens_with_space and data:
                data, self._opens_with_space = data.removeprefix(b" "), False
            self._tail += self._decoder.decode(data)
        incomplete = bool(self._decoder.getstate()[0])
        self._pending.append(_Pending(token_id, logprob, start, self._emitted + len(self._tail) + incomplete))
        self.num_tokens += 1
        if self._stop and len(self._tail) > before and self.num_tokens >= self._min_tokens:
            return self._cut_at_stop(before)
        return None

    def _cut_at_stop(self, before: int) -> str | None:
        """Find the stop string whose last character comes first among the characters from `before` on."""
        best: tuple[int, int, str] | None = None  # end, start
        for text in self._stop:
            start = self._tail.find(text, max(0, before - len(text) + 1))
            if start >= 0 and (best is None or (start + len(text), start) < best[:2]):
                best = (start + len(text), start, text)
        if best is None:
            return None
        self._tail = self._tail[: best[0] if self._include_stop else best[1]]
        return best[2]

    def _held_back(self) -> int:
        """Length of the longest end of the tail that may become a stop string."""
        tail = self._tail
        for length in range(min(self._longest_stop - 1, len(tail)), 0, -1):
            end = tail[-length:]
            if any(len(text) > length and text.startswith(end) for text in self._stop):
                return length
        return 0

    def _emit(self, delta: Delta, length: int) -> None:
        delta.text = self._tail[:length]
        self._tail = self._tail[length:]
        self._emitted += length
        done = 0
        for token in self._pending:
            if token.end > self._emitted:
                break
            done += 1
        self._release(delta, done)

    def _release(self, delta: Delta, count: int) -> None:
        for token in self._pending[:count]:
            delta.token_ids.append(token.token_id)
            delta.text_offsets.append(token.start)
            if token.logprob is not None:
                delta.logprobs.append(token.logprob)
        del self._pending[:count]

    def _finish(self, delta: Delta, reason: FinishReason, stop: str | int | None) -> Delta:
        delta.text, self._tail = self._tail, ""
        self._emitted += len(delta.text)
        self._release(delta, len(self._pending))
        delta.finish_reason = reason
        delta.stop = stop
        self.is_finished = True
        return delta
