"""Answers in the OpenAI dialect: unchanged where the backend speaks it, else written from the common form.

The usage chunk comes last and only if the client asked for it, with Tierline's own account of the request under
`tierline`; `[DONE]` is always ours, so that it can never follow a broken answer. Servers that report usage beside the
text (on every event, or on the one with the finish reason) have it taken out there: clients add it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.attempt import Answer, Event
from backends.openai import chat_body, chat_event
from backends.protocol import Json
from gateway.dialects import errors
from gateway.dialects.dialect import Asked
from gateway.dialects.errors import GatewayError

DONE = b"data: [DONE]\n\n"
_USAGE_CHUNK = ("id", "object", "created", "model", "service_tier", "system_fingerprint", "usage")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class OpenAIWriter:
    """One answer. See `gateway.dialects.dialect.Writer`. `usage_on_every_chunk`: the client asked for that as well."""

    __slots__ = ("_request_id", "_usage", "_usage_on_every_chunk", "_wants_usage")

    def __init__(self, request_id: str, *, wants_usage: bool, usage_on_every_chunk: bool = False) -> None:
        self._request_id = request_id
        self._wants_usage = wants_usage
        self._usage_on_every_chunk = usage_on_every_chunk
        self._usage: Json | None = None

    async def whole(self, answer: Answer) -> bytes:
        return chat_body(answer)

    def event(self, event: Event) -> Sequence[bytes]:
        if event.dialect != "openai":
            event = chat_event(event)
        chunk = event.chunk
        if chunk is None:
            return ()  # nothing in this dialect, or [DONE]: our own is written at the end
        if chunk.usage is None:
            return (event.raw,)
        fields = _decode(event.data)
        if not chunk.choices:
            self._usage = fields
            return ()
        if "usage" not in fields or self._usage_on_every_chunk:
            return (event.raw,)
        self._usage = {name: fields[name] for name in _USAGE_CHUNK if name in fields} | {"choices": []}
        del fields["usage"]
        return (b"data: " + _encode(fields) + b"\n\n",)

    async def end(self, summary: Json) -> Sequence[bytes]:
        if self._usage is None or not self._wants_usage:
            return (DONE,)
        return b"data: " + _encode({**self._usage, "tierline": summary}) + b"\n\n", DONE

    def broken(self, error: GatewayError) -> bytes:
        return b"data: " + errors.body(error, self._request_id) + b"\n\n"


def chunk_writer(asked: Asked, request_id: str) -> OpenAIWriter:
    """The writer for an answer that may be a stream: what the request says about usage counts."""
    options = asked.payload.get("stream_options") or {}
    every = bool(options.get("continuous_usage_stats"))  # vLLM's
    return OpenAIWriter(request_id, wants_usage=asked.wants_usage, usage_on_every_chunk=every)
