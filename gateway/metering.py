"""Count what a stream delivers while it passes: finish reasons, the reported usage, and a count of our own.

The own count is what an interrupted stream is billed by: content events (servers send about one token per event)
or a quarter of the characters, whichever is more.
"""

from __future__ import annotations

from backends.protocol import ChatChunk, ChatCompletion, Usage

CHARACTERS_PER_TOKEN = 4


class Meter:
    """One answer's counts. `see` is called for every event, so it does little."""

    __slots__ = ("characters", "content_events", "finish_reasons", "upstream_model", "usage")

    def __init__(self) -> None:
        self.content_events = 0
        self.characters = 0
        self.finish_reasons: dict[int, str] = {}
        self.usage: Usage | None = None
        self.upstream_model: str | None = None

    def restart(self) -> None:
        """The answer goes on in another attempt: from now on, count that one."""
        self.content_events = self.characters = 0
        self.finish_reasons = {}
        self.usage = self.upstream_model = None

    def see(self, chunk: ChatChunk) -> None:
        """Take account of one event of a stream."""
        if chunk.usage is not None:
            # Cumulative by convention: the last one counts, they are never summed.
            self.usage = chunk.usage
        if self.upstream_model is None:
            self.upstream_model = chunk.model
        for choice in chunk.choices:
            delta = choice.delta
            text = delta.content or delta.reasoning_content or delta.refusal
            if text:
                self.content_events += 1
                self.characters += len(text)
            elif delta.tool_calls:
                self.content_events += 1
                for call in delta.tool_calls:
                    self.characters += len((call.function and call.function.arguments) or "")
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason

    def see_whole(self, answer: ChatCompletion) -> None:
        """Take account of an answer that came in one piece."""
        self.usage = answer.usage
        self.upstream_model = answer.model
        for choice in answer.choices:
            self.characters += len(choice.message.content or "")
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason

    def counted_output(self) -> int:
        """Output tokens by our own count."""
        return max(self.content_events, -(-self.characters // CHARACTERS_PER_TOKEN))

    def complete(self, choices: int) -> bool:
        """Whether every one of `choices` choices has said why it ended."""
        return len(self.finish_reasons) >= choices
