"""The nouns of a dispatch: what is asked, who may answer, one try at it, and the ways in which it can fail.

It promises that every way out of `Dispatcher.open` and of a stream is one of the types here, each with the attempts
that were made, so that the ledger can write a row for every one. `dispatch.py` makes them; the gateway reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from backends.connection import FailureKind, HttpFailure
from backends.errors import DEADLINE_EXCEEDED, recognised
from backends.placement.asked import Placement
from backends.protocol import ChatChunk, ChatCompletion, OutputLimitField, Usage

if TYPE_CHECKING:
    from backends.prefilling import Leg

Outcome = Literal["running", "success", "error", "timeout", "cancelled", "cut", "refused"]

CutKind = Literal[
    "disconnected", "between_tokens_timeout", "total_timeout", "deadline", "protocol", "upstream_error", "too_large"
]

NoBackendKind = Literal[
    "unavailable",  # no connection to any replica: 503
    "overloaded",  # every replica has as many requests as it may have, or says when it serves again: 503
    "rate_limited",  # the last answer was 429: 429
    "timeout",  # the last attempt ran out of time: 504
    "deadline",  # the request's own deadline passed: 504
    "upstream_error",  # the last answer was an error or no valid answer: 502
]


class Candidate(msgspec.Struct, frozen=True):
    """A model that may answer: its public name and tier, the backend that serves it and its name there.

    `context_length` in tokens, 0 if it is not known. `prefill`: it can continue an answer that another began.
    `output_limit_field`: the one field by which its server knows the most tokens of a chat answer; None: any.
    `flex`: its server knows the service tier `flex`.
    """

    model: str
    tier: str
    backend: str
    upstream_model: str
    context_length: int = 0
    prefill: bool = False
    output_limit_field: OutputLimitField | None = None
    flex: bool = False


Operation = Literal["chat", "completions", "embeddings", "rerank"]


class Native(msgspec.Struct, frozen=True):
    """A chat request in the dialect in which the client wrote it, for servers that speak the same one."""

    dialect: str
    payload: dict[str, Any]


class Call(msgspec.Struct, frozen=True):
    """One request of a client, ready to be sent.

    `payload` is a JSON object in the OpenAI form of `operation`, never changed here. `extra` is merged over it: the
    same fields for every candidate, or a function that names them for each. `headers` go to the backend as they are.
    `deadline` is in monotonic seconds and ends the whole call, answers under way included. `native` is the client's
    own request where it was written in another dialect. `owner` is whose turn it uses up where requests wait for a
    backend. `continues`: the last message is the beginning of the answer, to be continued and not repeated. `placement`
    is what a replica is chosen by, where a backend among the candidates has several.
    """

    payload: dict[str, Any]
    operation: Operation
    stream: bool
    request_id: str
    native: Native | None = None
    headers: Mapping[str, str] = {}
    deadline: float | None = None
    extra: Mapping[str, Any] | Callable[[Candidate], Mapping[str, Any]] = {}
    owner: str = ""
    continues: bool = False
    placement: Placement | None = None

    def extra_for(self, candidate: Candidate) -> Mapping[str, Any]:
        """The fields of `extra` for this candidate."""
        return self.extra(candidate) if callable(self.extra) else self.extra

    def choices(self) -> int:
        """How many choices the answer has: `n` for each prompt."""
        n = self.payload.get("n")
        prompt = self.payload.get("prompt") if self.operation == "completions" else None
        prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        return prompts * (n if isinstance(n, int) else 1)


class Attempt(msgspec.Struct, eq=False):
    """One call to one replica. `started` is monotonic seconds, `started_at` Unix seconds; `id` is a UUIDv7.

    `outcome` leaves "running" exactly once: "cut" is a stream that broke after its first content, "timeout" any
    deadline (before or after it), "refused" an answer of the 4xx kind that no retry can change.
    """

    id: str
    number: int  # 1 for a request's first attempt
    candidate: Candidate
    replica: str  # base URL
    started_at: float
    started: float
    first_content_s: float | None = None  # streams only
    duration_s: float | None = None
    outcome: Outcome = "running"
    status_code: int | None = None
    error: str | None = None  # never holds text that the upstream made from a prompt
    placed: str = ""  # why this replica, where there was a choice: a word, and tokens it was believed to hold
    leg: Leg | None = None  # the prompt's, where another replica was to compute it


class AttemptObserver(Protocol):
    """What the caller learns while calls are being made. All run in the event loop and must be quick.

    An attempt that `open` returns (in `Dispatched`) has been started but not ended: its end is the caller's to record,
    except where `attempt_cut` says that the answer goes on in another attempt. That one is then the caller's to end.
    """

    def attempt_started(self, attempt: Attempt) -> None:
        """Called before any byte of the attempt leaves. An exception stops the whole call."""

    def attempt_ended(self, attempt: Attempt) -> None:
        """Called for an attempt that failed, was refused or was cancelled before any of its answer was passed on."""

    def attempt_cut(self, attempt: Attempt) -> None:
        """Called for a stream that broke after content, before the first attempt to continue it elsewhere."""


class Event(msgspec.Struct, gc=False):
    """One event of a stream: `raw` bytes as received with their blank line, `data` of its data lines.

    `chunk` is what it says in the common form: None for one that says nothing there, such as `[DONE]`. A chunk with
    `usage` exists even if the client did not ask for it, because the backend is always asked to report usage. `dialect`
    is the one that `raw` is written in; `done` marks the server's own last event, `idle` one that only keeps the
    connection alive: it is relayed, but does not count as progress. `usage` is that of the attempt where `chunk.usage`
    is that of an answer which several attempts made. `chat` is the event as `backends.openai.chat_event` wrote it in
    the common form. `plain`: one more piece of what its choices say, as most are: nothing begins or ends in it.
    """

    raw: bytes
    data: bytes
    chunk: ChatChunk | None
    done: bool = False
    dialect: str = "openai"
    idle: bool = False
    usage: Usage | None = None
    chat: Event | None = None
    plain: bool = False


class Answer(msgspec.Struct, gc=False):
    """A plain answer: the body as received, in `dialect`, and what it says in the common form; `chat` as in `Event`."""

    body: bytes
    completion: ChatCompletion
    dialect: str = "openai"
    chat: bytes | None = None


class BackendError(Exception):
    """Base of what `open` and a stream raise on purpose."""


class UpstreamRefused(BackendError):
    """A replica answered 4xx (not 408, not 429): the request itself is at fault, so nothing was retried.

    `status`, `headers` and `body` are the replica's; `said` is the error object in the body, if it has one. For 401,
    402 and 403 the fault lies in the gateway's own credentials or account (`credentials_fault`), and the body may quote
    them: tell the client 502 instead.
    """

    def __init__(
        self, attempt: Attempt, status: int, headers: Mapping[str, str], body: bytes, said: Mapping[str, Any] | None
    ) -> None:
        super().__init__(f"{attempt.replica} refused the request with status {status}")
        self.attempt = attempt
        self.status = status
        self.headers = headers
        self.body = body
        self.said = said
        self.credentials_fault = status in (401, 402, 403)


class NoBackend(BackendError):
    """Every candidate was tried in vain. `status` is what to answer; `retry_after` (seconds) goes with it, if known."""

    def __init__(
        self, kind: NoBackendKind, status: int, message: str, attempts: list[Attempt], retry_after: float | None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after = retry_after
        self.attempts = attempts


class StreamCut(BackendError):
    """A stream broke after its first content reached the caller: the answer is incomplete.

    `status` is what an error event said its status is.
    """

    def __init__(self, kind: CutKind, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class AttemptFailed(Exception):
    """An attempt failed before its answer was committed. Stays inside `backends`.

    `reached`: the server answered (so that only time can tell when it is well again); `retry_after` in seconds;
    `status`, `body` and `said`: what an error inside an answer of status 200 says its status is, its JSON and itself.
    """

    def __init__(
        self,
        kind: FailureKind | Literal["upstream_error", "rate_limited", "overloaded", "resting"],
        message: str,
        *,
        retry_after: float | None = None,
        reached: bool = True,
        status: int | None = None,
        body: bytes = b"",
        said: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.said = said
        self.retry_after = retry_after
        self.reached = reached
        self.status = status
        self.body = body

    @classmethod
    def reported(cls, error: Mapping[str, Any]) -> AttemptFailed:
        """An error object in an answer of status 200; its `code` or `status` may say which one it deserved."""
        codes = (error.get("code"), error.get("status"))
        status = next((code for code in codes if isinstance(code, int) and 400 <= code <= 599), None)
        body = msgspec.json.encode({"error": error})
        what = f"the answer was an error: {describe_error(error)}"
        kind = "deadline" if error.get("code") == DEADLINE_EXCEEDED else kind_of(status)
        return cls(kind, what, status=status, body=body, said=recognised(error))

    @classmethod
    def by(cls, failure: HttpFailure) -> AttemptFailed:
        reached = failure.kind in ("protocol", "too_large", "total_timeout", "deadline")
        return cls(failure.kind, str(failure), reached=reached)

    @property
    def outcome(self) -> Outcome:
        return "timeout" if "timeout" in self.kind or self.kind == "deadline" else "error"


def kind_of(status: int | None) -> Literal["rate_limited", "overloaded", "upstream_error"]:
    """What an error of that status is to a dispatcher. 529 is Anthropic's word for an overloaded server."""
    if status == 429:
        return "rate_limited"
    return "overloaded" if status == 529 else "upstream_error"


def describe_error(error: Mapping[str, Any]) -> str:
    """Type and code of an error object. Its message is left out: servers quote the prompt, and some the key, in it."""
    parts = [str(error[name])[:80] for name in ("type", "code", "status") if error.get(name)]
    return " ".join(parts) or "of no type"
