"""The OpenAI dialect on the wire: writes a request for a replica, reads chunks and answers, tells good from bad.

One dialect serves the bundled engine and every OpenAI-compatible server. It promises that fields it does not know
pass through untouched in both directions, that the backend is always asked to report usage on streams, that no
credentials are sent unless configured, and that a server's odd but harmless types do not break a stream.
"""

from __future__ import annotations

import email.utils
import math
import re
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from backends.attempt import Call, Candidate
from backends.connection import Origin
from backends.protocol import AnswerChoice, ChatChunk, ChatCompletion, ChunkChoice, Delta, Json, Usage

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OUR_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "content-type", "accept-encoding", "x-request-id")
)
_T = TypeVar("_T")
_chunk = msgspec.json.Decoder(ChatChunk)
_completion = msgspec.json.Decoder(ChatCompletion)


class MalformedAnswer(ValueError):
    """The server sent something that is not a JSON object."""


class Endpoint:
    """A replica's address with everything of a request's head that does not change.

    Raises ValueError for a URL without scheme and host, and for headers that HTTP does not allow or that are ours.
    """

    def __init__(self, base_url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url
        self.origin = Origin(base_url)
        own = {"user-agent": "tierline", **{name.lower(): value for name, value in (headers or {}).items()}}
        if api_key:
            own["authorization"] = f"Bearer {api_key}"
        for name in own:
            if name in _OUR_HEADERS:
                raise ValueError(f"the header {name!r} is set by the gateway itself and cannot be configured")
        self._head = f" HTTP/1.1\r\nhost: {self.origin.authority}\r\naccept-encoding: identity\r\n".encode()
        self._head += _header_lines(own)

    def post(self, call: Call, candidate: Candidate) -> bytes:
        """The bytes of a request. Raises ValueError if a header of the call is not allowed in HTTP."""
        extra = call.extra(candidate) if callable(call.extra) else call.extra
        payload = {**call.payload, **extra, "model": candidate.upstream_model}
        if call.stream:
            payload["stream"] = True
            payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
        elif payload.get("stream"):
            payload["stream"] = False
        body = msgspec.json.encode(payload)
        changing = _header_lines({"x-request-id": call.request_id, **call.headers})
        head = b"POST %b%b%b%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return head % (self.origin.path.encode(), call.path.encode(), self._head, changing, len(body)) + body

    def get(self, path: str) -> bytes:
        """The bytes of a GET of an absolute path on this replica."""
        return b"GET " + path.encode() + self._head + b"\r\n"


def _header_lines(headers: Mapping[str, str]) -> bytes:
    lines = ""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a header name")
        if "\r" in value or "\n" in value or "\0" in value:
            raise ValueError(f"the value of header {name!r} holds a line break or a null character")
        lines += f"{name}: {value}\r\n"
    return lines.encode("latin-1")


def decode_chunk(data: bytes) -> ChatChunk:
    """Decode one event of a stream. Raises MalformedAnswer if it is not a JSON object."""
    try:
        return _chunk.decode(data)
    except msgspec.ValidationError:  # JSON, but not quite the types we know: take what fits
        fields = _object(data)
        choices = [_lenient_choice(choice) for choice in _list(fields.get("choices"))]
        return ChatChunk(
            id=_as(str, fields.get("id")),
            model=_as(str, fields.get("model")),
            choices=choices,
            usage=_as(Usage, fields.get("usage")),
            error=_error_object(fields.get("error")),
        )
    except msgspec.DecodeError as error:
        raise MalformedAnswer(f"an event of the stream is not JSON: {error}") from error


def decode_answer(body: bytes) -> ChatCompletion:
    """Decode a plain answer. Raises MalformedAnswer if it is not a JSON object."""
    try:
        return _completion.decode(body)
    except msgspec.ValidationError:
        fields = _object(body)
        choices = (_as(AnswerChoice, choice) for choice in _list(fields.get("choices")))
        return ChatCompletion(
            id=_as(str, fields.get("id")),
            model=_as(str, fields.get("model")),
            choices=[choice for choice in choices if choice is not None],
            usage=_as(Usage, fields.get("usage")),
            error=_error_object(fields.get("error")),
        )
    except msgspec.DecodeError as error:
        raise MalformedAnswer(f"the answer is not JSON: {error}") from error


def has_content(chunk: ChatChunk, data: bytes) -> bool:
    """Whether a chunk commits a stream: it brings text, a tool call or a finish reason, in whatever field.

    Only asked until the answer is yes, so it can afford to look for fields that `ChatChunk` does not name, such as a
    `reasoning` or an `audio` delta.
    """
    for choice in chunk.choices:
        if choice.delta.content or choice.finish_reason:
            return True
    for choice in _list(_object(data).get("choices")):
        fields = choice if isinstance(choice, dict) else {}
        delta = fields.get("delta")
        if fields.get("text") or (isinstance(delta, dict) and any(v for k, v in delta.items() if k != "role")):
            return True
    return False


def error_in(body: bytes) -> Json | None:
    """The error object of a body, if it is JSON and has one."""
    try:
        return _error_object(_object(body).get("error"))
    except MalformedAnswer:
        return None


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait according to `retry-after-ms` or `retry-after` (seconds or date, RFC 9110 section 10.2.3)."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        elif re.fullmatch(r"[0-9]+(\.[0-9]+)?", value := headers.get("retry-after", "")):
            seconds = float(value)
        else:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None  # missing or neither form: the server said nothing
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _object(data: bytes) -> Json:
    try:
        fields = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise MalformedAnswer(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedAnswer("the server sent JSON that is not an object")
    return fields


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _as(kind: type[_T], value: object) -> _T | None:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return None


def _lenient_choice(value: object) -> ChunkChoice:
    choice = _as(ChunkChoice, value)
    if choice is not None:
        return choice
    fields = value if isinstance(value, dict) else {}
    delta = fields.get("delta")
    content = _as(str, delta.get("content")) if isinstance(delta, dict) else None
    return ChunkChoice(
        index=_as(int, fields.get("index")) or 0,
        delta=Delta(content=content),
        finish_reason=_as(str, fields.get("finish_reason")),
    )


def _error_object(value: object) -> Json | None:
    if isinstance(value, dict):
        return value
    return {"message": str(value)} if value else None
