"""The OpenAI dialect on the wire: writes a request for a replica, reads chunks and answers, tells good from bad.

One dialect serves the bundled engine and every OpenAI-compatible server. It promises that fields it does not know
pass through untouched in both directions, that the backend is always asked to report usage on streams, that no
credentials are sent unless configured, and that a server's odd but harmless types do not break a stream. Answers of
servers of another kind are written in this dialect by `chat_event` and `chat_body`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from backends.attempt import Answer, AttemptFailed, Call, Candidate, Event, Operation
from backends.dialect import MalformedAnswer
from backends.endpoint import Endpoint
from backends.errors import recognised
from backends.protocol import AnswerChoice, ChatChunk, ChatCompletion, ChunkChoice, Delta, Json, OutputLimitField, Usage
from backends.repair import StreamRepair, arguments_as_text, gave_up, mend_answer
from backends.sse import Parsed

_PATHS: Mapping[Operation, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
    "rerank": "/rerank",
}
_T = TypeVar("_T")
_chunk = msgspec.json.Decoder(ChatChunk)
_completion = msgspec.json.Decoder(ChatCompletion)


class _Reader:
    """Reads a stream: what arrives is already in the common form, or almost (`backends.repair`)."""

    def __init__(self, call: Call) -> None:
        self._repair = StreamRepair(call)

    def read(self, event: Parsed) -> Event | None:
        raw, data, name = event
        if data == b"[DONE]":
            return Event(raw, data, None, True)
        if name == b"error":
            raise AttemptFailed.reported(error_in(data) or {})
        mended = None
        try:
            chunk = _chunk.decode(data)
        except msgspec.MsgspecError:
            mended = arguments_as_text(_object(data), "delta")
            chunk = decode_chunk(mended or data)
        if chunk.error is not None or chunk.object == "error":
            raise AttemptFailed.reported(error_in(data) or {})
        if mended is None and self._repair.passes(chunk):
            return Event(raw, data, chunk, plain=True)
        mended = self._repair.mend(chunk, mended or data) or mended
        if reason := gave_up(chunk.choices):
            raise AttemptFailed.reported({"type": "finish_reason", "code": reason})
        if mended is not None:
            return Event(b"data: " + mended + b"\n\n", mended, chunk)
        return Event(raw, data, chunk)

    def commits(self, event: Event) -> bool:
        return event.chunk is not None and has_content(event.chunk, event.data)


class OpenAIDialect:
    """The bundled engine, OpenAI, and every server that is compatible with it. See `backends.dialect.Dialect`."""

    name = "openai"

    def headers(self, api_key: str | None) -> Mapping[str, str]:
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    def post(self, endpoint: Endpoint, call: Call, candidate: Candidate) -> bytes:
        return self._post("", endpoint, call, candidate)

    def post_prefill(self, endpoint: Endpoint, call: Call, candidate: Candidate) -> bytes:
        """The bytes that ask a bundled engine to compute the prompt of this request and no answer."""
        return self._post("/prefill", endpoint, call, candidate)

    def _post(self, below: str, endpoint: Endpoint, call: Call, candidate: Candidate) -> bytes:
        payload = {**call.payload, **call.extra_for(candidate), "model": candidate.upstream_model}
        if candidate.output_limit_field is not None and call.operation == "chat":
            _limit_output_by(candidate.output_limit_field, payload)
        if not candidate.flex and payload.get("service_tier") == "flex":
            del payload["service_tier"]
        if call.continues:  # vLLM's and SGLang's fields, and the bundled engine's
            payload["continue_final_message"], payload["add_generation_prompt"] = True, False
        if call.stream:
            payload["stream"] = True
            payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
        elif payload.get("stream"):
            payload["stream"] = False
        path = below + _PATHS[call.operation]
        return endpoint.post(path, msgspec.json.encode(payload), call.request_id, call.headers)

    def reader(self, call: Call) -> _Reader:
        return _Reader(call)

    def answer(self, body: bytes, call: Call) -> Answer:
        if not body.isascii():
            _check_utf8(body)
        typed = _typed(body)
        if typed is None and (text := arguments_as_text(_object(body), "message")):
            body, typed = text, _typed(text)
        completion = typed or decode_answer(body)
        if completion.object == "error":
            completion.error = error_in(body)
        if completion.error is not None or call.operation not in ("chat", "completions"):
            return Answer(body, completion)
        if not completion.choices:
            raise MalformedAnswer("the answer holds no choice")
        if reason := gave_up(completion.choices):
            completion.error = {"type": "finish_reason", "code": reason}
        return Answer((typed and mend_answer(typed, body, call)) or body, completion)

    def error(self, body: bytes) -> Json | None:
        error = error_in(body)
        return None if error is None else recognised(error)


def _limit_output_by(field: OutputLimitField, payload: Json) -> None:
    """Put the limit of output under the one name that the server knows; the newer one counts where there are both."""
    older, newer = payload.pop("max_tokens", None), payload.pop("max_completion_tokens", None)
    limit = older if newer is None else newer
    if limit is not None:
        payload[field] = limit


OPENAI = OpenAIDialect()


def chat_event(event: Event) -> Event:
    """An event in this dialect, whatever the server's: written from its chunk, once, if it has another's bytes.

    Usage stands in a chunk of its own, without choices, as clients of this dialect expect it.
    """
    chunk = event.chunk
    if event.dialect == OPENAI.name or chunk is None:
        return event
    if event.chat is not None:
        return event.chat
    fields = {"id": chunk.id, "object": "chat.completion.chunk", "created": chunk.created, "model": chunk.model}
    choices = [
        {"index": c.index, "delta": c.delta, "logprobs": c.logprobs, "finish_reason": c.finish_reason}
        for c in chunk.choices
    ]
    usage = {} if choices else {"usage": chunk.usage}
    data = msgspec.json.encode({**fields, "choices": choices, **usage})
    event.chat = Event(b"data: " + data + b"\n\n", data, chunk, event.done)
    return event.chat


def chat_body(answer: Answer) -> bytes:
    """A plain answer in this dialect, whatever the server's; written once, as an event is."""
    if answer.dialect == OPENAI.name:
        return answer.body
    if answer.chat is not None:
        return answer.chat
    whole = answer.completion
    fields = {"id": whole.id, "object": "chat.completion", "created": whole.created, "model": whole.model}
    choices = [
        {
            "index": c.index,
            # Content and refusal are there even if they are null; the rest only if there is some.
            "message": {"content": None, "refusal": None, **msgspec.to_builtins(c.message)},
            "logprobs": c.logprobs,
            "finish_reason": c.finish_reason,
        }
        for c in whole.choices
    ]
    answer.chat = msgspec.json.encode({**fields, "choices": choices, "usage": whole.usage})
    return answer.chat


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
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedAnswer(f"an event of the stream is not JSON: {error}") from error


