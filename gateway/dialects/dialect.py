"""How one kind of client is spoken to: the interface that a module per dialect fulfils.

A dialect reads a request into the common form (`Asked`: the OpenAI form of the operation, and the facts that the rest
of the gateway acts on) and writes answers from it. Where the backend speaks the client's dialect, its bytes go through
unchanged; else they are written anew from what they say. The rest of the gateway knows no dialect by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from backends.attempt import Answer, Event, Native, Operation
from backends.protocol import Json
from gateway.dialects.errors import GatewayError

# Fields that text completions and chats have in common, as far as rules and estimates read them.
_SHARED = ("model", "max_tokens", "response_format", "stream", "temperature")

# Keeps a finished answer; False: it could not be kept.
Keep = Callable[[Json], Awaitable[bool]]


class Memory(Protocol):
    """What a request has to do with the answers that the gateway remembers, in a dialect that has such.

    `previous` is the id of the answer that it goes on from, `store` whether its own is to be remembered (None: as is
    usual), `items` what it adds to the conversation. The pipeline sets `keep` if its answer is to be remembered.
    """

    previous: str | None
    store: bool | None
    items: Sequence[Json]
    keep: Keep | None

    def go_on(self, earlier: Sequence[Json]) -> None:
        """Put the items of earlier turns before those of this one."""
        ...

    def changed(self) -> None:
        """The texts of the payload are others now: what is said of the request, and kept, says these."""
        ...


class Asked(msgspec.Struct):
    """A request in the common form.

    `payload` is what backends receive, unknown fields included. `messages` is what classification and estimates read:
    the conversation, or texts as turns of a user. `choices` is how many answers are given, `generated` how many are
    made. `output_limit` is the most tokens that each may have, behind the name of the field that says so. `needs` maps
    each capability that the answering model must have to the field that asks for it. `native` is the request in the
    client's own dialect, where that is another than the payload's. `longest` counts how many tokens the longest of
    several inputs has, by estimate, where the model reads one by one and so only each by itself must fit its context.
    `input_field` is where the input stands. `memory` is there if the dialect has conversations that are remembered.
    `metadata` is what the client says about the request in words of its own.
    """

    operation: Operation
    model: str
    payload: Json
    messages: Sequence[Json]
    stream: bool = False
    choices: int = 1
    generated: int = 1
    output_limit: tuple[str, int] | None = None
    needs: Mapping[str, str] = {}
    native: Native | None = None
    wants_usage: bool = True
    longest: Callable[[], int] | None = None
    input_field: str = "messages"
    memory: Memory | None = None
    metadata: Mapping[str, Any] = {}

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that one answer may have, if the client said so."""
        return self.output_limit[1] if self.output_limit else None

    @property
    def patient(self) -> bool:
        """Whether the client said that the answer may come late, for less."""
        return self.payload.get("service_tier") == "flex"

    def chat(self) -> Mapping[str, Any]:
        """The request as if it were a chat: what rules and estimates read, whatever the operation."""
        if self.operation == "chat":
            return self.payload
        # Only fields whose types were checked: any other may hold anything here.
        shared = _SHARED if self.operation == "completions" else ("model",)
        return {name: self.payload[name] for name in shared if name in self.payload} | {"messages": self.messages}


class Writer(Protocol):
    """Writes one answer. Made once per request; `event` is called for every event, so it does little.

    `whole` and `end` are the last step before the client has everything: what must be on record by then, they await.
    """

    async def whole(self, answer: Answer) -> bytes:
        """The body of a plain answer."""
        ...

    def event(self, event: Event) -> Sequence[bytes]:
        """What the client gets for this event now: each item is one write. Often exactly one, sometimes none."""
        ...

    async def end(self, summary: Json) -> Sequence[bytes]:
        """What ends a stream that is whole. `summary` is Tierline's own account of it: cost, cache, model, tier."""
        ...

    def broken(self, error: GatewayError) -> bytes:
        """The last event of a stream that cannot be completed. Must not look like a regular end."""
        ...


class Dialect(Protocol):
    """One kind of client. Stateless; the module's one instance is shared.

    `route` names it in ledger, metrics and logs; `keep_alive` is what an idle stream sends, between two
    events, so that nobody on the way closes it. `request_id_header` is where its
    SDKs look for the id of a request.
    """

    route: str
    keep_alive: bytes
    request_id_header: str

    def parse(self, body: bytes) -> Asked:
        """Read and check a request body.

        Raises:
            BadRequest: not JSON, a wrong type, a value out of range, or a parameter that cannot be honoured.
        """
        ...

    def writer(self, asked: Asked, request_id: str) -> Writer:
        """A writer for the answer to one request."""
        ...

    def error(self, error: GatewayError, request_id: str) -> bytes:
        """The body of an error answer."""
        ...
