"""The life of a request after its parameters are known: generate, stream or collect, count, and end in one way.

    generate → wait for the first news → status 200 → chunks … → usage → [DONE]
                     └ refused, busy, down: that status, as one error object

The status waits for the first token, so it tells the truth. A fault after that is an error event without `[DONE]`,
never a clean end. A client that leaves, streaming or not, aborts all its answers at once; one that does not read leaves
when the HTTP edge loses patience with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Send

from backends.protocol import PROMPT_PAGE_HEADER, PROMPT_TOKENS_HEADER
from engine.client import EngineClient
from engine.server.choose import likeliest
from engine.server.dialect import Choice, Dialect
from engine.server.errors import ApiError, as_api_error
from engine.text.answer import Answer, AnswerAborted, EngineError, Generation
from engine.text.detokenizer import Delta

_DONE = b"data: [DONE]\n\n"
_MISSED_HEADER = b"x-tierline-prefix-missed"  # why full pages of the prompt were not in the prefix cache
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, `time.monotonic()`, and what its headers say of its deadline."""

    at: float
    deadline_ms: int | None = None

    def due(self, deadline_ms: int | None) -> float | None:
        """When the whole answer must be there; `deadline_ms`: as the body says. The sooner counts."""
        given = [ms for ms in (self.deadline_ms, deadline_ms) if ms is not None]
        return self.at + min(given) / 1000 if given else None


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to run. Choice `i` continues prompt `i // n`, generation `i` prompt `i // best_of`."""

    model_name: str
    request_id: str
    generations: Sequence[Generation]
    n: int
    dialect: Dialect
    stream: bool
    include_usage: bool
    best_of: int
    deadline_ms: int | None = None  # from the arrival of the request, as its body says
    prefilled_tokens: int = 0  # of the prompts, computed by another engine for this very request

    def arrived(self, arrival: Arrival) -> Job:
        """The job of a request that came so."""
        due = arrival.due(self.deadline_ms)
        if due is None:
            return self
        return dataclasses.replace(self, generations=[dataclasses.replace(g, deadline=due) for g in self.generations])


async def respond(client: EngineClient, job: Job, receive: Receive, send: Send) -> None:
    """Run a job and send its response.

    Raises:
        ApiError: nothing was sent yet and the job failed.
    """
    try:
        answers = client.generate(job.generations)
    except EngineError as error:
        raise as_api_error(error, job.dialect.prompt_field) from error
    watcher = asyncio.create_task(_abort_on_disconnect(client, answers, receive))
    response = _Response(client, job, answers, send)
    try:
        if job.stream:
            await response.stream()
        else:
            await response.collect()
    except AnswerAborted:
        pass  # nobody is there to be told
    finally:
        watcher.cancel()
        client.abort(answers)  # whatever is still open: a sibling of one that failed


async def _abort_on_disconnect(client: EngineClient, answers: Sequence[Answer], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.abort(answers)


class _Response:
    """One HTTP response; keeps whether its head is out."""

    def __init__(self, client: EngineClient, job: Job, answers: Sequence[Answer], send: Send) -> None:
        self._job = job
        self._answers = answers
        self._send = send  # waits only while the client reads slower than we write; meanwhile its news is merged
        self._started = False
        # One chunk at a time: the choices of a stream are written by one task each.
        self._lock = asyncio.Lock()
        fingerprint = client.ready.model_digest[:12] if client.ready is not None else ""
        self._head: dict[str, Any] = {
            "id": job.dialect.id_prefix + uuid.uuid4().hex,
            "object": job.dialect.chunk_object_name if job.stream else job.dialect.object_name,
            "created": int(time.time()),
            "model": job.model_name,
            "system_fingerprint": f"fp_{fingerprint}",
        }

    async def collect(self) -> None:
        try:
            parts = await _all_or_none([_whole(answer) for answer in self._answers])
        except AnswerAborted:
            raise
        except EngineError as error:
            raise as_api_error(error, self._job.dialect.prompt_field) from error
        job, given = self._job, list[Delta]()
        for number, leader in enumerate(self._leaders()):
            job.dialect.take_prompt(number, leader.prompt_logprobs)
            given += likeliest(parts[number * job.best_of : (number + 1) * job.best_of], job.n)
        body = {
            **self._head,
            "choices": [job.dialect.whole(index, delta) for index, delta in enumerate(given)],
            "usage": self._usage(),
            **self._job.dialect.extra_fields(),
        }
        await self._start(b"application/json")
        await self._write(_encode(body), more=False)

    async def stream(self) -> None:
        try:
            if len(self._answers) == 1:
                await self._stream_choice(0, self._answers[0])
            else:
                await _all_or_none([self._stream_choice(i, answer) for i, answer in enumerate(self._answers)])
        except AnswerAborted:
            raise
        except EngineError as error:
            api_error = as_api_error(error, self._job.dialect.prompt_field)
            if not self._started:
                raise api_error from error
            await self._write(b"data: " + _encode(api_error.body()) + b"\n\n", more=False)
            return
        if self._job.include_usage:
            await self._event({**self._head, "choices": [], "usage": self._usage()})
        await self._write(_DONE, more=False)

    async def _stream_choice(self, index: int, answer: Answer) -> None:
        dialect = self._job.dialect
        is_first = True
        async for delta in answer:
            if is_first:
                is_first = False
                number = index // self._job.n
                # It is there: the others wait for the first one's prompt.
                dialect.take_prompt(number, self._leaders()[number].prompt_logprobs)
                await self._start_stream()
                await self._chunk(dialect.first(index))
            for choice in dialect.middle(index, delta):
                await self._chunk(choice)
            if delta.finish_reason is not None:
                await self._chunk(dialect.last(index, delta))

    async def _start_stream(self) -> None:
        async with self._lock:
            if not self._started:
                await self._start(b"text/event-stream; charset=utf-8")
                self._head.update(self._job.dialect.extra_fields())

    async def _chunk(self, choice: Choice | None) -> None:
        if choice is None:
            return
        chunk = {**self._head, "choices": [choice]}
        if self._job.include_usage:
            chunk["usage"] = None
        await self._event(chunk)
        self._head.pop("prompt_token_ids", None)  # said once

    async def _event(self, payload: dict[str, Any]) -> None:
        data = b"data: " + _encode(payload) + b"\n\n"
        async with self._lock:
            await self._write(data, more=True)

    async def _start(self, content_type: bytes) -> None:
        self._started = True
        headers = [(b"content-type", content_type), (b"x-request-id", self._job.request_id.encode("latin-1"))]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        page = self._answers[0].prompt_page
        if page is not None and len(self._leaders()) == 1:  # of several prompts, nobody could tell which
            headers.append((PROMPT_PAGE_HEADER.encode(), page.hex().encode()))
        missed = self._answers[0].missed
        if missed is not None and len(self._leaders()) == 1:
            headers.append((_MISSED_HEADER, missed.encode()))
        if self._job.stream:
            headers.append((b"cache-control", b"no-cache"))
            # For who counts a stream that ends before its usage comes.
            headers.append((PROMPT_TOKENS_HEADER.encode(), b"%d" % self._prompt_tokens()))
            start["tierline.keep_alive"] = b": keep-alive\n\n"  # every event is one write, so it is never inside one
        await self._send(start)

    async def _write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _cached_tokens(self, leaders: Sequence[Answer]) -> int:
        """Prompt tokens that nobody had to compute for this request. What it found may have been computed for it."""
        return max(0, sum(answer.cached_tokens for answer in leaders) - self._job.prefilled_tokens)

    def _prompt_tokens(self) -> int:
        """Those of each prompt once, however many answers it gets."""
        return sum(answer.num_prompt_tokens for answer in self._leaders())

    def _leaders(self) -> Sequence[Answer]:
        """The first answer to each prompt."""
        return self._answers[:: self._job.best_of]

    def _usage(self) -> dict[str, Any]:
        leaders = self._leaders()
        prompt = self._prompt_tokens()
        completion = sum(answer.num_generated_tokens + answer.tokens_beside for answer in self._answers)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens(leaders)},
        }
        details = _prediction_details(self._answers)
        reasoning = self._job.dialect.reasoning_tokens()
        if reasoning is not None:
            details["reasoning_tokens"] = reasoning
        if details:
            usage["completion_tokens_details"] = details
        return usage


def _prediction_details(answers: Sequence[Answer]) -> dict[str, int]:
    """What became of the proposed tokens; empty where there were none."""
    accepted = sum(answer.accepted_drafts for answer in answers)
    rejected = sum(answer.rejected_drafts for answer in answers)
    if accepted + rejected == 0:
        return {}
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


async def _whole(answer: Answer) -> Delta:
    whole = Delta()
    async for delta in answer:
        whole.merge(delta)
    return whole


async def _all_or_none(coroutines: Sequence[Any]) -> list[Any]:
    """The results in order, or the first exception, after the other coroutines were cancelled."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_error(error: ApiError, request_id: str, send: Send) -> None:
    """Send an error object as the whole response."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    headers.append((b"x-request-id", request_id.encode("latin-1")))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": _encode(error.body())})
