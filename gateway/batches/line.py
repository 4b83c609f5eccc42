"""One line of a batch on its way through the pipeline, as any request of the batch's key; nobody waits for it.

    asked with the batch's headers ─► route ─► admitted when there is room ─► … ─► its answer is kept ─► ledger row

What differs from other requests stands here: it waits where they are refused (`rooms.py`), and its answer is on disk
before its ledger row says that it was given.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.attempt import Answer, Event
from backends.protocol import Json
from edge.cycle import LEAVING
from gateway import pipeline
from gateway.access.budget_queue import LOOK_S, SELDOM_S, Wait
from gateway.access.limits import Admission, BudgetExhausted, Grant, Refused
from gateway.batches.checking import Line as Asking
from gateway.batches.results import Result
from gateway.dialects.anthropic_messages import MESSAGES
from gateway.dialects.dialect import Asked, Dialect, Writer
from gateway.dialects.errors import BadRequest, GatewayError
from gateway.dialects.openai_chat import CHAT
from gateway.dialects.openai_completions import COMPLETIONS
from gateway.dialects.openai_embeddings import EMBEDDINGS
from gateway.dialects.openai_responses import RESPONSES
from gateway.http import Exchange
from gateway.ledger.rows import BATCH_TAG, new_id
from gateway.life import Life

if TYPE_CHECKING:
    from gateway.access.principal import Principal
    from gateway.batches.record import Batch
    from gateway.batches.rooms import Rooms
    from gateway.services import Services

ENDPOINTS: Final[Mapping[str, Dialect]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
# A budget that only running requests stand in the way of says to come back so soon.
_SOON_S: Final = 1.0

Put = Callable[[Result], Awaitable[None]]
_encode = msgspec.json.Encoder().encode


class Outcome(msgspec.Struct, frozen=True):
    """How asking a line went: the error that it ended with, or None when it was answered and the answer kept."""

    error: GatewayError | None
    result: Result | None  # of a line that failed: what to keep if it is not asked again


class Line:
    """A line while it is asked; `Life.line` of its request."""

    def __init__(self, services: Services, rooms: Rooms, batch: Batch, asking: Asking) -> None:
        self._services = services
        self._rooms = rooms
        self.batch = batch
        self.asking = asking
        self._exchange: Exchange | None = None
        self._backend: str | None = None  # where it takes room

    async def ask(self, principal: Principal, put: Put) -> Outcome | None:
        """Have it answered once, and the answer kept. None: it was stopped, or is to be."""
        answered = _Answered(self, put)
        exchange = Exchange(self._scope(), answered.receive, answered.send)
        self._exchange = exchange
        dialect = _Kept(ENDPOINTS[self.batch.endpoint], answered)
        life = Life(exchange, dialect, exchange.request_id, patient=True, line=self, principal=principal)
        life.tags = {BATCH_TAG: self.batch.id}  # beside those of the batch's headers
        answered.request_id = exchange.request_id
        try:
            await pipeline.live(self._services, life)
        finally:
            self._leave()
        if answered.kept:
            return Outcome(None, None)
        if answered.status == 200:  # an answer that another request's stream was followed for
            await answered.keep(answered.body)
            return Outcome(None, None)
        if exchange.gone:
            return None
        error = life.error or GatewayError("The gateway failed on this request.")
        return Outcome(error, answered.failure(error))

    def stop(self) -> None:
        """The batch ends: whoever cancels its task now ends it as if a client had left."""
        if self._exchange is not None:
            self._exchange.gone = True

    async def admitted(self, life: Life, admission: Admission, for_money: Wait | None) -> Grant:
        """Take it off the limits when there is room that nobody else waits for.

        Where its policy lets requests wait for money it does so as long as its batch has time.

        Raises:
            BudgetExhausted: its budget is spent, and its policy lets nobody wait.
            Unauthenticated: its key is gone by now.
        """
        assert life.principal is not None
        key_id, backend = life.principal.key_id, life.candidates[0].backend
        pause_s = LOOK_S
        while True:
            await self._rooms.enter(key_id, backend)
            self._backend = backend
            try:
                grant = await self._services.queue.admit(admission, key_id, waits=False)
            except Refused as refused:
                self._leave()
                if not isinstance(refused, BudgetExhausted) or refused.retry_after_s <= _SOON_S:
                    self._rooms.refused(key_id, refused.retry_after_s)
                    continue
                if for_money is None:
                    raise
                admission = await self._money(admission, for_money, refused, pause_s)
                pause_s = min(2 * pause_s, SELDOM_S)
                continue
            self._rooms.learn(key_id, grant.standing)
            return grant

    async def _money(self, admission: Admission, wait: Wait, refused: BudgetExhausted, pause_s: float) -> Admission:
        """Wait for money, behind every request that does; the admission with the limits of then."""
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            admission, may_wait = wait.renew()
            if not may_wait:
                raise refused
            if not self._services.budget_queue.others_first(admission):
                return admission

    def _leave(self) -> None:
        if self._backend is not None:
            self._rooms.leave(self._backend)
            self._backend = None

    def _scope(self) -> dict[str, Any]:
        given = [(name.encode(), value.encode("latin-1")) for name, value in self.batch.line_headers().items()]
        return {"type": "http", "method": "POST", "path": self.batch.endpoint, "headers": given, LEAVING: []}


class _Answered:
    """The other end of a line's request: gives its body, takes its answer."""

    def __init__(self, line: Line, put: Put) -> None:
        self._line = line
        self._put = put
        self.request_id = ""
        self.status = 0
        self.body = b""
        self.kept = False

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": self._line.asking.body, "more_body": False}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")

    async def keep(self, body: bytes) -> None:
        """Put an answer on disk."""
        usage = _usage(body)
        await self._put(self._result(True, 200, body, usage))
        self.kept = True

    def failure(self, error: GatewayError) -> Result:
        """What is kept of a line that was refused or failed."""
        body = self.body or _encode({"error": {"message": error.message, "type": error.type, "code": error.code}})
        return self._result(False, self.status or error.status, body, {})

    def _result(self, ok: bool, status: int, body: bytes, usage: Mapping[str, int]) -> Result:
        line = self._line
        written = output_line(line.asking.custom_id, status, self.request_id, body)
        return Result(batch_id=line.batch.id, line=line.asking.number, ok=ok, body=written + b"\n", **usage)


