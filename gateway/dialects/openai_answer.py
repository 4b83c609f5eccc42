"""Answers in the OpenAI dialect: unchanged where the backend speaks it, else written from the common form.

The usage chunk comes last and only if the client asked for it, with Tierline's own account of the request under
`tierline`; `[DONE]` is always ours, so that it can never follow a broken answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.attempt import Answer, Event
from backends.openai import chat_body, chat_event
from backends.protocol import Json
from gateway.dialects import errors
from gateway.dialects.errors import GatewayError

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class OpenAIWriter:
    """One answer. See `gateway.dialects.dialect.Writer`."""

    __slots__ = ("_request_id", "_usage", "_wants_usage")

    def __init__(self, request_id: str, *, wants_usage: bool) -> None:
        self._request_id = request_id
        self._wants_usage = wants_usage
        self._usage: bytes | None = None

    async def whole(self, answer: Answer) -> bytes:
        return chat_body(answer)

    def event(self, event: Event) -> Sequence[bytes]:
        event = chat_event(event)
        chunk = event.chunk
        if chunk is None:
            return ()  # nothing in this dialect, or [DONE]: our own is written at the end
        if chunk.usage is not None and not chunk.choices:
            self._usage = event.data
            return ()
        return (event.raw,)

    async def end(self, summary: Json) -> Sequence[bytes]:
        if self._usage is None or not self._wants_usage:
            return (DONE,)
        return b"data: " + _encode({**_decode(self._usage), "tierline": summary}) + b"\n\n", DONE

    def broken(self, error: GatewayError) -> bytes:
        return b"data: " + errors.body(error, self._request_id) + b"\n\n"
