"""The routes that compute, as plain ASGI: they read a body, have it answered, and watch for a client that leaves.

Which of them a model serves depends on what it is for; the others refuse with the ones to use.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from backends.protocol import Json, whole_number
from engine.client import EngineClient
from engine.models.pooling import Task
from engine.server.errors import ApiError, as_api_error
from engine.server.jobs import Jobs
from engine.server.lanes import Lanes
from engine.server.model import Model
from engine.server.params import MOST_DEADLINE_MS
from engine.server.pooling import PoolingRoutes, wrong_task
from engine.server.prefill import Prefill, computed_elsewhere, refusals
from engine.server.respond import Arrival, Job, respond, send_error

MAX_BODY_BYTES = 32 * 1024 * 1024
_DEADLINE_HEADER = "x-tierline-deadline-ms"
_PATHS: Mapping[Task, tuple[str, ...]] = {
    Task.GENERATE: ("/v1/chat/completions", "/v1/completions"),
    Task.EMBED: ("/v1/embeddings",),
    Task.SCORE: ("/v1/rerank", "/rerank", "/v1/score", "/score"),
}
# For engines that answer elsewhere: the same bodies, of which only the prompt is computed.
_PREFILL_PATHS = ("/v1/prefill/chat/completions", "/v1/prefill/completions")


def task_endpoints(model: Model, client: EngineClient, lanes: Lanes, jobs: Jobs) -> dict[str, ASGIApp]:
    """An endpoint for each path of every task."""
    refusal = _Refusal(wrong_task(model, model.task))
    found: dict[str, ASGIApp] = {path: refusal for paths in (*_PATHS.values(), _PREFILL_PATHS) for path in paths}
    if model.pooling is None:
        no_answers, no_prefills = refusals(client.config.role, model.name)
        makers = (jobs.chat, jobs.completion)
        for path, prefill_path, make in zip(_PATHS[model.task], _PREFILL_PATHS, makers, strict=True):
            found[path] = _Refusal(no_answers) if no_answers else _Generating(client, make)
            found[prefill_path] = _Refusal(no_prefills) if no_prefills else _Whole(Prefill(client, make))
        return found
    routes = PoolingRoutes(model, client, lanes, jobs, model.pooling)
    computing = {
        Task.EMBED: (routes.embeddings,),
        Task.SCORE: (routes.rerank, routes.rerank, routes.score, routes.score),
    }
    return found | {p: _Whole(compute) for p, compute in zip(_PATHS[model.task], computing[model.task], strict=True)}


class _Generating:
    """Makes a job of a request's body, and responds."""

    def __init__(self, client: EngineClient, make_job: Callable[[bytes, str], Awaitable[Job]]) -> None:
        self._client = client
        self._make_job = make_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        at, request_id = time.monotonic(), _request_id(scope)
        try:
            arrival = Arrival(at, _deadline_ms(scope))
            raw = await read_body(scope, receive)
            if raw is None:
                return  # the client left before it had asked
            job = await self._make_job(raw, request_id)
            job = computed_elsewhere(job.arrived(arrival), Headers(scope=scope))
            await respond(self._client, job, receive, send)
        except Exception as error:
            await send_error(as_api_error(error), request_id, send)


class _Whole:
    """Makes an answer of the body, sent when all of it is there. A client that leaves ends the work."""

    def __init__(self, compute: Callable[[bytes, Arrival], Awaitable[Json]]) -> None:
        self._compute = compute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        at, request_id = time.monotonic(), _request_id(scope)
        try:
            arrival = Arrival(at, _deadline_ms(scope))
            raw = await read_body(scope, receive)
            body = None if raw is None else await _unless_left(self._compute(raw, arrival), receive)
            if body is not None:
                data = msgspec.json.encode(body)
                headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode("latin-1"))]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": data})
        except Exception as error:
            await send_error(as_api_error(error, "input"), request_id, send)


class _Refusal:
    """For the routes of other tasks."""

    def __init__(self, error: ApiError) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(self._error, _request_id(scope), send)


async def _unless_left(work: Awaitable[Json], receive: Receive) -> Json | None:
    """What the work yields; None, and it is cancelled, if the client leaves before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> str:
    return Headers(scope=scope).get("x-request-id") or uuid.uuid4().hex


def _deadline_ms(scope: Scope) -> int | None:
    """What the header says. Raises ApiError if that is no number, or none in range."""
    header = Headers(scope=scope).get(_DEADLINE_HEADER)
    if header is None:
        return None
    deadline_ms = whole_number(header, 8)
    if deadline_ms is None or not 0 < deadline_ms <= MOST_DEADLINE_MS:
        text = f"'{_DEADLINE_HEADER}' must be a whole number of milliseconds, up to a day."
        raise ApiError(400, text, code="invalid_value")
    return deadline_ms


async def read_body(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body, or None if the client left.

    Raises:
        ApiError: 413 if it is larger than `MAX_BODY_BYTES`.
    """
    too_large = ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large")
    declared = Headers(scope=scope).get("content-length", "0")
    if (whole_number(declared, 18) or 0) > MAX_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
