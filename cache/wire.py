"""The protocol between the gateway and the cache process: length-prefixed MessagePack over a Unix socket.

A frame is four bytes of length (big-endian) and one message. Requests carry an id, replies repeat it and may come in
any order. The server speaks first with a `Hello`, and again when its state changes (id 0).
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from cache.entry import Entry
from cache.key import CacheKey
from cache.promise.rule import Rule
from cache.stats import CacheStats

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 * 1024 * 1024

LookupMode = Literal["exact", "semantic"]
# `shadow` and `audit` are hits that are not given: the caller asks a model, and hands its answer in with the ticket.
Outcome = Literal["miss", "exact", "semantic", "shadow", "audit"]
# Who says whether two answers say the same: equal text, the embedder and the guards, or a model that the caller asks.
Judge = Literal["exact", "embedding", "model"]


class ProtocolError(Exception):
    """The other side sent something that is not this protocol; the connection is of no more use."""


class Message(msgspec.Struct, tag=True, omit_defaults=True, array_like=True):
    """Base of all messages. `id` pairs a reply with its request."""

    id: int


class Asker(msgspec.Struct, frozen=True, array_like=True):
    """Which request asks, of which key and team. Feedback on it is taken from its team only."""

    request_id: str = ""
    key_id: str = ""
    team_id: str = ""


NOBODY = Asker()


class Case(msgspec.Struct, frozen=True, array_like=True):
    """Two answers to be compared by a model: `known`, given to `known_question` before, and the `fresh` one to `asked`.

    `reason` is the decision that it settles; `miss` only teaches, so it is the first that can be left out.
    """

    ticket: int
    reason: Literal["audit", "shadow", "miss"]
    asked: str
    fresh: str
    known_question: str
    known: str


class LookupRequest(Message):
    """`rule`: the promise that semantic hits are given under; without one, `threshold` and the guards decide.

    `auditable` is False where no fresh answer can follow: a hit that was to be audited is given then. `larger` are
    the keys of the same request to larger models, whose answers will do as well; under a rule for the same words only.
    """

    key: CacheKey
    mode: LookupMode
    threshold: float
    ttl_s: float | None = None
    rule: Rule | None = None
    judge: Judge = "embedding"
    asker: Asker = NOBODY
    auditable: bool = True
    larger: list[CacheKey] = []


class StoreRequest(Message):
    """`ticket` is that of the look-up which this answer settles, if it gave one."""

    key: CacheKey
    entry: Entry
    mode: LookupMode
    asker: Asker = NOBODY
    ticket: int = 0


class VerdictRequest(Message):
    """Whether the two answers of a ticket's case say the same; None: there will be no verdict, `why` says why."""

    ticket: int
    same: bool | None = None
    why: str = "lost"


class FeedbackRequest(Message):
    """What somebody of the team thinks of the answer to one of its requests."""

    request_id: str
    team_id: str
    good: bool


class SharedRequest(Message):
    """A request that waited got the answer of another, so what is said of the one answer can name either."""

    asker: Asker
    answer_of: str


class StatsRequest(Message):
    pass


class PurgeRequest(Message):
    """Forget answers that meet every condition given; `scopes` are those of several owners, `exact` is a key's, `entry`
    the id of one answer."""

    scopes: list[str] | None = None
    model: str | None = None
    older_than_s: float | None = None
    tag: str | None = None
    policy: str | None = None
    exact: str | None = None
    entry: str | None = None


class EmbedRequest(Message):
    """`as_questions`: the very vectors by which a look-up of these questions searches, before other texts. The look-up
    that follows need not embed again."""

    texts: list[str]
    as_questions: bool = False


class Hello(Message):
    """Who serves: `state` is `warming` until the embedder is loaded, then `ready`, or `failed` with `error`."""

    version: int
    state: Literal["warming", "ready", "failed"]
    fingerprint: str
    scripts: list[str]
    error: str | None = None


class LookupReply(Message):
    """`entry` is there with `exact` and `semantic`; `p`, `age_s` and `entry_id` are of the answer that was found, given
    or not. `ticket`: hand the fresh answer in with it; 0: nothing is to be compared."""

    outcome: Outcome
    score: float | None = None
    entry: Entry | None = None
    reason: str | None = None
    p: float | None = None
    age_s: float | None = None
    entry_id: str | None = None
    ticket: int = 0


class StoreReply(Message):
    """`stored_as` is None where the answer was not kept, for `reason`. `case`: ask a model, then send the verdict."""

    reason: str | None = None
    stored_as: Literal["answer", "alias"] | None = None
    case: Case | None = None


class DoneReply(Message):
    """The request was taken note of; there is nothing to say."""


class FeedbackReply(Message):
    """`known`: the request is on record here. `evicted`: answers that were forgotten."""

    known: bool
    evicted: int = 0


class StatsReply(Message):
    stats: CacheStats


class PurgeReply(Message):
    """`removed` answers of this process; `confirmed` processes have followed, this one included."""

    removed: int
    confirmed: int = 1
    unconfirmed: list[str] = []


class EmbedReply(Message):
    vectors: list[list[float]]


class FailureReply(Message):
    """The request was understood but could not be served; `reason` is a stable word."""

    reason: str
    message: str


Request = (
    LookupRequest
    | StoreRequest
    | VerdictRequest
    | FeedbackRequest
    | SharedRequest
    | StatsRequest
    | PurgeRequest
    | EmbedRequest
)
Reply = (
    Hello | LookupReply | StoreReply | DoneReply | FeedbackReply | StatsReply | PurgeReply | EmbedReply | FailureReply
)

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """One message as it goes over the socket.

    Raises:
        ProtocolError: the message is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request; `asyncio.IncompleteReadError` at the end of the stream, `ProtocolError` on garbage."""
    return _decode_request(await _read_body(reader))


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The next reply; `asyncio.IncompleteReadError` at the end of the stream, `ProtocolError` on garbage."""
    return _decode_reply(await _read_body(reader))


async def _read_body(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


def _decode_request(body: bytes) -> Request:
    try:
        return _requests.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a request of this protocol: {error}") from error


def _decode_reply(body: bytes) -> Reply:
    try:
        return _replies.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a reply of this protocol: {error}") from error
