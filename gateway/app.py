"""The ASGI application: which path leads where, and what every answer has in common.

The route table is plain data, so that a test can walk it and prove that nothing escapes authentication.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from gateway import pages, pipeline
from gateway.admin import routes as admin
from gateway.batches import anthropic as message_batches
from gateway.batches import routes as batches
from gateway.dialects import errors
from gateway.dialects.anthropic_messages import MESSAGES
from gateway.dialects.errors import GatewayError, MethodNotAllowed, NotFound
from gateway.dialects.openai_chat import CHAT
from gateway.dialects.openai_completions import COMPLETIONS
from gateway.dialects.openai_embeddings import EMBEDDINGS, RERANK
from gateway.dialects.openai_responses import RESPONSES
from gateway.feedback import feedback
from gateway.files import routes as files
from gateway.http import JSON_TYPE, ClientGone, Exchange, Receive, Scope, Send
from gateway.responses import routes as kept
from gateway.services import Services
from gateway.token_counting import count_tokens

logger = logging.getLogger("tierline")

Handler = Callable[[Services, Exchange], Awaitable[None]]
Start = Callable[[], Awaitable[Services]]


@dataclass(frozen=True, slots=True)
class Route:
    """A handler and who may call it. `key`: the handler authenticates an API key before anything else."""

    handler: Handler
    access: Literal["key", "open"]


ROUTES: Mapping[tuple[str, str], Route] = {
    ("POST", "/v1/chat/completions"): Route(pipeline.endpoint(CHAT), "key"),
    ("POST", "/v1/completions"): Route(pipeline.endpoint(COMPLETIONS), "key"),
    ("POST", "/v1/responses"): Route(pipeline.endpoint(RESPONSES), "key"),
    ("GET", "/v1/responses/{response_id}"): Route(kept.retrieve, "key"),
    ("DELETE", "/v1/responses/{response_id}"): Route(kept.remove, "key"),
    ("GET", "/v1/responses/{response_id}/input_items"): Route(kept.input_items, "key"),
    ("POST", "/v1/responses/{response_id}/cancel"): Route(kept.cancel, "key"),
    ("POST", "/v1/messages"): Route(pipeline.endpoint(MESSAGES), "key"),
    ("POST", "/v1/messages/count_tokens"): Route(count_tokens, "key"),
    ("POST", "/v1/messages/batches"): Route(message_batches.create, "key"),
    ("GET", "/v1/messages/batches"): Route(message_batches.listed, "key"),
    ("GET", "/v1/messages/batches/{message_batch_id}"): Route(message_batches.retrieve, "key"),
    ("POST", "/v1/messages/batches/{message_batch_id}/cancel"): Route(message_batches.cancel, "key"),
    ("GET", "/v1/messages/batches/{message_batch_id}/results"): Route(message_batches.results, "key"),
    ("POST", "/v1/embeddings"): Route(pipeline.endpoint(EMBEDDINGS), "key"),
    ("POST", "/v1/rerank"): Route(pipeline.endpoint(RERANK), "key"),
    ("POST", "/v1/feedback"): Route(feedback, "key"),
    ("POST", "/v1/files"): Route(files.create, "key"),
    ("GET", "/v1/files"): Route(files.listed, "key"),
    ("GET", "/v1/files/{file_id}"): Route(files.retrieve, "key"),
    ("DELETE", "/v1/files/{file_id}"): Route(files.remove, "key"),
    ("GET", "/v1/files/{file_id}/content"): Route(files.content, "key"),
    ("POST", "/v1/batches"): Route(batches.create, "key"),
    ("GET", "/v1/batches"): Route(batches.listed, "key"),
    ("GET", "/v1/batches/{batch_id}"): Route(batches.retrieve, "key"),
    ("POST", "/v1/batches/{batch_id}/cancel"): Route(batches.cancel, "key"),
    ("GET", "/v1/models"): Route(pages.models, "key"),
    ("GET", "/v1/models/{model}"): Route(pages.model, "key"),
    ("GET", "/health/live"): Route(pages.live, "open"),
    ("GET", "/health/ready"): Route(pages.ready, "open"),
    ("GET", "/metrics"): Route(pages.metrics, "open"),
    ("GET", "/openapi.json"): Route(pages.openapi, "open"),
}
_PATHS: Mapping[str, frozenset[str]] = {
    path: frozenset(method for method, other in ROUTES if other == path) for _, path in ROUTES
}
_MODEL_PREFIX = "/v1/models/"
_NAMED = {
    files.PREFIX: "{file_id}",
    batches.PREFIX: "{batch_id}",
    message_batches.PREFIX: "{message_batch_id}",
}
_MESSAGES_PATH = "/v1/messages"  # here and below it, even clients that do not say so speak the Anthropic dialect


class App:
    """`start` opens the services when the server starts; they are closed when it stops."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.services: Services | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(Exchange(scope, receive, send))
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            raise RuntimeError(f"the gateway speaks HTTP, not {scope['type']}")

    async def _http(self, exchange: Exchange) -> None:
        if self.services is None:
            raise RuntimeError("a request arrived before the gateway had started")
        await answer(self.services, exchange, _find)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    self.services = await self._start()
                except Exception as error:
                    for line in (str(error) or type(error).__name__).splitlines():  # a file may have several faults
                        logger.error("the gateway cannot start: %s", line)
                    await send({"type": "lifespan.startup.failed"})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                if self.services is not None:
                    await self.services.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


