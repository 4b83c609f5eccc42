"""A mock upstream in the OpenAI dialect that does what agents need: it thinks, calls the tools it gets, and answers.

It thinks if asked to (`reasoning_effort`), calls each tool once where the last turn is the user's, the first with
arguments and the others without, and else says what the tools returned. A stop string of the request ends its answer,
which is an object where the request wants JSON. It gives as many answers (`n`) and `logprobs` as are asked for. Text
completions and rankings it has as well.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bench.mock_wire import OpenAIWire, Record, http_answer, sse

THOUGHT = "Which rivers come to mind?"
TEXT = "The Rhine, the Danube and the Loire."
JSON_TEXT = '{"rivers": 3}'
LOGPROB = {"token": "The", "logprob": -0.25, "bytes": [84, 104, 101], "top_logprobs": []}
ARGUMENTS = '{"city": "Zürich", "days": 3}'
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 4},
}

_TEXT_CHOICE: dict[str, Any] = {"text": TEXT, "finish_reason": "stop", "logprobs": None}
_encode = msgspec.json.encode


class AgentWire(OpenAIWire):
    """Chat completions of an agent's model."""

    def refusal(self, record: Record) -> bytes | None:
        """Of tools that are no functions."""
        try:
            if "messages" in (asked := _decode(record)):
                _calls(asked)
        except (KeyError, TypeError):
            return http_answer(400, self.error("'tools' must be functions with names", 400))
        return None

    def answer(self, record: Record) -> bytes:
        asked = _decode(record)
        if record.path.endswith("/rerank"):
            ranks = [{"index": i, "relevance_score": 1 / (i + 1)} for i in range(len(asked["documents"]))]
            return http_answer(200, _encode({"id": "rank-agent", "results": ranks, "usage": USAGE}))
        if "messages" not in asked:
            texts = [{**_TEXT_CHOICE, "index": index} for index in range(_texts(asked))]
            return http_answer(200, _encode({**_fields("text_completion"), "choices": texts, "usage": USAGE}))
        text, stop = _text(asked)
        calls = _calls(asked)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else text}
        if asked.get("reasoning_effort"):
            message["reasoning_content"] = THOUGHT
        if calls:
            message["tool_calls"] = [_call(number, name, arguments) for number, (name, arguments) in enumerate(calls)]
        choice = {"message": message, "finish_reason": _finish(calls, asked), "stop_reason": stop}
        choice["logprobs"] = _logprobs(asked)
        choices = [{"index": index, **choice} for index in range(asked.get("n") or 1)]
        return http_answer(200, _encode({**_fields("chat.completion"), "choices": choices, "usage": USAGE}))

    def start(self, record: Record) -> bytes:
        asked = _decode(record)
        if "messages" not in asked:
            return b""
        first = {"role": "assistant", "content": ""}
        said = b"".join(_chunk(first, index=index) for index in range(asked.get("n") or 1))
        if asked.get("reasoning_effort"):
            said += _chunk({"reasoning_content": THOUGHT[:8]}) + _chunk({"reasoning_content": THOUGHT[8:]})
        return said

    def text(self, record: Record, pad: bytes) -> bytes:
        """The whole text in its second event, so that any number of chunks says the same."""
        asked = _decode(record)
        if record.events != 1 or "messages" not in asked or _calls(asked):
            return b""
        said = {"content": _text(asked)[0]}
        return b"".join(_chunk(said, index=index, logprobs=_logprobs(asked)) for index in range(asked.get("n") or 1))

    def finish(self, record: Record) -> bytes:
        asked = _decode(record)
        said = b""
        if "messages" not in asked:
            for index in range(_texts(asked)):
                choice = {**_TEXT_CHOICE, "index": index}
                said += sse(_encode({**_fields("text_completion"), "choices": [choice]}))
            return said + sse(b"[DONE]")
        calls = _calls(asked)
        for number, (name, arguments) in enumerate(calls):
            said += _chunk({"tool_calls": [{"index": number, **_call(number, name, "")}]})
            for piece in (arguments[:7], arguments[7:]):
                if piece:
                    said += _chunk({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
        for index in range(asked.get("n") or 1):
            said += _chunk({}, _finish(calls, asked), _text(asked)[1], index)
        if record.usage:
            said += sse(_encode({**_fields(), "choices": [], "usage": USAGE}))
        return said + sse(b"[DONE]")


def _decode(record: Record) -> dict[str, Any]:
    asked: dict[str, Any] = msgspec.json.decode(record.body)
    return asked


def _texts(asked: dict[str, Any]) -> int:
    """How many text completions: `n` for each prompt."""
    prompt = asked["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return (len(prompt) if several else 1) * (asked.get("n") or 1)


def _calls(asked: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    if asked["messages"][-1]["role"] == "tool" or asked.get("tool_choice") == "none":
        return []
    names = [tool["function"]["name"] for tool in asked.get("tools") or []]
    if asked.get("parallel_tool_calls") is False:
        names = names[:1]
    return [(name, "{}" if number else ARGUMENTS) for number, name in enumerate(names)]


def _text(asked: dict[str, Any]) -> tuple[str, str | None]:
    """What it says, and the stop string that ended it."""
    results = [str(message["content"]) for message in asked["messages"] if message["role"] == "tool"]
    text = "The tools say: " + "; ".join(results) if results else TEXT
    if (asked.get("response_format") or {}).get("type") == "json_schema":
        text = JSON_TEXT
    stops = asked.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        if stop in text:
            return text[: text.index(stop)], stop
    return text, None


def _finish(calls: list[tuple[str, str]], asked: dict[str, Any]) -> str:
    if calls:
        return "tool_calls"
    return "length" if asked.get("max_tokens") == 1 or asked.get("max_completion_tokens") == 1 else "stop"


def _call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_mock{number:04}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(asked: dict[str, Any]) -> dict[str, Any] | None:
    return {"content": [LOGPROB], "refusal": None} if asked.get("logprobs") else None


def _chunk(
    delta: dict[str, Any],
    finish: str | None = None,
    stop: str | None = None,
    index: int = 0,
    logprobs: dict[str, Any] | None = None,
) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
    return sse(_encode({**_fields(), "choices": [choice]}))


def _fields(kind: str = "chat.completion.chunk") -> dict[str, Any]:
    return {"id": "chatcmpl-agent", "object": kind, "created": 1_700_000_000, "model": "agent"}
