"""One chat answer in OpenAI's form: parts of the reply as deltas of a stream, or as one message."""

from __future__ import annotations

import secrets
import string
from bisect import bisect_right

from backends.protocol import Json
from engine.server.reply import Arguments, Called, Part, Reply, ReplyParser, Said, Thought
from engine.text.detokenizer import Delta
from engine.types import FinishReason

_ALPHABET = string.ascii_letters + string.digits


class ReplyWriter:
    """State of one answer. Give it every delta of the detokenizer, in order."""

    def __init__(self, parser: ReplyParser, *, short_ids: bool) -> None:
        """`short_ids`: those of calls have nine letters and digits."""
        self._parser = parser
        self._short_ids = short_ids
        self._reply = Reply()
        self._ids: list[str] = []
        self._offsets: list[int] = []  # where tokens begin

    def deltas(self, delta: Delta) -> list[Json]:
        """What a stream says of it."""
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish(cut_off=delta.finish_reason is FinishReason.LENGTH)
        self._offsets += delta.text_offsets
        self._reply.add(parts)
        return [self._delta(part) for part in parts]

    def message(self) -> Json:
        """The whole answer."""
        reply = self._reply
        message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(self._ids, reply.calls, strict=True)
            ]
        return message

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """OpenAI's: an answer that calls tools says so, unless it was cut off."""
        return "tool_calls" if reason is FinishReason.STOP and self._reply.calls else reason

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that begin within thoughts."""
        spans = self._parser.spans
        starts = [start for start, _ in spans]

        def within(offset: int) -> bool:
            at = bisect_right(starts, offset) - 1
            end = spans[at][1] if at >= 0 else 0
            return end is None or offset < end

        return sum(map(within, self._offsets))

    def _delta(self, part: Part) -> Json:
        match part:
            case Thought(text):
                return {"reasoning_content": text}
            case Said(text):
                return {"content": text}
            case Called(index, name):
                self._ids.append(self._new_id())
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._ids[index], "type": "function", "function": function}
                return {"tool_calls": [call]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
