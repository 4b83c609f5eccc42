"""Faults of the mock upstream that break the protocol itself: what is written, byte for byte, and how it ends.

`Behaviour.kind` names them; `after` counts the content events of a stream that come first. Faults of the answer's
content and timing are in `mock_upstream.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from bench.mock_wire import Record, Wire, http_answer, sse

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"
_PAGE = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"

Ending = Literal["keep", "close", "reset", "silence"]


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """What to write, piece by piece, and what comes then: the connection is kept, closed, reset, or nothing comes."""

    pieces: list[bytes]
    ending: Ending


def script(kind: str, wire: Wire, record: Record, after: int) -> Script | None:
    """The script of a fault; None if `kind` is not one of `KINDS`."""
    if kind not in KINDS:
        return None
    begun = _begun(wire, record, after) if record.stream else b""
    return KINDS[kind](wire, record, begun)


def _begun(wire: Wire, record: Record, after: int) -> bytes:
    """A stream up to its last content event before the fault."""
    begun = STREAM_HEAD + wire.start(record)
    record.events = 1
    for _ in range(after):
        begun += wire.text(record, b"")
        record.events += 1
    return begun


def _body(wire: Wire, record: Record) -> bytes:
    return wire.answer(record).partition(b"\r\n\r\n")[2]


def _with_length(body: bytes, length: int) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % length + body


def _half_head(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([b"HTTP/1.1 200 OK\r\ncontent-type: app"], "silence")


def _not_http(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([b"SSH-2.0-OpenSSH_9.2p1\r\n"], "silence")


def _html(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([http_answer(200, _PAGE, content_type=b"text/html")], "keep")


def _empty(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([begun + STREAM_END if record.stream else http_answer(200, b"")], "keep")


def _no_choices(wire: Wire, record: Record, begun: bytes) -> Script:
    nothing = b'{"id":"x","object":"chat.completion","choices":[]}'
    return Script([http_answer(200, nothing)], "keep")


def _gzip(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([http_answer(200, b"\x1f\x8b\x08\x00", extra=b"content-encoding: gzip\r\n")], "keep")


def _chunking(wire: Wire, record: Record, begun: bytes) -> Script:
    plain = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"id"\r\n'
    return Script([(begun or plain) + b"xyz\r\nno size\r\n"], "silence")


def _short_length(wire: Wire, record: Record, begun: bytes) -> Script:
    """The body is longer than its declared length; what is too much arrives with it."""
    body = begun.partition(b"\r\n\r\n")[2] if record.stream else _body(wire, record)
    return Script([_with_length(body, len(body) - 20)], "keep")


def _long_length(wire: Wire, record: Record, begun: bytes) -> Script:
    body = _body(wire, record)
    return Script([_with_length(body[:-20], len(body))], "close")


def _truncated(wire: Wire, record: Record, begun: bytes) -> Script:
    """Good HTTP around half a JSON document."""
    body = _body(wire, record)[:-20]
    return Script([_with_length(body, len(body))], "keep")


def _reset(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([begun or wire.answer(record)[:-20]], "reset")


def _drip(wire: Wire, record: Record, begun: bytes) -> Script:
    """A byte at a time, so that something always comes and never enough."""
    rest = sse(b'{"choices":[{"index":0,"delta":{"content":"' + b"z" * 2000)
    if not record.stream:
        begun, rest = STREAM_HEAD.replace(b"text/event-stream", b"application/json"), b"1\r\n \r\n" * 300
    return Script([begun, *(rest[i : i + 1] for i in range(len(rest)))], "silence")


def _utf8(wire: Wire, record: Record, begun: bytes) -> Script:
    """Half a character where a whole one should be."""
    wrong = b'{"choices":[{"index":0,"delta":{"content":"Z\xc3"},"finish_reason":null}]}'
    return Script([begun + sse(wrong) if record.stream else http_answer(200, wrong)], "silence")


def _early_done(wire: Wire, record: Record, begun: bytes) -> Script:
    """The end of the stream although nothing was finished."""
    return Script([begun + sse(b"[DONE]") + STREAM_END], "keep")


def _done_twice(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([_all(wire, record, begun) + sse(b"[DONE]") + sse(b"[DONE]") + STREAM_END], "keep")


def _no_done(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([_all(wire, record, begun).replace(sse(b"[DONE]"), b"") + STREAM_END], "keep")


def _cut_after_finish(wire: Wire, record: Record, begun: bytes) -> Script:
    return Script([_all(wire, record, begun).replace(sse(b"[DONE]"), b"")], "reset")


def _all(wire: Wire, record: Record, begun: bytes) -> bytes:
    while text := wire.text(record, b""):
        begun += text
        record.events += 1
        if record.events > 64:
            break
    return begun + wire.finish(record)


KINDS: dict[str, Callable[[Wire, Record, bytes], Script]] = {
    "half_head": _half_head,
    "not_http": _not_http,
    "html": _html,
    "empty": _empty,
    "no_choices": _no_choices,
    "gzip": _gzip,
    "chunking": _chunking,
    "short_length": _short_length,
    "long_length": _long_length,
    "truncated": _truncated,
    "reset": _reset,
    "drip": _drip,
    "utf8": _utf8,
    "early_done": _early_done,
    "done_twice": _done_twice,
    "no_done": _no_done,
    "cut_after_finish": _cut_after_finish,
}
