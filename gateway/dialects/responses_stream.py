"""The output items of a Responses answer, and the events that tell a client of them as they grow.

Items come one after another: each is announced, filled by deltas, and said once more when it is complete. All events
are numbered from 0. What is the same for every delta of an item is put into bytes once, when the item begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from backends.attempt import StreamCut
from backends.protocol import ChunkChoice, Json, ToolCall
from gateway.dialects.tool_calls import CallOrder

_encode = msgspec.json.Encoder().encode

Status = Literal["completed", "incomplete"]
_Kind = Literal["output_text", "refusal", "reasoning_text", "summary_text", "arguments"]

# Names of the events: a delta of each kind, its end, and the field in which the end says the whole.
_EVENTS: Final[dict[_Kind, tuple[str, str]]] = {
    "output_text": ("response.output_text", "text"),
    "refusal": ("response.refusal", "refusal"),
    "reasoning_text": ("response.reasoning_text", "text"),
    "summary_text": ("response.reasoning_summary_text", "text"),
    "arguments": ("response.function_call_arguments", "arguments"),
}


def reasoning_item(item_id: str, thought: str, summary: bool) -> Json:
    """What a model thought, as its summary or as its content."""
    item: Json = {"id": item_id, "type": "reasoning", "status": "completed"}
    if summary:
        return {**item, "summary": [{"type": "summary_text", "text": thought}]}
    return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}


def message_item(item_id: str, parts: list[Json]) -> Json:
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": parts}


def call_item(item_id: str, call: ToolCall, call_id: str) -> Json:
    """A call of a function. `call_id` is for a server that gave none."""
    function = call.function
    return {
        "id": item_id,
        "type": "function_call",
        "status": "completed",
        "call_id": call.id or call_id,
        "name": (function and function.name) or "",
        "arguments": (function and function.arguments) or "",
    }


def text(said: str, logprobs: Json | None = None) -> Json:
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": _logprobs(logprobs)}


def refusal(said: str) -> Json:
    return {"type": "refusal", "refusal": said}


class StreamedOutput:
    """The items of one streamed answer. `items` are those that are complete. `name` makes their ids its own."""

    def __init__(self, name: str, *, summary: bool) -> None:
        self.items: list[Json] = []
        self._name = name
        self._thought: _Kind = "summary_text" if summary else "reasoning_text"
        self._number = 0  # of the next event
        self._item: Json | None = None  # the one that grows
        self._kind: _Kind | None = None  # of the part that grows
        self._parts: list[Json] = []  # of the message that grows: those that are complete
        self._pieces: list[str] = []
        self._logprobs: list[Json] = []  # of the part that grows
        self._unsaid: list[Json] = []  # of tokens whose text is still to come
        self._delta = b""  # the beginning of a delta of this part
        self._tool = -1  # index among the tool calls of the latest one
        self._calls: CallOrder | None = None  # there from the first call on

    def say(self, kind: str, fields: Json) -> bytes:
        """One event."""
        number, self._number = self._number, self._number + 1
        said = {"type": kind, **fields, "sequence_number": number}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(said))

    def add(self, choice: ChunkChoice, out: list[bytes]) -> None:
        """Take what came; `out` gets what it means."""
        delta = choice.delta
        if choice.logprobs:
            self._unsaid += _logprobs(choice.logprobs)
        if self._calls is not None and (delta.content or delta.thoughts or delta.refusal):
            self._rest_of_calls(out)
        if thoughts := delta.thoughts:
            self._thinking(out)
            self._fill(thoughts, out)
        if delta.content:
            self._part("output_text", out)
            self._fill(delta.content, out)
        if delta.refusal:
            self._part("refusal", out)
            self._fill(delta.refusal, out)
        if delta.tool_calls:
            calls = self._calls = self._calls or CallOrder()
            for call in delta.tool_calls:
                for piece in calls.take(call):
                    self._call(piece, out)
        if choice.finish_reason:
            self._rest_of_calls(out)

    def close(self, out: list[bytes] | None, status: Status = "completed") -> None:
        """Complete the item that grows, if there is one, and calls that wait. Without `out` nobody is told."""
        if out is not None:
            self._rest_of_calls(out)
        self._complete(out, status)

    def _rest_of_calls(self, out: list[bytes]) -> None:
        for piece in self._calls.rest() if self._calls is not None else ():
            self._call(piece, out)

    def _complete(self, out: list[bytes] | None, status: Status = "completed") -> None:
        item = self._item
        if item is None:
            return
        told: list[bytes] = []
        self._close_part(told)
        if item["type"] == "message":
            item["content"] = self._parts
        item["status"] = status
        told.append(self.say("response.output_item.done", {"output_index": len(self.items), "item": item}))
        if out is not None:
            out += told
        else:
            self._number -= len(told)
        self.items.append(item)
        self._item, self._parts = None, []

    def _begin(self, item: Json, out: list[bytes]) -> None:
        self._complete(out)
        self._item = item
        said = {**item, "status": "in_progress"}
        out.append(self.say("response.output_item.added", {"output_index": len(self.items), "item": said}))

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}_{len(self.items) + (self._item is not None)}"

    def _thinking(self, out: list[bytes]) -> None:
        if self._item is not None and self._item["type"] == "reasoning":
            return
        item: Json = {"id": self._id("rs"), "type": "reasoning", "summary": []}
        if self._thought == "reasoning_text":
            item["content"] = []
        self._begin(item, out)
        self._open(self._thought, out)

    def _part(self, kind: Literal["output_text", "refusal"], out: list[bytes]) -> None:
        if self._item is None or self._item["type"] != "message":
            self._begin(message_item(self._id("msg"), []), out)
        elif self._kind == kind:
            return
        else:
            self._close_part(out)
        self._open(kind, out)

    def _call(self, call: ToolCall, out: list[bytes]) -> None:
        number = call.index
        assert number is not None
        if number > self._tool:
            self._tool = number
            began = call_item(self._id("fc"), call, f"call_{self._name}_{number}")
            began["arguments"] = ""
            self._begin(began, out)
            self._open("arguments", out)
        elif self._kind != "arguments":
            # Items follow one another here; a call that goes on after text has begun cannot be said.
            raise StreamCut("protocol", "the backend went on with a tool call after it had begun a text")
        if call.function is not None and call.function.arguments:
            self._fill(call.function.arguments, out)

    def _place(self) -> Json:
        """Where the part that grows stands."""
        assert self._item is not None
        place: Json = {"item_id": self._item["id"], "output_index": len(self.items)}
        if self._kind == "summary_text":
            place["summary_index"] = 0
        elif self._kind != "arguments":
            place["content_index"] = len(self._parts)
        return place

    def _open(self, kind: _Kind, out: list[bytes]) -> None:
        self._kind, self._pieces, self._logprobs = kind, [], []
        place = self._place()
        if kind == "summary_text":
            out.append(self.say("response.reasoning_summary_part.added", {**place, "part": _part_of(kind, "")}))
        elif kind != "arguments":
            out.append(self.say("response.content_part.added", {**place, "part": _part_of(kind, "")}))
        name = f"{_EVENTS[kind][0]}.delta"
        said = _encode({"type": name, **place})
        self._delta = b"event: %b\ndata: %b," % (name.encode(), said[:-1])

    def _fill(self, piece: str, out: list[bytes]) -> None:
        self._pieces.append(piece)
        number, self._number = self._number, self._number + 1
        more = b""
        if self._kind == "output_text":
            logprobs, self._unsaid = self._unsaid, []
            self._logprobs += logprobs
            more = b'"logprobs":%b,' % (_encode(_brief(logprobs)) if logprobs else b"[]")
        out.append(b'%b"delta":%b,%b"sequence_number":%d}\n\n' % (self._delta, _encode(piece), more, number))

    def _close_part(self, out: list[bytes]) -> None:
        kind, item = self._kind, self._item
        if kind is None or item is None:
            return
        whole, place = "".join(self._pieces), self._place()
        name, field = _EVENTS[kind]
        fields = {**place, field: whole}
        if kind == "output_text":
            self._logprobs += self._unsaid
            self._unsaid = []
            fields["logprobs"] = _brief(self._logprobs)
        out.append(self.say(f"{name}.done", fields))
        part = _part_of(kind, whole)
        if kind == "output_text":
            part["logprobs"] = self._logprobs
        if kind == "arguments":
            item["arguments"] = whole
        elif kind == "summary_text":
            out.append(self.say("response.reasoning_summary_part.done", {**place, "part": part}))
            item["summary"] = [part]
        else:
            out.append(self.say("response.content_part.done", {**place, "part": part}))
            if kind == "reasoning_text":
                item["content"] = [part]
            else:
                self._parts.append(part)
        self._kind = None


def _part_of(kind: _Kind, said: str) -> Json:
    if kind == "output_text":
        return text(said)
    return refusal(said) if kind == "refusal" else {"type": kind, "text": said}


def _logprobs(given: Json | None) -> list[Json]:
    """The log probabilities of a chat answer; tokens that are a text of their own get their bytes."""
    return [
        {**_token(token), "top_logprobs": [_token(other) for other in token.get("top_logprobs") or ()]}
        for token in (given or {}).get("content") or ()
    ]


def _token(token: Json) -> Json:
    said: Any = token.get("bytes")
    spelled = list(str(token.get("token")).encode("utf-8", "surrogatepass")) if said is None else said
    return {"token": token.get("token"), "logprob": token.get("logprob"), "bytes": spelled}


def _brief(logprobs: Sequence[Json]) -> list[Json]:
    """As events say them: without bytes."""
    return [
        {**_without_bytes(token), "top_logprobs": [_without_bytes(other) for other in token["top_logprobs"]]}
        for token in logprobs
    ]


def _without_bytes(token: Json) -> Json:
    return {"token": token["token"], "logprob": token["logprob"]}
