"""gpt-oss: an answer is a row of messages, each for a channel: thoughts, calls, and what is said.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with `<|start|>assistant`; the tokens that end messages are control tokens.
"""

from __future__ import annotations

import re

from engine.server.reply import Arguments, Called, Part, Said, Spans, Thought, cut

CHANNEL, MESSAGE, END, START, CALL, CONSTRAIN = (
    f"<|{name}|>" for name in ("channel", "message", "end", "start", "call", "constrain")
)
MARKERS = (CHANNEL, MESSAGE, END, START, CALL, CONSTRAIN)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")


class Harmony:
    """`ReplyParser` of this form. A message without a header is said."""

    def __init__(self) -> None:
        self.spans: Spans = []
        self._held = ""
        self._seen = 0
        self._header = ""
        self._state = "text"  # or "header"
        self._kind = "final"
        self._count = 0

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held:
            body, marker, rest = cut(self._held, MARKERS)
            self._seen += len(self._held) - len(rest)
            self._held = rest
            self._take(body, parts)
            if marker is None:
                break
            self._turn(marker, parts)
        return parts

    def finish(self, *, cut_off: bool) -> list[Part]:
        parts: list[Part] = []
        self._take(self._held, parts)
        self._held = ""
        return parts

    def _take(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._state == "header":
            self._header += text
        elif self._kind == "thought":
            parts.append(Thought(text))
        elif self._kind == "call":
            parts.append(Arguments(self._count - 1, text))
        else:
            parts.append(Said(text))

    def _turn(self, marker: str, parts: list[Part]) -> None:
        match marker:
            case "<|start|>" | "<|channel|>":
                if self._state == "text":
                    self._close()
                    self._header = ""
                self._state = "header"
                self._header += marker if marker == CHANNEL else ""
            case "<|constrain|>":
                self._header += " "
            case "<|message|>":
                self._begin(parts)
            case _:
                self._close()
                self._state, self._header = "header", ""

    def _begin(self, parts: list[Part]) -> None:
        recipient = _RECIPIENT.search(self._header)
        channel = self._header.rpartition(CHANNEL)[2].split()[:1]
        self._state = "text"
        if recipient is not None:
            self._kind = "call"
            parts.append(Called(self._count, recipient[1]))
            self._count += 1
        elif channel == ["analysis"]:
            self._kind = "thought"
            self.spans.append((self._seen, None))
        else:
            self._kind = "final"

    def _close(self) -> None:
        if self.spans and self.spans[-1][1] is None:
            self.spans[-1] = (self.spans[-1][0], self._seen)
        self._kind = "final"
