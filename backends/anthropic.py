"""The Anthropic dialect on the wire: servers that speak the Messages API, Anthropic's own and compatible ones.

A chat request is translated (`anthropic_request.py`) and its answer translated back (`anthropic_answer.py`,
`anthropic_stream.py`). A client that speaks the same dialect is served in its own words: its request goes on with only
the model, `stream` and a missing `max_tokens` set, fields that nobody here knows and beta headers included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from backends.anthropic_answer import NAME, error_in, read_answer
from backends.anthropic_request import messages_request
from backends.anthropic_stream import AnthropicReader
from backends.attempt import Answer, Call, Candidate
from backends.dialect import CannotTranslate
from backends.endpoint import Endpoint
from backends.protocol import Json

# The one that knows sampling parameters, and the only one of most compatible servers; a backend's `headers` may name
# another. A client's choice is not passed on: versions differ in what they refuse, not in what they answer.
VERSION_HEADER = "anthropic-version"
VERSION = "2023-06-01"


class AnthropicDialect:
    """See `backends.dialect.Dialect`."""

    name = NAME

    def headers(self, api_key: str | None) -> Mapping[str, str]:
        return {VERSION_HEADER: VERSION, **({"x-api-key": api_key} if api_key else {})}

    def post(self, endpoint: Endpoint, call: Call, candidate: Candidate) -> bytes:
        if call.operation != "chat":
            raise CannotTranslate(f"Anthropic servers answer chats, not {call.operation}.")
        extra = call.extra_for(candidate)
        native = call.native
        if native is not None and native.dialect == NAME and not call.continues:
            body = _own(native.payload, extra, candidate.upstream_model, call.stream)
        else:
            body = messages_request({**call.payload, **extra}, candidate.upstream_model, call.stream)
        headers = {name: value for name, value in call.headers.items() if name.lower() != VERSION_HEADER}
        return endpoint.post("/messages", msgspec.json.encode(body), call.request_id, headers)

    def reader(self, call: Call) -> AnthropicReader:
        return AnthropicReader()

    def answer(self, body: bytes, call: Call) -> Answer:
        return read_answer(body)

    def error(self, body: bytes) -> Json | None:
        return error_in(body)


ANTHROPIC = AnthropicDialect()


def _own(payload: Json, extra: Mapping[str, Any], model: str, stream: bool) -> Json:
    """A client's own request in this dialect, for the server's model."""
    body = {**payload, "model": model}
    if body.get("max_tokens") is None and "max_tokens" in extra:
        body["max_tokens"] = extra["max_tokens"]
    if stream:
        body["stream"] = True
    elif body.get("stream"):
        body["stream"] = False
    return body
