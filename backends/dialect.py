"""How one kind of server is spoken to: the interface that a module per kind fulfils, and the registry of kinds.

Between the client's dialect and the server's lies one common form, that of chat completions (`protocol.py`):

    client's dialect ──► payload (chat) ──► server's dialect          request
    client's dialect ◄── chunk (chat)  ◄── server's dialect           answer, event by event

Where both ends speak the same, `Call.native` carries the client's own request and `Event.raw` the server's own bytes,
so that nothing is translated and unknown fields survive; the chunk is then only what metering needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from backends.attempt import Answer, Call, Candidate, Event
from backends.endpoint import Endpoint
from backends.protocol import Json
from backends.sse import Parsed


class CannotTranslate(ValueError):
    """The request holds something that this kind of server has no word for; it must not be lost silently.

    `param` names the field in the form of chat completions.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MalformedAnswer(ValueError):
    """The server sent something that is not what its dialect promises."""


class Reader(Protocol):
    """Reads one stream. Has the state that a translation needs."""

    def read(self, event: Parsed) -> Event | None:
        """Take one server-sent event; None if it says nothing that a client needs.

        Raises:
            AttemptFailed: the event reports an error.
            MalformedAnswer: it is not in the dialect.
        """
        ...

    def commits(self, event: Event) -> bool:
        """Whether this event is the first content: from then on the answer is this server's. Asked until it is true."""
        ...


class Dialect(Protocol):
    """One kind of server. Stateless; the module's one instance is shared."""

    name: str

    def headers(self, api_key: str | None) -> Mapping[str, str]:
        """The headers that every request to such a server carries, its credentials among them."""
        ...

    def post(self, endpoint: Endpoint, call: Call, candidate: Candidate) -> bytes:
        """The bytes of a request.

        Raises:
            CannotTranslate: this kind of server cannot be asked that.
            ValueError: a header of the call is not allowed in HTTP.
        """
        ...

    def reader(self, call: Call) -> Reader:
        """A reader for the stream that answers `call`."""
        ...

    def answer(self, body: bytes, call: Call) -> Answer:
        """Read a plain answer.

        Raises:
            MalformedAnswer: it is not in the dialect.
        """
        ...

    def error(self, body: bytes) -> Json | None:
        """The error object of a body, with the fields `message`, `type`, `code`, `param`, if it has one.

        `code` is `context_length_exceeded` or `content_policy_violation` (`backends.errors`) where that is what the
        server says, so that a fallback can be chosen by it. `status` is there if the object has an HTTP status.
        """
        ...