def _typed(body: bytes) -> ChatCompletion | None:
    """A plain answer, if it has the types that the dialect says."""
    try:
        return _completion.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


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
    except (msgspec.DecodeError, RecursionError) as error:
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
    """The error object of a body, if it is JSON and has one, in whichever form servers have for it."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if isinstance(fields, list) and fields:  # Gemini's
        fields = fields[0]
    if not isinstance(fields, dict):
        return None
    if fields.get("object") == "error":  # Mistral's, and an older form of vLLM's
        return {**fields, "message": _text(fields.get("message"))}
    if error := _error_object(fields.get("error")):
        return error
    detail = fields.get("detail")  # of servers that are built on FastAPI
    return {"message": _text(detail)} if detail else None


def _object(data: bytes) -> Json:
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedAnswer(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedAnswer("the server sent JSON that is not an object")
    return fields


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _check_utf8(body: bytes) -> None:
    """Fields that nobody decodes are passed on as well."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise MalformedAnswer(f"the answer is not UTF-8: {error.reason}") from error


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
    said = delta if isinstance(delta, dict) else {}
    return ChunkChoice(
        index=_as(int, fields.get("index")) or 0,
        delta=Delta(role=_as(str, said.get("role")), content=_as(str, said.get("content"))),
        finish_reason=_as(str, fields.get("finish_reason")),
    )


def _error_object(value: object) -> Json | None:
    if isinstance(value, dict):
        return value
    return {"message": str(value)} if value else None
