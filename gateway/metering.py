"""Count what a stream delivers while it passes: finish reasons, the reported usage, and a count of our own.

The own count is what an interrupted stream is billed by, and what its hold follows: content events (servers send about
one token per event) or a quarter of the bytes in UTF-8, whichever is more. Of Chinese or Greek, whose characters have
several bytes, a token holds fewer characters too.
"""

from __future__ import annotations

from backends.protocol import AnswerMessage, ChatChunk, ChatCompletion, Delta, Usage

BYTES_PER_TOKEN = 4


class Meter:
    """One answer's counts. `see` is called for every event, so it does little."""

    __slots__ = ("answer_id", "bytes", "content_events", "finish_reasons", "service_tier", "usage")

    def __init__(self) -> None:
        self.content_events = 0
        self.bytes = 0
        self.finish_reasons: dict[int, str] = {}
        self.usage: Usage | None = None
        self.answer_id: str | None = None  # the backend's
        self.service_tier: str | None = None  # as which the backend says that it served

    def restart(self) -> None:
        """The answer goes on in another attempt: from now on, count that one."""
        self.content_events = self.bytes = 0
        self.finish_reasons = {}
        self.usage = self.answer_id = self.service_tier = None

    def see(self, chunk: ChatChunk, usage: Usage | None = None) -> None:
        """Take account of one event of a stream; `usage` is the attempt's own where it is not the chunk's."""
        if chunk.usage is not None:
            # Cumulative by convention: the last one counts, they are never summed.
            self.usage = usage or chunk.usage
        if self.answer_id is None:
            self.answer_id = chunk.id
        if chunk.service_tier is not None:
            self._served_as(chunk.service_tier)
        for choice in chunk.choices:
            size = _content_bytes(choice.delta)
            if choice.text:
                size += _size(choice.text)
            # A tool call that begins has a name and no arguments yet: generated all the same.
            if size or choice.delta.tool_calls:
                self.content_events += 1
                self.bytes += size
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason

    def see_whole(self, answer: ChatCompletion) -> None:
        """Take account of an answer that came in one piece."""
        self.usage = answer.usage
        self.answer_id = answer.id
        if answer.service_tier is not None:
            self._served_as(answer.service_tier)
        for choice in answer.choices:
            self.bytes += _content_bytes(choice.message)
            if choice.text:
                self.bytes += _size(choice.text)
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason

    def _served_as(self, service_tier: object) -> None:
        if isinstance(service_tier, str):
            self.service_tier = service_tier

    def counted_output(self) -> int:
        """Output tokens by our own count."""
        return max(self.content_events, -(-self.bytes // BYTES_PER_TOKEN))

    def complete(self, choices: int) -> bool:
        """Whether every one of `choices` choices has said why it ended."""
        return len(self.finish_reasons) >= choices


def _content_bytes(said: Delta | AnswerMessage) -> int:
    """Bytes in UTF-8 of everything in here that a model has written. Most events have nothing but `content`."""
    size = 0
    if content := said.content:
        size = len(content) if content.isascii() else _size(content)
    if thoughts := said.reasoning_content or said.reasoning:
        size += _size(thoughts)
    if said.refusal:
        size += _size(said.refusal)
    if said.tool_calls:
        for call in said.tool_calls:
            if call.function is not None:
                size += _size(call.function.name or "") + _size(call.function.arguments or "")
    return size


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
