"""What the mock upstream says, in one dialect or another: the words, without when, how often and how wrongly.

`OpenAIWire` speaks chat completions; `mock_anthropic.py` has the one for Anthropic's Messages API.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

import msgspec


@dataclasses.dataclass(slots=True)
class Record:
    """One request as the mock saw it. `outcome`: running, answered, fault, client-gone."""

    path: str
    model: str
    stream: bool
    headers: dict[str, str]
    body: bytes
    received_at: float
    usage: bool = False  # whether a stream shall report usage
    events: int = 0
    outcome: str = "running"
    ended_at: float | None = None


_USAGE = {"prompt_tokens": 12, "completion_tokens": 34, "total_tokens": 46}
_PLAIN = {
    "id": "chatcmpl-mock0001",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "mock",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "The Rhine flows through Switzerland and Germany, the Danube through Austria, and "
                "the Loire through France alone; each of the three has shaped the towns on its banks.",
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": _USAGE,
    "system_fingerprint": "fp_mock",
    "x_unknown": {"kept": 0.7},
}
_CHUNK = (
    b'{"id":"chatcmpl-mock0001","object":"chat.completion.chunk","created":1700000000,"model":"mock","choices":[%b]}'
)
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 429: b"Too Many Requests"}


def http_answer(status: int, body: bytes, *, extra: bytes = b"", content_type: bytes = b"application/json") -> bytes:
    """A whole HTTP answer."""
    reason = _REASONS.get(status, b"Mock")
    head = b"HTTP/1.1 %d %b\r\nserver: mock\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status, reason, content_type, extra, len(body)) + body


def sse(data: bytes, name: bytes = b"") -> bytes:
    """One event as one chunk of a chunked body."""
    event = (b"event: %b\ndata: %b\n\n" % (name, data)) if name else b"data: " + data + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _choice(delta: bytes, finish: bytes = b"null") -> bytes:
    return sse(_CHUNK % (b'{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}' % (delta, finish)))


_ANSWER = http_answer(200, msgspec.json.encode(_PLAIN))
_ROLE = _choice(b'{"role":"assistant","content":""}')
_FINISH = _choice(b"{}", b'"stop"')
_USAGE_EVENT = sse(_CHUNK[:-1] % b"" + b',"usage":' + msgspec.json.encode(_USAGE) + b"}")
_DONE = sse(b"[DONE]")


class Wire(Protocol):
    """The words of a dialect: what the mock says; when, how often and how wrongly is the same for all of them."""

    ping: bytes  # a sign of life on a stream, as a chunk

    def refusal(self, record: Record) -> bytes | None:
        """The whole HTTP answer to a request that such a server does not take; None if it does."""
        ...

    def answer(self, record: Record) -> bytes:
        """The whole HTTP answer, plain."""
        ...

    def error(self, message: str, code: int) -> bytes:
        """An error object, JSON."""
        ...

    def error_event(self, message: str, code: int) -> bytes:
        """The same in a stream, as a chunk."""
        ...

    def start(self, record: Record) -> bytes:
        """What comes before the first text of a stream, as chunks."""
        ...

    def text(self, record: Record, pad: bytes) -> bytes:
        """One piece of text with the time in it, as a chunk."""
        ...

    def finish(self, record: Record) -> bytes:
        """What comes after the last text, as chunks."""
        ...


class OpenAIWire:
    """Chat completions."""

    ping = b"8\r\n: ping\n\n\r\n"

    def refusal(self, record: Record) -> bytes | None:
        return None

    def answer(self, record: Record) -> bytes:
        return _ANSWER

    def error(self, message: str, code: int) -> bytes:
        return msgspec.json.encode({"error": {"message": message, "type": "mock_error", "code": code or None}})

    def error_event(self, message: str, code: int) -> bytes:
        return sse(self.error(message, code))

    def start(self, record: Record) -> bytes:
        return _ROLE

    def text(self, record: Record, pad: bytes) -> bytes:
        return _choice(b'{"content":"t=%d %b"}' % (time.monotonic_ns(), pad))

    def finish(self, record: Record) -> bytes:
        return _FINISH + (_USAGE_EVENT if record.usage else b"") + _DONE
