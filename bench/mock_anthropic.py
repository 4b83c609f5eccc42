"""The mock upstream as an Anthropic server: the same faults by model name, in the words of the Messages API.

It refuses what that API refuses (missing headers, unknown fields, tool calls without results, ...), and its answer
depends on the request: it thinks if asked to, calls the tools it is given, one with arguments and one without, and
then answers in text. Run it by `python -m bench.mock_anthropic --port 9101`.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Annotated, Any

import msgspec
import uvloop
from msgspec import UNSET, Meta, UnsetType

from bench.mock_upstream import serve
from bench.mock_wire import Record, http_answer, sse

Json = dict[str, Any]
Share = Annotated[float, Meta(ge=0, le=1)]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_USAGE = {"input_tokens": 12, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 5, "output_tokens": 34}
_COUNT, _COUNTED = "/messages/count_tokens", 2095
_SIGNATURE = "c2lnbmF0dXJl"
_THOUGHT = "Which rivers come to mind?"
_JSON = '{"rivers": 3}'
_TEXT = "The Rhine, the Danube and the Loire have shaped the towns on their banks."


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Json]

    def blocks(self, kind: str) -> list[Json]:
        return [b for b in self.content if b.get("type") == kind] if isinstance(self.content, list) else []


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    """What the API takes; `stream` and `model` have been read by the server."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)]
    messages: Annotated[list[_Turn], Meta(min_length=1)]
    stream: bool = False
    system: str | list[Json] = ""
    temperature: Share | UnsetType = UNSET
    top_p: Share | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    stop_sequences: list[str] = []
    metadata: Json = {}
    tools: list[Json] = []
    tool_choice: Json | UnsetType = UNSET
    thinking: Json | UnsetType = UNSET
    output_config: Json = {}
    service_tier: str = "auto"
    cache_control: Json | UnsetType = UNSET
    context_management: Json | UnsetType = UNSET  # a beta

    @property
    def thinks(self) -> bool:
        return bool(self.thinking and self.thinking["type"] != "disabled")

    def calls(self) -> list[tuple[str, Json]]:
        """Name and input of the tools that the answer calls: none if the request brings results."""
        choice = self.tool_choice or {"type": "auto"}
        if not self.tools or choice["type"] == "none" or self.messages[-1].blocks("tool_result"):
            return []
        names = [choice["name"]] if choice["type"] == "tool" else [tool["name"] for tool in self.tools][:2]
        inputs: list[Json] = [{"city": "Köln", "days": 3}, {}]
        most = 1 if choice.get("disable_parallel_tool_use") else 2
        return list(zip(names, inputs, strict=False))[:most]


