"""Events of an Anthropic stream, as the parser hands them on, and what a chat client makes of them."""

from __future__ import annotations

from typing import Any

import msgspec

from backends.anthropic_stream import AnthropicReader
from backends.attempt import Event
from backends.protocol import Usage
from backends.sse import SseParser
from bench.mock_anthropic import AnthropicWire
from bench.mock_wire import Record


def event(kind: str, **fields: Any) -> tuple[bytes, bytes, bytes]:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data), data, kind.encode()


def start(**usage: Any) -> tuple[bytes, bytes, bytes]:
    return event("message_start", message={"id": "msg_1", "model": "claude", "content": [], "usage": usage})


def block(index: int, **fields: Any) -> tuple[bytes, bytes, bytes]:
    return event("content_block_start", index=index, content_block=fields)


def delta(index: int, **fields: Any) -> tuple[bytes, bytes, bytes]:
    return event("content_block_delta", index=index, delta=fields)


def end(reason: str | None, **usage: Any) -> tuple[bytes, bytes, bytes]:
    return event("message_delta", delta={"stop_reason": reason}, usage=usage)


STOP = event("message_stop")


def read(*events: tuple[bytes, bytes, bytes]) -> list[Event]:
    reader = AnthropicReader()
    return [reader.read(parsed) for parsed in events]


def last_usage(*events: tuple[bytes, bytes, bytes]) -> Usage | None:
    """What a meter has in the end."""
    return [e.chunk.usage for e in read(*events) if e.chunk is not None and e.chunk.usage is not None][-1]


def whole(events: list[Event]) -> dict[str, Any]:
    """A stream put together as a chat client does it."""
    put: dict[str, Any] = {
        "content": "",
        "reasoning_content": "",
        "refusal": "",
        "tool_calls": {},
        "finish_reason": None,
    }
    for found in events:
        for choice in found.chunk.choices if found.chunk else []:
            for name in ("content", "reasoning_content", "refusal"):
                put[name] += getattr(choice.delta, name) or ""
            for call in choice.delta.tool_calls or []:
                known = put["tool_calls"].setdefault(call.index, {"id": call.id, "name": None, "arguments": ""})
                known["name"] = call.function.name or known["name"]
                known["arguments"] += call.function.arguments or ""
            put["finish_reason"] = choice.finish_reason or put["finish_reason"]
    return put


TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "now")]


def rich_stream() -> bytes:
    """A stream with everything in it: thoughts, pings, text in several scripts, two tools."""
    request = {
        "model": "mock",
        "max_tokens": 4000,
        "messages": [{"role": "user", "content": "hello"}],
        "thinking": {"type": "adaptive"},
        "tools": TOOLS,
        "stream": True,
    }
    record = Record("/v1/messages", "mock", True, {}, msgspec.json.encode(request), 0.0)
    wire = AnthropicWire()
    chunked = wire.start(record) + wire.text(record, "äöü €".encode()) + wire.ping
    chunked += wire.text(record, "\N{GRINNING FACE}".encode()) + wire.finish(record)
    plain = b""
    while chunked:
        size, _, rest = chunked.partition(b"\r\n")
        plain += rest[: int(size, 16)]
        chunked = rest[int(size, 16) + 2 :]
    return plain


STREAM = rich_stream()


def parsed(pieces: list[bytes]) -> list[Event]:
    reader, parser = AnthropicReader(), SseParser()
    reader._created = 0
    return [reader.read(found) for piece in pieces for found in parser.feed(piece)]