async def answer(services: Services, exchange: Exchange, find: Callable[[Exchange], Handler]) -> None:
    """Let the handler that `find` names answer, and say what goes wrong."""
    try:
        await find(exchange)(services, exchange)
    except ClientGone:
        pass
    except GatewayError as error:
        await respond_error(exchange, error)
    except Exception:
        logger.exception("request %s failed inside the gateway", exchange.request_id)
        if exchange.started:
            raise  # the server closes the connection: nothing else tells the client that the answer is broken
        await respond_error(exchange, GatewayError("The gateway failed on this request."))


def _find(exchange: Exchange) -> Handler:
    method, path = exchange.scope["method"], exchange.scope["path"]
    if (exact := ROUTES.get((method, path))) is not None:
        return exact.handler
    if path.startswith(admin.PREFIX):
        return admin.serve_beside_models
    if path.startswith(_MODEL_PREFIX) and len(path) > len(_MODEL_PREFIX):
        path = "/v1/models/{model}"
    elif path.startswith(kept.PREFIX):
        path = _path_of_response(method, path)
    else:
        path = _path_of_named(path)
    route = ROUTES.get((method, path)) or ROUTES.get(("GET" if method == "HEAD" else method, path))
    if route is not None:
        return route.handler
    if path in _PATHS:
        methods = _PATHS[path] | {"HEAD"} if "GET" in _PATHS[path] else _PATHS[path]
        allowed = ", ".join(sorted(methods))
        raise MethodNotAllowed(f"{path} takes {allowed}, not {method}.", headers={"allow": allowed})
    raise NotFound(f"There is nothing at {method} {path[:200]}. See /openapi.json.", code="unknown_url")


def _path_of_response(method: str, path: str) -> str:
    """The route of a kept answer. What does not look like an id may be one that nobody has, or a route of OpenAI's that
    is not here: which it is, the method tells."""
    id, _, below = path.removeprefix(kept.PREFIX).partition("/")
    route = "/v1/responses/{response_id}" + (f"/{below}" if below else "")
    known = ("GET" if method == "HEAD" else method, route) in ROUTES
    return route if id.startswith("resp_") or (id and known) else path


def _path_of_named(path: str) -> str:
    """The route of a thing with an id in its path, if there is one."""
    for prefix, name in _NAMED.items():
        if path.startswith(prefix):
            id, _, below = path.removeprefix(prefix).partition("/")
            route = prefix + name + (f"/{below}" if below else "")
            return route if id and route in _PATHS else path
    return path


async def respond_error(exchange: Exchange, error: GatewayError) -> None:
    """Send an error answer, unless an answer has begun."""
    if exchange.started:
        return
    request_id = exchange.request_id
    headers = [JSON_TYPE, (b"x-request-id", request_id.encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    body = errors.body(error, request_id)
    if exchange.scope["path"].startswith(_MESSAGES_PATH) or exchange.has(b"anthropic-version"):
        headers.append((MESSAGES.request_id_header.encode(), request_id.encode()))
        body = MESSAGES.error(error, request_id)
    await exchange.respond(error.status, headers, body)
