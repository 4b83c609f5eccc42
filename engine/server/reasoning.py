"""Models that think: what they think is told apart from what they say.

`<think>…</think>` is the form of most of them. Some templates open it in the prompt: then the answer begins with a
thought. White space around thought and answer belongs to neither.
"""

from __future__ import annotations

from engine.server.reply import Part, ReplyParser, Spans, Thought, cut

OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """`ReplyParser` that separates a thought at the beginning; `then` parses what comes after it."""

    def __init__(self, then: ReplyParser, *, opened: bool) -> None:
        """`opened`: the prompt ends within a thought."""
        self._then = then
        self._held = ""
        self._seen = 0  # characters before `_held`
        self._state = "thought" if opened else "start"
        self._begun = False  # the thought has text
        self.spans: Spans = [(0, None)] if opened else []

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        if self._state == "start":
            self._start()
        if self._state == "thought":
            parts += self._think()
        if self._state == "gap":  # behind the thought
            self._drop(len(self._held) - len(self._held.lstrip()))
            if self._held:
                self._state = "answer"
        if self._state == "answer":
            answer, self._held = self._held, ""
            parts += self._then.push(answer)
        return parts

    def finish(self, *, cut_off: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "thought":
            rest = self._held.rstrip() if self._begun else self._held.strip()
            if rest:
                parts.append(Thought(rest))
        elif self._state == "start":
            parts += self._then.push(self._held)
        self._held = ""
        return parts + self._then.finish(cut_off=cut_off)

    def _start(self) -> None:
        begins = self._held.lstrip()
        if begins.startswith(OPEN):
            self.spans.append((0, None))
            self._drop(len(self._held) - len(begins) + len(OPEN))
            self._state = "thought"
        elif not OPEN.startswith(begins):
            self._state = "answer"

    def _think(self) -> list[Part]:
        if not self._begun:
            self._drop(len(self._held) - len(self._held.lstrip()))
        thought, closed, _ = cut(self._held, (CLOSE,))
        text = thought.rstrip()
        parts: list[Part] = [Thought(text)] if text else []
        self._begun = self._begun or bool(text)
        if closed is None:
            # White space may turn out to be the last of the thought.
            self._drop(len(text))
            return parts
        self._drop(len(thought) + len(CLOSE))
        self.spans[-1] = (self.spans[-1][0], self._seen)
        self._state = "gap"
        return parts

    def _drop(self, count: int) -> None:
        self._held = self._held[count:]
        self._seen += count
