"""What OpenAI-compatible servers say almost in the dialect, put right, so that a client need not know its server.

What is right goes on byte for byte; an event or an answer is written anew only where it has one of these faults:

- a tool call has no index, or that of the call before it (Gemini, Ollama): the calls of a choice are numbered in turn;
- it has no id, or an empty one: it is given one. Id and name that are said again with every piece of the arguments
  (vLLM, for a function asked for by name) would be added up by clients: they are said once;
- its arguments are a JSON object instead of the text of one;
- the role is said again with every piece of text (Ollama, Gemini), which clients add up as well, or never;
- a choice that is not finished has the finish reason "" (SGLang) or "null" (DashScope) instead of null, or one that
  turns out not to be its last: `backends.stream` sees that it goes on, and `without_reasons` takes the reason out;
- a choice that calls tools of its own accord ends with "stop" (Gemini, Ollama), where agents wait for "tool_calls". A
  call that the request demands ends with "stop" at OpenAI too: that stays;
- `id`, `object`, `created` or `model` are missing.

A finish reason by which a server says that it gave up is no end of an answer: `gave_up` tells.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from typing import Any

import msgspec
import uuid_utils

from backends.attempt import Call, Event
from backends.protocol import AnswerChoice, ChatChunk, ChatCompletion, ChunkChoice, Json, ToolCall

# Of vLLM and SGLang, of OpenRouter and Mistral, and of DeepSeek, whose reference calls it an interruption.
_GAVE_UP = frozenset({"abort", "error", "insufficient_system_resource"})

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def gave_up(choices: Iterable[ChunkChoice | AnswerChoice]) -> str | None:
    """The reason by which a choice says that the server gave up on it, if one does."""
    for choice in choices:  # asked for every event of a stream
        if choice.finish_reason in _GAVE_UP:
            return choice.finish_reason
    return None


class StreamRepair:
    """Mends the events of one stream, in their order."""

    __slots__ = ("_call", "_choices", "_head")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._choices: dict[int, _Choice] = {}
        self._head: Json | None = None  # what every event of this stream lacks; None before the first

    def passes(self, chunk: ChatChunk) -> bool:
        """Whether an event is a further piece of text, with nothing in it that could have to be mended. Most are."""
        if self._head is None or self._head:
            return False
        for choice in chunk.choices:
            delta = choice.delta
            if delta.role is not None or delta.tool_calls or choice.finish_reason is not None:
                return False
        return True

    def mend(self, chunk: ChatChunk, data: bytes) -> bytes | None:
        """The data of an event as it should be, or None if that is how it is. The chunk is changed to match."""
        if self.passes(chunk):
            return None
        edit = _Edit(data)
        if self._head is None:
            self._head = _missing(chunk, edit, self._call)
        if self._head:
            edit.fields().update(self._head)
            edit.changed = True
        for position, choice in enumerate(chunk.choices):
            self._mend_choice(position, choice, edit)
        return edit.result()

    def _mend_choice(self, position: int, choice: ChunkChoice, edit: _Edit) -> None:
        said = self._choices.get(choice.index)
        if said is None:
            said = self._choices[choice.index] = _Choice()
        delta = choice.delta
        if delta.role is None and not said.role and self._call.operation == "chat":
            delta.role = edit.choice(position).setdefault("delta", {})["role"] = "assistant"
        if delta.role is not None:
            if said.role:
                delta.role = None
                del edit.choice(position)["delta"]["role"]
            said.role = True
        for number, call in enumerate(delta.tool_calls or ()):
            if changes := said.take(call):
                _change(edit.choice(position)["delta"]["tool_calls"][number], changes)
        reason = _finish_reason(choice.finish_reason, bool(said.calls), self._call)
        if reason != choice.finish_reason:
            choice.finish_reason = edit.choice(position)["finish_reason"] = reason


class _ToolCall:
    """A tool call under way: its index for the client, the id that the server gave it, its arguments so far."""

    __slots__ = ("arguments", "id", "index", "name")

    def __init__(self, index: int, call: ToolCall) -> None:
        self.index = index
        self.id = call.id
        self.name = call.function.name if call.function else None
        self.arguments: list[str] = []

    def whole(self) -> bool:
        try:
            _decode("".join(self.arguments).encode())
        except msgspec.DecodeError:
            return False
        return True


class _Choice:
    """What one choice of a stream has said so far."""

    __slots__ = ("_at", "calls", "role")

    def __init__(self) -> None:
        self.role = False
        self.calls: list[_ToolCall] = []
        self._at: dict[int, _ToolCall] = {}  # the latest at each index of the server's

    def take(self, call: ToolCall) -> Json:
        """Take a piece of a tool call; returns the fields in which it has to change, None for one to leave out."""
        known = self._known(call)
        function = call.function
        changes: Json = {}
        if known is None:
            known = _ToolCall(len(self.calls), call)
            self.calls.append(known)
            if not call.id:
                call.id = changes["id"] = _new_id()
            if not call.type:
                call.type = changes["type"] = "function"
        else:
            if call.id is not None:
                call.id = changes["id"] = None
            if function is not None and function.name is not None:
                function.name = changes["name"] = None
        if call.index is not None:
            self._at[call.index] = known
        if call.index != known.index:
            call.index = changes["index"] = known.index
        if function is not None and function.arguments:
            known.arguments.append(function.arguments)
        return changes

    def _known(self, call: ToolCall) -> _ToolCall | None:
        """The call that a piece belongs to; None for a new one."""
        name = call.function.name if call.function else None
        if call.index is None:
            latest = self.calls[-1] if self.calls else None
            goes_on = latest is not None and (latest.id == call.id if call.id else not name)
            return latest if goes_on else None
        known = self._at.get(call.index)
        if known is None or not name or (call.id and call.id == known.id):
            return known
        # A name again, under another id or none: the next call at the same index if this one has its arguments, unless
        # it says nothing more than the name.
        more = call.function is not None and call.function.arguments
        return None if known.whole() and (more or name != known.name) else known


def mend_answer(completion: ChatCompletion, body: bytes, call: Call) -> bytes | None:
    """The body of a plain answer as it should be, or None if that is how it is. The completion is changed to match."""
    edit = _Edit(body)
    if head := _missing(completion, edit, call):
        edit.fields().update(head)
        edit.changed = True
    for position, choice in enumerate(completion.choices):
        calls = choice.message.tool_calls or ()
        for number, tool_call in enumerate(calls):
            changes: Json = {}
            if not tool_call.id:
                tool_call.id = changes["id"] = _new_id()
            if not tool_call.type:
                tool_call.type = changes["type"] = "function"
            if changes:
                _change(edit.choice(position)["message"]["tool_calls"][number], changes)
        reason = _finish_reason(choice.finish_reason, bool(calls), call)
        if reason != choice.finish_reason:
            choice.finish_reason = edit.choice(position)["finish_reason"] = reason
    return edit.result()


def has_text(choice: ChunkChoice) -> bool:
    """Whether a choice says something here, in words, thoughts or calls."""
    delta = choice.delta
    return bool(delta.content or choice.text or delta.tool_calls or delta.thoughts or delta.refusal)


def without_reasons(event: Event, choices: Container[int]) -> Event:
    """An event without the finish reasons of these choices."""
    assert event.chunk is not None
    edit = _Edit(event.data)
    for position, choice in enumerate(event.chunk.choices):
        if choice.finish_reason and choice.index in choices:
            choice.finish_reason = edit.choice(position)["finish_reason"] = None
    data = edit.result() or event.data
    return Event(b"data: " + data + b"\n\n", data, event.chunk)


def arguments_as_text(fields: Json, where: str) -> bytes | None:
    """An event (`where` is "delta") or an answer ("message") whose tool calls have JSON objects for arguments, with
    texts in their place; None if there are none."""
    changed = False
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        said = choice.get(where) if isinstance(choice, dict) else None
        for call in (said.get("tool_calls") if isinstance(said, dict) else None) or ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                function["arguments"] = _encode(function["arguments"]).decode()
                changed = True
    return _encode(fields) if changed else None


class _Edit:
    """A JSON object whose fields are decoded when they are needed, and encoded if they `changed`."""

    __slots__ = ("_data", "_fields", "changed")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields: Json | None = None
        self.changed = False

    def fields(self) -> Json:
        if self._fields is None:
            self._fields = _decode(self._data)
        return self._fields

    def choice(self, position: int) -> Json:
        """A choice, to change it."""
        self.changed = True
        choice: Json = self.fields()["choices"][position]
        return choice

    def result(self) -> bytes | None:
        return _encode(self._fields) if self.changed else None


def _change(call: Json, changes: Json) -> None:
    """Change the fields of a tool call as the server wrote it."""
    for name, value in changes.items():
        holder = call["function"] if name == "name" else call
        if value is None:
            del holder[name]
        else:
            holder[name] = value


def _finish_reason(given: str | None, calls: bool, call: Call) -> str | None:
    if calls and given == "stop" and call.payload.get("tool_choice") in (None, "auto"):
        return "tool_calls"
    return None if given in ("", "null") else given


def _missing(said: ChatChunk | ChatCompletion, edit: _Edit, call: Call) -> Json:
    """Values for what the head of an event or answer lacks; empty if it lacks nothing."""
    whole = said.id is not None and said.object is not None and said.created is not None and said.model is not None
    if whole or call.operation not in ("chat", "completions"):
        return {}
    chat = "chat.completion.chunk" if isinstance(said, ChatChunk) else "chat.completion"
    values = {
        "id": f"chatcmpl-{call.request_id.removeprefix('req-')}",
        "object": chat if call.operation == "chat" else "text_completion",
        "created": int(time.time()),
        "model": call.payload.get("model"),
    }
    fields = edit.fields()  # something may be there that is of another type
    return {name: value for name, value in values.items() if value is not None and fields.get(name) is None}


def _new_id() -> str:
    return f"call_{uuid_utils.uuid4().hex}"