class _CountRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What the API counts: a message without what only concerns its answer."""

    model: str
    messages: Annotated[list[_Turn], Meta(min_length=1)]
    system: str | list[Json] = ""
    tools: list[Json] = []
    tool_choice: Json | UnsetType = UNSET
    thinking: Json | UnsetType = UNSET
    output_config: Json = {}
    cache_control: Json | UnsetType = UNSET
    context_management: Json | UnsetType = UNSET  # a beta


_request = msgspec.json.Decoder(_Request)
_count = msgspec.json.Decoder(_CountRequest)


@functools.lru_cache(maxsize=256)
def _read(body: bytes) -> _Request:
    return _request.decode(body)


def _fault(record: Record) -> tuple[int, str] | None:
    """Status and message for a request that the API would not take."""
    counts = record.path.endswith(_COUNT)
    if not counts and not record.path.endswith("/messages"):
        return 404, "no such path"
    if not {"x-api-key", "authorization"} & set(record.headers):  # the SDK sends the latter
        return 401, "x-api-key header is required"
    version = record.headers.get("anthropic-version")
    if version not in ("2023-06-01", "2026-10-21"):
        return 400, "anthropic-version: header is required"
    if counts:
        try:
            _count.decode(record.body)
        except msgspec.MsgspecError as error:
            return 400, str(error)
        return None
    try:
        request = _read(record.body)
    except msgspec.MsgspecError as error:
        return 400, str(error)
    if version == "2026-10-21" and {request.temperature, request.top_p, request.top_k} != {UNSET}:
        return 400, "temperature, top_p, top_k: Extra inputs are not permitted"
    asked: set[str] = set()
    for number, turn in enumerate(request.messages):
        if turn.role not in ("user", "assistant"):
            return 400, f"messages.{number}: role must be user or assistant"
        if not turn.content or any(not block["text"].strip() for block in turn.blocks("text")):
            return 400, f"messages.{number}: text content blocks must contain non-whitespace text"
        if asked != {result["tool_use_id"] for result in turn.blocks("tool_result")}:
            return 400, f"messages.{number}: each tool_use must have a tool_result in the next message"
        asked = {call["id"] for call in turn.blocks("tool_use")}
    budget = request.thinking.get("budget_tokens") if request.thinking else None
    if budget is not None and not 1024 <= budget < request.max_tokens:
        return 400, "thinking.budget_tokens: must be at least 1024 and less than max_tokens"
    return None


class AnthropicWire:
    """Messages."""

    ping = sse(b'{"type": "ping"}', b"ping")

    def refusal(self, record: Record) -> bytes | None:
        fault = _fault(record)
        return None if fault is None else http_answer(fault[0], self.error(fault[1], fault[0]))

    def error(self, message: str, code: int) -> bytes:
        error = {"type": _TYPES.get(code, "api_error"), "message": message}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": "req_mock0001"})

    def error_event(self, message: str, code: int) -> bytes:
        return sse(self.error(message, code), b"error")

    def answer(self, record: Record) -> bytes:
        if record.path.endswith(_COUNT):
            return http_answer(200, b'{"input_tokens":%d}' % _COUNTED)
        request = _read(record.body)
        calls = request.calls()
        content: list[Json] = []
        if request.thinks:
            content.append({"type": "thinking", "thinking": _THOUGHT, "signature": _SIGNATURE})
        content.append({"type": "text", "text": _JSON if "format" in request.output_config else _TEXT})
        content += [_call(number, name, given) for number, (name, given) in enumerate(calls)]
        message = _message(request, content, _usage(request)) | {"stop_reason": "tool_use" if calls else "end_turn"}
        return http_answer(200, msgspec.json.encode(message), extra=b"request-id: req_mock0001\r\n")

    def start(self, record: Record) -> bytes:
        request = _read(record.body)
        said = _event("message_start", message=_message(request, [], _USAGE | {"output_tokens": 1})) + self.ping
        if request.thinks:
            said += _block(0, {"type": "thinking", "thinking": "", "signature": ""})
            said += _delta(0, "thinking_delta", thinking=_THOUGHT)
            said += _delta(0, "signature_delta", signature=_SIGNATURE)
            said += _event("content_block_stop", index=0)
        return said + _block(int(request.thinks), {"type": "text", "text": ""})

    def text(self, record: Record, pad: bytes) -> bytes:
        request = _read(record.body)
        text = f"t={time.monotonic_ns()} {pad.decode()}"
        if "format" in request.output_config:  # an object, in the first piece
            text = _JSON if record.events == 1 else " "
        return _delta(int(request.thinks), "text_delta", text=text)

    def finish(self, record: Record) -> bytes:
        request = _read(record.body)
        calls = request.calls()
        index = int(request.thinks)
        said = _event("content_block_stop", index=index)
        for number, (name, given) in enumerate(calls):
            index += 1
            said += _block(index, _call(number, name, {}))
            arguments = msgspec.json.encode(given).decode() if given else ""
            for piece in (arguments[:9], arguments[9:]):  # empty pieces too, as the API sends them
                said += _delta(index, "input_json_delta", partial_json=piece)
            said += _event("content_block_stop", index=index)
        stop = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
        return said + _event("message_delta", delta=stop, usage=_usage(request)) + _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return sse(msgspec.json.encode({"type": kind, **fields}), kind.encode())


def _block(index: int, block: Json) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, kind: str, **fields: Any) -> bytes:
    return _event("content_block_delta", index=index, delta={"type": kind, **fields})


def _call(number: int, name: str, given: Json) -> Json:
    return {"type": "tool_use", "id": f"toolu_mock{number:04}", "name": name, "input": given}


def _usage(request: _Request) -> Json:
    return _USAGE | ({"output_tokens_details": {"thinking_tokens": 9}} if request.thinks else {})


def _message(request: _Request, content: list[Json], usage: Json) -> Json:
    return {
        "id": "msg_mock0001",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Anthropic mock upstream with faults by model name")
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=0, help="default: a free port, printed")
    given = arguments.parse_args()
    uvloop.run(serve(given.host, given.port, AnthropicWire()))