class _Kept:
    """A dialect whose answers are kept as soon as they are whole. See `gateway.dialects.dialect.Dialect`."""

    def __init__(self, dialect: Dialect, answered: _Answered) -> None:
        self._dialect = dialect
        self._answered = answered
        self.route = dialect.route
        self.keep_alive = dialect.keep_alive
        self.request_id_header = dialect.request_id_header

    def parse(self, body: bytes) -> Asked:
        asked = self._dialect.parse(body)
        if asked.stream:
            text = "'stream' has no meaning in a batch; leave it out."
            raise BadRequest(text, code="unsupported_parameter", param="stream")
        return asked

    def writer(self, asked: Asked, request_id: str) -> Writer:
        return _Keeping(self._dialect.writer(asked, request_id), self._answered)

    def error(self, error: GatewayError, request_id: str) -> bytes:
        return self._dialect.error(error, request_id)


class _Keeping:
    """A writer of plain answers: streams are refused before there is one."""

    def __init__(self, writer: Writer, answered: _Answered) -> None:
        self._writer = writer
        self._answered = answered

    async def whole(self, answer: Answer) -> bytes:
        body = await self._writer.whole(answer)
        await self._answered.keep(body)
        return body

    def event(self, event: Event) -> Sequence[bytes]:
        return self._writer.event(event)

    async def end(self, summary: Json) -> Sequence[bytes]:
        return await self._writer.end(summary)

    def broken(self, error: GatewayError) -> bytes:
        return self._writer.broken(error)


def output_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output or error file for a request that was answered, or refused."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(_one_line(body))}
    return _encode({"id": _id(), "custom_id": custom_id, "response": response, "error": None})


def unasked_line(custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file for a request that was not asked before its batch ended."""
    error = {"code": code, "message": message}
    return _encode({"id": _id(), "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def _id() -> str:
    return f"batch_req_{new_id().replace('-', '')}"


def _one_line(body: bytes) -> bytes:
    """A JSON document without line breaks: a backend may have written it in several."""
    return _encode(msgspec.json.decode(body)) if b"\n" in body or b"\r" in body else body


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Tokens by the names of all dialects."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_body = msgspec.json.Decoder(_Body)
_NOTHING: Final = _Details()


def _usage(body: bytes) -> dict[str, int]:
    """The tokens that an answer says it took, for the batch's own sum; the ledger has its own count."""
    try:
        said = _body.decode(body).usage
    except msgspec.DecodeError:
        return {}
    if said is None:
        return {}
    before = said.prompt_tokens_details or said.input_tokens_details or _NOTHING
    after = said.completion_tokens_details or said.output_tokens_details or _NOTHING
    found = {
        "input_tokens": said.prompt_tokens or said.input_tokens or 0,
        "cached_input_tokens": before.cached_tokens or 0,
        "output_tokens": said.completion_tokens or said.output_tokens or 0,
        "reasoning_tokens": after.reasoning_tokens or 0,
    }
    return found if all(0 <= value < 2**53 for value in found.values()) else {}
