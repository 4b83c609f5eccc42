"""What an answer says, choice by choice, whether it came whole or as a stream: what the checks look at.

Log-probabilities that only the gateway asked for are taken out again here, before anybody else sees the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from backends.attempt import Answer, Event
from backends.protocol import AnswerMessage, ChatCompletion, Delta, FunctionCall, Json, ToolCall

FLOOR: Final = -20.0  # servers write -9999 for "never"; one such token must not outweigh all others

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Token(msgspec.Struct, frozen=True, gc=False):
    """One token of an answer: its log-probability, and by how much its probability exceeds that of the likeliest other.

    Below zero where another token was likelier than the one that was drawn.
    """

    logprob: float
    margin: float


class Said(msgspec.Struct):
    """One choice. `text` and `refusal` are as the model wrote them, `calls` with their arguments whole."""

    text: str = ""
    refusal: str = ""
    calls: list[ToolCall] = msgspec.field(default_factory=list)
    finish_reason: str = ""
    tokens: list[Token] = msgspec.field(default_factory=list)


def of_whole(completion: ChatCompletion) -> list[Said]:
    """The choices of an answer that came in one piece."""
    found = []
    for choice in completion.choices:
        said = Said(text=choice.text or "", finish_reason=choice.finish_reason or "", tokens=tokens_of(choice.logprobs))
        _add(said, choice.message)
        found.append(said)
    return found


def of_stream(events: Iterable[Event]) -> list[Said]:
    """The choices of a stream, in the order of their indexes."""
    found: dict[int, Said] = {}
    texts: dict[int, list[str]] = {}
    for event in events:
        for choice in event.chunk.choices if event.chunk is not None else ():
            said = found.setdefault(choice.index, Said())
            pieces = texts.setdefault(choice.index, [])
            pieces += (piece for piece in (choice.delta.content, choice.text) if piece)
            _add(said, choice.delta, text=False)
            said.finish_reason = choice.finish_reason or said.finish_reason
            said.tokens += tokens_of(choice.logprobs)
    for index, said in found.items():
        said.text = "".join(texts[index])
    return [found[index] for index in sorted(found)]


def _add(said: Said, piece: AnswerMessage | Delta, *, text: bool = True) -> None:
    if text and piece.content:
        said.text += piece.content
    said.refusal += piece.refusal or ""
    for call in piece.tool_calls or ():
        _add_call(said.calls, call)


def _add_call(calls: list[ToolCall], piece: ToolCall) -> None:
    """A call, or the next piece of one that a stream says bit by bit: those have an index."""
    function = piece.function or FunctionCall()
    known = next((call for call in reversed(calls) if piece.index is not None and call.index == piece.index), None)
    if known is None:
        whole = FunctionCall(name=function.name, arguments=function.arguments or "")
        calls.append(ToolCall(id=piece.id, type=piece.type, function=whole, index=piece.index))
        return
    assert known.function is not None
    known.function.name = known.function.name or function.name
    known.function.arguments = (known.function.arguments or "") + (function.arguments or "")


def tokens_of(logprobs: Json | None) -> list[Token]:
    """The tokens that a choice's `logprobs` lists, in the form of chats or in that of text completions."""
    if not logprobs:
        return []
    if isinstance(listed := logprobs.get("content"), list):
        return [token for item in listed if isinstance(item, dict) and (token := _of_chat(item)) is not None]
    return _of_text(logprobs)


def _of_chat(item: Json) -> Token | None:
    others = [
        other.get("logprob")
        for other in item.get("top_logprobs") or ()
        if isinstance(other, dict) and other.get("token") != item.get("token")
    ]
    return _token(item.get("logprob"), others)


def _of_text(logprobs: Json) -> list[Token]:
    names, own, tops = (logprobs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs"))
    found = []
    for place, logprob in enumerate(own):
        name = names[place] if place < len(names) else None
        top = tops[place] if place < len(tops) and isinstance(tops[place], dict) else {}
        token = _token(logprob, [value for other, value in top.items() if other != name])
        if token is not None:
            found.append(token)
    return found


def _token(logprob: object, others: Sequence[object]) -> Token | None:
    if not _is_number(logprob):
        return None
    own = max(FLOOR, min(0.0, float(logprob)))  # type: ignore[arg-type]
    rest = [float(other) for other in others if _is_number(other)]  # type: ignore[arg-type]
    # Without others: the likeliest of them has at most what is left.
    likeliest = math.exp(min(0.0, max(rest))) if rest else 1 - math.exp(own)
    return Token(own, math.exp(own) - likeliest)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def without_logprobs(answer: Answer) -> Answer:
    """The answer as a server writes it that was not asked for log-probabilities."""
    if answer.dialect != "openai":
        return answer
    for choice in answer.completion.choices:
        choice.logprobs = None
    return Answer(_without(answer.body), answer.completion)


def event_without_logprobs(event: Event) -> Event:
    """Likewise one event of a stream."""
    chunk = event.chunk
    if event.dialect != "openai" or chunk is None or all(choice.logprobs is None for choice in chunk.choices):
        return event
    for choice in chunk.choices:
        choice.logprobs = None
    data = _without(event.data)
    return msgspec.structs.replace(event, raw=b"data: " + data + b"\n\n", data=data)


def without_logprobs_each(events: Sequence[Event]) -> list[Event]:
    """Likewise many."""
    return [event_without_logprobs(event) for event in events]


def _without(data: bytes) -> bytes:
    try:
        fields = _decode(data)
    except msgspec.DecodeError:  # what the checks have read of it was sound: then it goes out with them
        return data
    for choice in fields.get("choices") or ():
        if isinstance(choice, dict) and "logprobs" in choice:
            choice["logprobs"] = None
    return _encode(fields)
