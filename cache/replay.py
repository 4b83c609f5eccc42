"""Answers and streams: give a kept answer again in either form, and fold a stream into the answer it carries.

An answer is the decoded `chat.completion` object. `fold(replay_chunks(answer)) == answer` but for id, time and the
cut into pieces; so a stream and a non-streamed call share one entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")  # fields of a delta that come in pieces
# A piece of a replayed stream ends after white space, or after this many characters of a script without spaces.
_PIECE = re.compile(r"\S{1,24}\s*|\s+", re.UNICODE)
_encoder = msgspec.json.Encoder(order="sorted")
_plain_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])


def canonical_answer(answer: dict[str, Any]) -> bytes:
    """The JSON of an answer with sorted keys: equal answers are equal bytes."""
    return _encoder.encode(answer)


def replay_completion(answer: bytes, *, id: str, created: int) -> bytes:
    """The kept answer as the body of a non-streamed response, under a fresh id and time (Unix seconds)."""
    return _plain_encoder.encode({**_decoder.decode(answer), "id": id, "created": created})


def replay_chunks(
    answer: bytes,
    *,
    id: str,
    created: int,
    include_usage: bool,
    usage_extra: dict[str, Any] | None = None,
) -> list[bytes]:
    """The kept answer as server-sent events: role, content in readable pieces, finish, usage if asked, `[DONE]`.

    Args:
        include_usage: the client's `stream_options.include_usage`; the usage is that of the original answer.
        usage_extra: further fields of the usage chunk, such as `tierline`.
    """
    whole = _decoder.decode(answer)
    head: dict[str, Any] = {"id": id, "object": "chat.completion.chunk", "created": created}
    head.update((name, whole[name]) for name in ("model", "system_fingerprint", "service_tier") if name in whole)
    if include_usage:
        head["usage"] = None
    events = [
        _event({**head, "choices": [{"index": choice["index"], "delta": delta, "finish_reason": finish}]})
        for choice in whole["choices"]
        for delta, finish in _deltas(choice)
    ]
    if include_usage:
        events.append(_event({**head, "choices": [], "usage": whole.get("usage"), **(usage_extra or {})}))
    events.append(DONE)
    return events


def _deltas(choice: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str | None]]:
    message: dict[str, Any] = choice["message"]
    first: dict[str, Any] = {"role": message.get("role", "assistant")}
    texts = [name for name in ("reasoning_content", "reasoning", "content") if isinstance(message.get(name), str)]
    # Whatever is neither role nor text (a null refusal, annotations) travels whole with the first piece.
    first.update((name, value) for name, value in message.items() if name != "role" and name not in texts)
    if "content" in texts:
        first["content"] = ""
    yield first, None
    for name in texts:
        for piece in pieces(message[name]):
            yield {name: piece}, None
    yield {}, choice.get("finish_reason")


def pieces(text: str) -> list[str]:
    """A text cut into words with the space behind them; joined, they are the text."""
    return _PIECE.findall(text)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _plain_encoder.encode(chunk) + b"\n\n"


class InvalidStream(ValueError):
    """The bytes are not server-sent events with JSON chunks."""


class Collector:
    """Folds the chunks of a stream into the answer, for any backend that speaks the dialect.

    Feed it either decoded chunks (`add`) or the bytes as they come, cut anywhere (`feed`). Unknown fields of a chunk
    are kept, the last one seen winning.
    """

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}
        self._tools: dict[int, dict[int, dict[str, Any]]] = {}
        self._usage: dict[str, Any] | None = None
        self._rest = b""
        self.failed = False

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream; events may be cut anywhere.

        Raises:
            InvalidStream: an event's data is not a JSON object.
        """
        *events, self._rest = re.split(rb"\r?\n\r?\n", self._rest + data)
        for event in events:
            lines = [line[5:].lstrip(b" ") for line in re.split(rb"\r?\n", event) if line.startswith(b"data:")]
            content = b"\n".join(lines)
            if not content or content == b"[DONE]":
                continue
            try:
                self.add(_decoder.decode(content))
            except msgspec.DecodeError as error:
                raise InvalidStream(f"an event of the stream is not a JSON object: {error}") from error

    def add(self, chunk: dict[str, Any]) -> None:
        """Take one decoded chunk."""
        if chunk.get("error"):
            self.failed = True
        for name, value in chunk.items():
            if name == "usage":
                self._usage = value or self._usage
            elif name != "choices":
                self._head[name] = value
        for part in chunk.get("choices") or ():
            index = part.get("index", 0)
            choice = self._choices.setdefault(index, {"index": index, "message": {}, "finish_reason": None})
            if part.get("finish_reason"):
                choice["finish_reason"] = part["finish_reason"]
            self._add_logprobs(choice, part.get("logprobs"))
            self._add_delta(index, choice["message"], part.get("delta") or {})

    @property
    def complete(self) -> bool:
        """Whether every choice has finished and no error came. A cut stream is never complete."""
        finished = all(choice["finish_reason"] for choice in self._choices.values())
        return bool(self._choices) and finished and not self.failed

    def answer(self) -> dict[str, Any] | None:
        """The `chat.completion` object, or None while the stream is not complete."""
        if not self.complete:
            return None
        answer = {**self._head, "object": "chat.completion", "choices": []}
        for index, choice in sorted(self._choices.items()):
            message = dict(choice["message"])
            for name in _TEXTS:
                if (index, name) in self._texts:
                    message[name] = "".join(self._texts[index, name])
            if index in self._tools:
                message["tool_calls"] = [call for _, call in sorted(self._tools[index].items())]
                message.setdefault("content", None)
            answer["choices"].append({**choice, "message": message})
        if self._usage is not None:
            answer["usage"] = self._usage
        return answer

    def _add_delta(self, index: int, message: dict[str, Any], delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name in _TEXTS and isinstance(value, str):
                self._texts.setdefault((index, name), []).append(value)
            elif name == "tool_calls":
                self._add_tool_calls(index, value or [])
            elif value is not None or name not in message:
                message[name] = value

    def _add_tool_calls(self, index: int, deltas: list[dict[str, Any]]) -> None:
        calls = self._tools.setdefault(index, {})
        for delta in deltas:
            call = calls.setdefault(delta.get("index", len(calls)), {})
            for name, value in delta.items():
                if name == "function":
                    function = call.setdefault("function", {})
                    for part, text in value.items():
                        function[part] = function.get(part, "") + text if part == "arguments" else text
                elif name != "index":
                    call[name] = value

    @staticmethod
    def _add_logprobs(choice: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
        for name, tokens in (logprobs or {}).items():
            if tokens:
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(tokens)


def fold(events: list[bytes]) -> dict[str, Any] | None:
    """The answer that a whole stream carries; None when it broke off.

    Raises:
        InvalidStream: an event's data is not a JSON object.
    """
    collector = Collector()
    for event in events:
        collector.feed(event)
    return collector.answer()
