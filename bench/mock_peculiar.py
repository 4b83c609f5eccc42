"""A mock upstream that speaks the OpenAI dialect as real servers do: each in its own way, none quite as OpenAI.

The model's name picks the server. All of them say the same, so that a client which hears it through a gateway should
not be able to tell them apart: they think if asked to (`reasoning_effort`), call each tool they are given, the first
with arguments and the others without, and answer in text where there is none. What is peculiar about each is told at
its class, as seen in public reports and in the servers' own sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from bench.mock_wire import OpenAIWire, Record, http_answer, sse

THOUGHT = "Which rivers come to mind?"
PIECES = ("The Rhine,", " the Danube", " and the Loire.")
TEXT = "".join(PIECES)
ARGUMENTS = '{"city":"Zürich","days":3}'
USAGE = {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29}
TOO_LONG = "the request exceeds the available context size, try increasing it"

Json = dict[str, Any]
_encode = msgspec.json.encode


class Server:
    """How OpenAI does it; the others change what is different."""

    def __init__(self, asked: Json) -> None:
        self.asked = asked
        self.thinks = bool(asked.get("reasoning_effort"))
        self.wants_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        names = [tool["function"]["name"] for tool in asked.get("tools") or []]
        self.calls = [(name, "{}" if number else ARGUMENTS) for number, name in enumerate(names)]

    def head(self, kind: str) -> Json:
        return {"id": "chatcmpl-1", "object": kind, "created": 1_700_000_000, "model": self.asked["model"]}

    def chunk(self, delta: Json, finish: str | None = None, **fields: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return sse(_encode({**self.head("chat.completion.chunk"), "choices": [choice], **fields}))

    def stream(self) -> Iterator[bytes]:
        """The chunks of a chunked body."""
        yield self.chunk({"role": "assistant", "content": "", "refusal": None})
        if self.thinks:
            yield self.chunk({"reasoning_content": THOUGHT})
        if not self.calls:
            for piece in PIECES:
                yield self.chunk({"content": piece})
        for number, (name, arguments) in enumerate(self.calls):
            first = {"index": number, "id": f"call_{number}", "type": "function"}
            yield self.chunk({"tool_calls": [{**first, "function": {"name": name, "arguments": ""}}]})
            for piece in (arguments[:9], arguments[9:]):
                yield self.chunk({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
        yield self.chunk({}, "tool_calls" if self.calls else "stop")
        yield from self.end()

    def end(self) -> Iterator[bytes]:
        if self.wants_usage:
            yield sse(_encode({**self.head("chat.completion.chunk"), "choices": [], "usage": USAGE}))
        yield sse(b"[DONE]")

    def message(self) -> Json:
        """The message of a plain answer."""
        message: Json = {"role": "assistant", "content": None if self.calls else TEXT}
        if self.thinks:
            message["reasoning_content"] = THOUGHT
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(self.calls)
            ]
        return message

    def answer(self) -> bytes:
        finish = "tool_calls" if self.calls else "stop"
        choice = {"index": 0, "message": self.message(), "finish_reason": finish}
        return http_answer(200, _encode({**self.head("chat.completion"), "choices": [choice], "usage": USAGE}))


class Gemini(Server):
    """Usage and role on every chunk; tool calls without an index and whole, one without an id; they end with "stop".
    Errors are an array. A signature stands beside each call."""

    def stream(self) -> Iterator[bytes]:
        role = {"role": "assistant"}
        if self.thinks:
            yield self.chunk({**role, "reasoning_content": THOUGHT}, usage=USAGE | {"completion_tokens": 1})
        for piece in PIECES if not self.calls else ():
            yield self.chunk({**role, "content": piece}, usage=USAGE | {"completion_tokens": 3})
        for number, (name, arguments) in enumerate(self.calls):
            call = {
                "extra_content": {"google": {"thought_signature": f"c2ln{number}"}},
                "function": {"arguments": arguments, "name": name},
                "id": "" if number else "function-call-1",
                "type": "function",
            }
            yield self.chunk({**role, "tool_calls": [call]}, usage=USAGE)
        yield self.chunk(role, "stop", usage=USAGE)
        yield sse(b"[DONE]")


class GeminiRefusing(Gemini):
    """The error of a request that it does not take."""

    def answer(self) -> bytes:
        error = {"code": 400, "message": "Unable to submit request", "status": "INVALID_ARGUMENT"}
        return http_answer(400, _encode([{"error": error}]))


class Ollama(Server):
    """Role and content on every chunk, thoughts as `reasoning`; tool calls whole, each at index 0, and then "stop"."""

    def stream(self) -> Iterator[bytes]:
        role = {"role": "assistant", "content": ""}
        if self.thinks:
            yield self.chunk({**role, "reasoning": THOUGHT})
        for piece in PIECES if not self.calls else ():
            yield self.chunk({**role, "content": piece})
        for number, (name, arguments) in enumerate(self.calls):
            function = {"name": name, "arguments": arguments}
            call = {"id": f"call_{number}", "index": 0, "type": "function", "function": function}
            yield self.chunk({**role, "tool_calls": [call]})
        yield self.chunk(role, "stop")
        yield from self.end()

    def message(self) -> Json:
        message = super().message()
        message["content"] = message["content"] or ""
        if self.thinks:
            message["reasoning"] = message.pop("reasoning_content")
        return message


class Vllm(Server):
    """Thoughts as `reasoning`; an empty `tool_calls` in plain answers; for a function asked for by name, id (a new one
    each time), type and name with every piece of its arguments, and "stop" in the end, as at OpenAI."""

    def stream(self) -> Iterator[bytes]:
        yield self.chunk({"role": "assistant", "content": ""}, prompt_token_ids=None)
        if self.thinks:
            yield self.chunk({"reasoning": THOUGHT}, token_ids=None)
        for piece in PIECES if not self.calls else ():
            yield self.chunk({"content": piece})
        if isinstance(choice := self.asked.get("tool_choice"), dict):
            for number, piece in enumerate((ARGUMENTS[:4], ARGUMENTS[4:9], ARGUMENTS[9:], "")):
                function = {"name": choice["function"]["name"], "arguments": piece}
                call = {"index": 0, "id": f"chatcmpl-tool-{number}", "type": "function", "function": function}
                yield self.chunk({"tool_calls": [call]})
            yield self.chunk({"content": ""}, "stop", stop_reason=None)
        else:
            for number, (name, arguments) in enumerate(self.calls):
                call = {"id": f"chatcmpl-tool-{number}", "type": "function", "index": number}
                yield self.chunk({"tool_calls": [{**call, "function": {"name": name}}]})
                yield self.chunk({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
            yield self.chunk({"content": ""}, "tool_calls" if self.calls else "stop")
        yield from self.end()

    def message(self) -> Json:
        message = {"tool_calls": [], "refusal": None, **super().message()}
        if self.thinks:
            message["reasoning"] = message.pop("reasoning_content")
        return message


class VllmAborted(Vllm):
    """The engine gave the request up, and says so by the finish reason alone."""

    def stream(self) -> Iterator[bytes]:
        yield self.chunk({"role": "assistant", "content": ""})
        yield self.chunk({"content": PIECES[0]})
        yield self.chunk({"content": ""}, "abort")
        yield from self.end()

    def answer(self) -> bytes:
        choice = {"index": 0, "message": {"role": "assistant", "content": PIECES[0]}, "finish_reason": "abort"}
        return http_answer(200, _encode({**self.head("chat.completion"), "choices": [choice], "usage": USAGE}))


class Sglang(Server):
    """Every field there is on every chunk, null or not; "" for no finish reason yet; a usage of null."""

    def chunk(self, delta: Json, finish: str | None = None, **fields: Any) -> bytes:
        empty = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
        choice = {"index": 0, "delta": {**empty, **delta}, "finish_reason": finish or "", "matched_stop": None}
        return sse(_encode({**self.head("chat.completion.chunk"), "choices": [choice], "usage": None, **fields}))


class LlamaCpp(Server):
    """Content of null in the first chunk, `timings` in the last; arguments in pieces of a few characters."""

    def stream(self) -> Iterator[bytes]:
        yield self.chunk({"role": "assistant", "content": None})
        if self.thinks:
            yield self.chunk({"reasoning_content": THOUGHT})
        for piece in PIECES if not self.calls else ():
            yield self.chunk({"content": piece})
        for number, (name, arguments) in enumerate(self.calls):
            function = {"name": name, "arguments": arguments[:1]}
            call = {"index": number, "id": f"Zk{number}", "type": "function", "function": function}
            yield self.chunk({"tool_calls": [call]})
            for start in range(1, len(arguments), 3):
                function = {"arguments": arguments[start : start + 3]}
                yield self.chunk({"tool_calls": [{"index": number, "function": function}]})
        yield self.chunk({}, "tool_calls" if self.calls else "stop", timings={"prompt_n": 20, "predicted_n": 9})
        yield from self.end()


class LlamaCppFull(LlamaCpp):
    """A context that runs full after the answer has begun: an error object in a stream of status 200."""

    def stream(self) -> Iterator[bytes]:
        yield self.chunk({"role": "assistant", "content": None})
        if self.asked["messages"][-1]["content"] == "begin":
            yield self.chunk({"content": PIECES[0]})
        error = {"code": 400, "message": TOO_LONG, "type": "exceed_context_size_error", "n_ctx": 256}
        yield sse(_encode({"error": error}))


class Bare(Server):
    """A small server that says no more than it must: no id, object, time, model or role; no [DONE], no usage; the
    arguments of tools as JSON objects."""

    def head(self, kind: str) -> Json:
        return {}

    def stream(self) -> Iterator[bytes]:
        if self.thinks:
            yield self.chunk({"reasoning_content": THOUGHT})
        for piece in PIECES if not self.calls else ():
            yield self.chunk({"content": piece})
        for name, arguments in self.calls:
            yield self.chunk(
                {"tool_calls": [{"function": {"name": name, "arguments": msgspec.json.decode(arguments)}}]}
            )
        yield self.chunk({}, "stop")

    def message(self) -> Json:
        message = super().message()
        for call in message.get("tool_calls") or []:
            del call["id"], call["type"]
            call["function"]["arguments"] = msgspec.json.decode(call["function"]["arguments"])
        return message


class UsageWithFinish(Server):
    """Mistral, DeepSeek and others: usage on the chunk with the finish reason, asked for or not."""

    def end(self) -> Iterator[bytes]:
        yield sse(b"[DONE]")

    def chunk(self, delta: Json, finish: str | None = None, **fields: Any) -> bytes:
        return super().chunk(delta, finish, **fields, **({"usage": USAGE} if finish else {}))


class ReasonOnEveryChunk(Server):
    """Small servers that write the same finish reason on each chunk of a choice, and usage behind the last."""

    def chunk(self, delta: Json, finish: str | None = None, **fields: Any) -> bytes:
        return super().chunk(delta, finish or ("tool_calls" if self.calls else "stop"), **fields)


class MixedCalls(Server):
    """Servers that make calls side by side: all of them begin, and then the pieces of their arguments come in turns."""

    def stream(self) -> Iterator[bytes]:
        if not self.calls:
            yield from super().stream()
            return
        begun = [
            {"index": number, "id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": ""}}
            for number, (name, _) in enumerate(self.calls)
        ]
        yield self.chunk({"role": "assistant", "content": None, "tool_calls": begun})
        for start in range(0, max(len(arguments) for _, arguments in self.calls), 5):
            for number, (_, arguments) in enumerate(self.calls):
                if piece := arguments[start : start + 5]:
                    yield self.chunk({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
        yield self.chunk({}, "tool_calls")
        yield from self.end()


class NullAsText(Server):
    """DashScope: the text "null" for no finish reason yet."""

    def chunk(self, delta: Json, finish: str | None = None, **fields: Any) -> bytes:
        return super().chunk(delta, finish or "null", **fields)


SERVERS: dict[str, type[Server]] = {
    "openai": Server,
    "gemini": Gemini,
    "gemini-refusing": GeminiRefusing,
    "ollama": Ollama,
    "vllm": Vllm,
    "vllm-aborted": VllmAborted,
    "sglang": Sglang,
    "llama.cpp": LlamaCpp,
    "llama.cpp-full": LlamaCppFull,
    "bare": Bare,
    "usage-with-finish": UsageWithFinish,
    "reason-on-every-chunk": ReasonOnEveryChunk,
    "mixed-calls": MixedCalls,
    "null-as-text": NullAsText,
}


class PeculiarWire(OpenAIWire):
    """Chat completions of the server that the model is named after."""

    def answer(self, record: Record) -> bytes:
        return _server(record).answer()

    def start(self, record: Record) -> bytes:
        return b""

    def text(self, record: Record, pad: bytes) -> bytes:
        return b""

    def finish(self, record: Record) -> bytes:
        return b"".join(_server(record).stream())


def _server(record: Record) -> Server:
    return SERVERS[record.model](msgspec.json.decode(record.body))
