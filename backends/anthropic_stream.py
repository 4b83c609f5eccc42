"""A stream of an Anthropic server, event by event, in the form of chat completions.

It promises that every event goes on as it came, those too that say nothing to a chat client (`ping`, signatures); that
tool calls have the indices 0, 1, ... and their arguments come as they are sent, `{}` where there are none; and that a
stream which is cut has reported its input but not its output: the count that it begins with is not the answer's.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from backends.anthropic_answer import NAME, Block, StopDetails, WireMessage, WireUsage, finish_reason, said, tool_call
from backends.attempt import AttemptFailed, Event
from backends.dialect import MalformedAnswer
from backends.protocol import ChatChunk, ChunkChoice, Delta, FunctionCall, Json, ToolCall, Usage
from backends.sse import Parsed


class _WireDelta(msgspec.Struct):
    """The change of a block (`type` says which) or of the message (`stop_reason`)."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_details: StopDetails | None = None


class _WireEvent(msgspec.Struct):
    type: str
    index: int = 0
    message: WireMessage | None = None
    content_block: Block | None = None
    delta: _WireDelta | None = None
    usage: WireUsage | None = None
    error: Json | None = None


class _Named(msgspec.Struct):
    type: str | None = None


_event = msgspec.json.Decoder(_WireEvent)
_named = msgspec.json.Decoder(_Named)


class _Call:
    """A tool call under way."""

    __slots__ = ("block", "index", "sent")

    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.index = index
        self.sent = False  # some of its arguments


class AnthropicReader:
    """See `backends.dialect.Reader`."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._model: str | None = None
        self._created = int(time.time())
        self._usage = WireUsage()
        self._counted = False  # the output was reported, which the count at the start does not do
        self._calls: dict[int, _Call] = {}  # by the index of their block

    def read(self, event: Parsed) -> Event:
        """Take one event. Raises AttemptFailed for a reported error, MalformedAnswer for what is no event."""
        raw, data, name = event
        if data == b"[DONE]":  # some compatible servers end like this
            return Event(raw, data, self._chunk([], self._usage.chat(final=self._counted)), done=True, dialect=NAME)
        wire = _decode(data, name)
        if wire is None:
            return Event(raw, data, None, dialect=NAME)
        if wire.type == "ping":
            return Event(raw, data, None, dialect=NAME, idle=True)
        return Event(raw, data, self._say(wire), done=wire.type == "message_stop", dialect=NAME)

    def commits(self, event: Event) -> bool:
        """Text, thoughts, a tool call or a finish reason; or a block that only a client of this dialect can read."""
        chunk = event.chunk
        if chunk is None or event.done:
            return False
        for choice in chunk.choices:
            delta = choice.delta
            if delta.content or delta.reasoning_content or delta.refusal or delta.tool_calls or choice.finish_reason:
                return True
        return not chunk.choices

    def _say(self, wire: _WireEvent) -> ChatChunk | None:
        if wire.type == "content_block_delta":
            return self._delta(wire.index, wire.delta or _WireDelta())
        if wire.type == "content_block_start":
            return self._block(wire.index, wire.content_block or Block("text"))
        if wire.type == "content_block_stop":
            return self._block_end(wire.index)
        if wire.type == "message_start":
            return self._start(wire.message or WireMessage())
        if wire.type == "message_delta":
            return self._message_delta(wire)
        if wire.type == "message_stop":
            return self._chunk([], self._usage.chat(final=self._counted))
        return None

    def _start(self, message: WireMessage) -> ChatChunk:
        self._id, self._model = message.id, message.model
        if message.usage is not None:
            self._usage.update(message.usage)
        return self._chunk([ChunkChoice(delta=Delta(role="assistant", content=""))], self._usage.chat(final=False))

    def _block(self, index: int, block: Block) -> ChatChunk | None:
        if block.type == "tool_use":
            call = self._calls[index] = _Call(block, len(self._calls))
            return self._says(Delta(tool_calls=[tool_call(block, call.index, "")]))
        if block.type == "text":
            return self._says(Delta(content=block.text)) if block.text else None
        if block.type == "thinking":
            return self._says(Delta(reasoning_content=block.thinking)) if block.thinking else None
        # Thoughts that are not to be read, or the work of a tool that the server runs itself.
        return None if block.type == "redacted_thinking" else self._chunk([])

    def _delta(self, index: int, delta: _WireDelta) -> ChatChunk | None:
        if delta.text:
            return self._says(Delta(content=delta.text))
        if delta.thinking:
            return self._says(Delta(reasoning_content=delta.thinking))
        call = self._calls.get(index)
        if delta.partial_json and call is not None:
            call.sent = True
            return self._argues(call, delta.partial_json)
        return None

    def _block_end(self, index: int) -> ChatChunk | None:
        """A call whose arguments did not come in pieces has them in its start, and be it `{}`."""
        call = self._calls.get(index)
        if call is None or call.sent:
            return None
        call.sent = True
        return self._argues(call, bytes(call.block.input).decode())

    def _message_delta(self, wire: _WireEvent) -> ChatChunk:
        if wire.usage is not None:
            self._usage.update(wire.usage)
            self._counted = wire.usage.output_tokens is not None or self._counted
        delta = wire.delta or _WireDelta()
        reason = finish_reason(delta.stop_reason)
        usage = self._usage.chat(final=self._counted and reason is not None)
        refusal = delta.stop_details.explanation if delta.stop_details and delta.stop_reason == "refusal" else None
        return self._chunk([ChunkChoice(delta=Delta(refusal=refusal), finish_reason=reason)], usage)

    def _argues(self, call: _Call, arguments: str) -> ChatChunk:
        return self._says(Delta(tool_calls=[ToolCall(index=call.index, function=FunctionCall(arguments=arguments))]))

    def _says(self, delta: Delta) -> ChatChunk:
        return self._chunk([ChunkChoice(delta=delta)])

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage)


def _decode(data: bytes, name: bytes) -> _WireEvent | None:
    """The event; None for one of a kind that is newer than this module.

    Raises:
        AttemptFailed: it reports an error.
        MalformedAnswer: it is not JSON, or not what its kind of event should be.
    """
    try:
        wire = _event.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        if name == b"error":
            raise AttemptFailed.reported({"type": "error", "status": 500}) from error
        if not str(_kind(data)).startswith(("message_", "content_block_", "error")):
            return None
        raise MalformedAnswer(f"an event of the stream is not in the Anthropic dialect: {error}") from error
    if wire.type == "error" or wire.error is not None:
        raise AttemptFailed.reported(said(wire.error or {}))
    return wire


def _kind(data: bytes) -> Any:
    try:
        return _named.decode(data).type
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedAnswer(f"an event of the stream is not JSON with a type: {error}") from error
