"""A mock upstream that always tells the same story, so that a missing or repeated character of an answer shows.

It can go on from any place in it (`continue_final_message`, as vLLM and SGLang have it), keeps to `max_tokens`, and
refuses to continue what is not the beginning of the story. A piece of the story counts as one token.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from bench.mock_wire import OpenAIWire, Record, http_answer, sse

# Cuts after the fourth and the sixth piece end with white space, after the eighth with a character of four bytes.
PIECES = (
    "Once",
    " upon",
    " a time",
    ", in ",
    "Zürich",
    " \n\n",
    "一二三",
    " 😀",
    " there",
    " there",
    ' lived "a\\b"',
    " cat",
    ".\n",
    "- it",
    " purred",
    ".",
)
STORY = "".join(PIECES)
PROMPT_TOKENS = 12
CREATED = 1_700_000_000

_decode = msgspec.json.decode
_encode = msgspec.json.encode


class StoryWire(OpenAIWire):
    """Chat completions that tell the story. `name` is in the ids, so that two servers can be told apart."""

    def __init__(self, name: str = "story") -> None:
        self.name = name

    def refusal(self, record: Record) -> bytes | None:
        prefix = _prefix(record)
        if prefix is None or (STORY.startswith(prefix) and prefix == prefix.rstrip()):
            return None
        return http_answer(400, self.error("this is not how the story begins", 400))

    def answer(self, record: Record) -> bytes:
        pieces, reason = _rest(record)
        message = {"role": "assistant", "content": "".join(pieces)}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return http_answer(
            200, _encode({**self._fields(record, "chat.completion"), "choices": [choice], "usage": _usage(record)})
        )

    def start(self, record: Record) -> bytes:
        return self._event(record, {"role": "assistant", "content": ""})

    def text(self, record: Record, pad: bytes) -> bytes:
        """The next piece; no bytes after the last. The start of the stream was the first event."""
        pieces, _ = _rest(record)
        told = record.events - 1
        return self._event(record, {"content": pieces[told]}) if told < len(pieces) else b""

    def finish(self, record: Record) -> bytes:
        end = self._event(record, {}, _rest(record)[1])
        if record.usage:
            end += sse(_encode({**self._fields(record), "choices": [], "usage": _usage(record)}))
        return end + sse(b"[DONE]")

    def _event(self, record: Record, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse(_encode({**self._fields(record), "choices": [choice]}))

    def _fields(self, record: Record, kind: str = "chat.completion.chunk") -> dict[str, Any]:
        answer_id = f"chatcmpl-{self.name}-{record.received_at:.6f}"
        created = CREATED + len(self.name)
        return {"id": answer_id, "object": kind, "created": created, "model": f"{self.name}-model", "x_kept": [0.7]}


def _asked(record: Record) -> dict[str, Any]:
    asked: dict[str, Any] = _decode(record.body)
    return asked


def _prefix(record: Record) -> str | None:
    """The beginning of the answer that is to be continued; None for a new one."""
    asked = _asked(record)
    if not asked.get("continue_final_message"):
        return None
    last = asked["messages"][-1]
    well_asked = last["role"] == "assistant" and asked.get("add_generation_prompt") is False
    return str(last["content"]) if well_asked else "?"


def _rest(record: Record) -> tuple[list[str], str]:
    """The pieces that are left to tell, and why the last one is the last. White space goes with the word after it."""
    prefix = _prefix(record) or ""
    pieces: list[str] = []
    position, carried = 0, ""
    for piece in PIECES:
        position += len(piece)
        if position <= len(prefix):
            continue
        new = carried + piece[max(0, len(piece) - (position - len(prefix))) :]
        carried = ""
        if prefix and not pieces and not new.strip():
            carried = new
        else:
            pieces.append(new)
    asked = _asked(record)
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or len(PIECES)
    return pieces[:limit], "length" if limit < len(pieces) else "stop"


def _usage(record: Record) -> dict[str, int]:
    prefix = _prefix(record) or ""
    told = sum(1 for end in itertools.accumulate(len(piece) for piece in PIECES) if end <= len(prefix))
    prompt, completion = PROMPT_TOKENS + told, len(_rest(record)[0])
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
