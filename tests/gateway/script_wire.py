"""A mock upstream of the OpenAI dialect that says what a test wrote down, whole or piece by piece."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.mock_wire import OpenAIWire, Record, http_answer, sse


class ScriptWire(OpenAIWire):
    """Says what a test wrote down: `message` whole, or `deltas` one by one."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": "Yes."}
        self.deltas: list[dict[str, Any]] = [{"content": "Yes."}]
        self.finish_reason = "stop"
        self.logprobs: list[dict[str, Any]] | None = None
        self.usage: dict[str, Any] | None = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        self.more: dict[str, Any] = {}

    def _fields(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "script-1", **self.more}

    def answer(self, record: Record) -> bytes:
        logprobs = {"content": self.logprobs} if self.logprobs else None
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, "logprobs": logprobs}
        usage = {"usage": self.usage} if self.usage else {}
        return http_answer(200, msgspec.json.encode({**self._fields("chat.completion"), "choices": [choice], **usage}))

    def start(self, record: Record) -> bytes:
        chunks = [self._chunk(delta, number) for number, delta in enumerate(self.deltas)]
        return self._chunk({"role": "assistant", "content": ""}) + b"".join(chunks)

    def text(self, record: Record, pad: bytes) -> bytes:
        return b""

    def finish(self, record: Record) -> bytes:
        end = self._chunk({}, finish=self.finish_reason)
        if self.usage:
            end += sse(
                msgspec.json.encode({**self._fields("chat.completion.chunk"), "choices": [], "usage": self.usage})
            )
        return end + sse(b"[DONE]")

    def _chunk(self, delta: dict[str, Any], number: int = -1, finish: str | None = None) -> bytes:
        tokens = self.logprobs[number : number + 1] if self.logprobs and number >= 0 else []
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish,
            "logprobs": {"content": tokens} if tokens else None,
        }
        return sse(msgspec.json.encode({**self._fields("chat.completion.chunk"), "choices": [choice]}))
