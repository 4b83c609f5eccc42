"""Routes of the engine's server: those that compute (`endpoints.py`), models, health, metrics, tokenize, detokenize."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from backends.protocol import ChatRequest, InvalidRequest
from engine.client import EngineClient
from engine.server.adapters import AdapterAdmin, adapter_card
from engine.server.endpoints import read_body, task_endpoints
from engine.server.errors import ApiError, as_api_error, http_exception, unexpected
from engine.server.jobs import Jobs
from engine.server.lanes import Lanes
from engine.server.model import ChatPrompt, Model
from engine.server.pages import PageEvents
from engine.server.params import check_chat
from engine.server.reloading import WeightsAdmin
from engine.server.schema import (
    ChatExtras,
    DetokenizeRequest,
    TokenizeRequest,
    decode_object,
)
from engine.server.tools.request import read_tools


def create_app(model: Model, client: EngineClient, lanes: Lanes) -> Starlette:
    """The ASGI application. When its life ends, the lanes and the core do."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await jobs.stop()
            await lanes.stop()
            await client.stop()

    jobs = Jobs(model, client, lanes)
    server = EngineServer(model, client, lanes, jobs)
    computing = task_endpoints(model, client, lanes, jobs)
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in computing.items()),
            Route("/v1/models", server.models, methods=["GET"]),
            Route("/v1/models/{name:path}", server.model, methods=["GET"]),
            Route("/v1/load_lora_adapter", server.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", server.unload_adapter, methods=["POST"]),
            Route("/v1/reload_weights", server.reload_weights, methods=["POST"]),
            Route("/v1/kv_events", PageEvents(client), methods=["GET"]),
            Route("/health", server.health, methods=["GET"]),
            Route("/metrics", server.metrics, methods=["GET"]),
            Route("/tokenize", server.tokenize, methods=["POST"]),
            Route("/detokenize", server.detokenize, methods=["POST"]),
        ],
        exception_handlers={HTTPException: http_exception, ApiError: _api_error, Exception: unexpected},
        lifespan=life,
    )


class EngineServer:
    """The handlers, with the model and the engine that they serve."""

    def __init__(self, model: Model, client: EngineClient, lanes: Lanes, jobs: Jobs) -> None:
        self._model = model
        self._client = client
        self._lanes = lanes
        self._jobs = jobs
        self._adapters = AdapterAdmin(model.name, client)
        self._weights = WeightsAdmin(model, client)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": self._cards()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._model.check_name(name, (adapter.name for adapter in self._client.adapters))
        return _json(next(card for card in self._cards() if card["id"] == name))

    def _cards(self) -> list[dict[str, Any]]:
        """What is told of the model, and of each adapter as if it were one."""
        ready = self._client.ready
        card = {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "tierline",
            "task": self._model.task,
            "digest": None if ready is None else ready.model_digest,
            "max_model_len": None if ready is None else ready.max_total_tokens,
        }
        adapters = [
            card | {"id": a.name, "created": a.created, "parent": self._model.name, "adapter": adapter_card(a)}
            for a in self._client.adapters
        ]
        return [card, *adapters]

    async def health(self, request: Request) -> Response:
        """200 if the loop of the core answers now; otherwise 503 and why."""
        health = await self._client.health()
        body = {"status": health.state, "model": self._model.name} | dataclasses.asdict(health)
        del body["state"]
        return _json(body, 200 if health.state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        await self._client.metrics.gpus.refresh()
        return Response(self._client.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def load_adapter(self, request: Request) -> Response:
        return await self._administer(request, self._adapters.load)

    async def unload_adapter(self, request: Request) -> Response:
        return await self._administer(request, self._adapters.unload)

    async def reload_weights(self, request: Request) -> Response:
        return await self._administer(request, self._weights.reload)

    async def _administer(self, request: Request, work: Callable[[bytes], Awaitable[dict[str, Any]]]) -> Response:
        raw = await _body_of(request)
        try:
            return _json(await work(raw))
        except Exception as error:
            raise as_api_error(error) from error

    async def tokenize(self, request: Request) -> Response:
        raw = await _body_of(request)
        lane = self._lanes.of(len(raw))
        try:
            asked, prompt = await lane.run(self._read_tokenize, raw)
            token_ids = prompt if isinstance(prompt, list) else await self._jobs.chat_ids(prompt, len(raw))
            return await lane.run(self._tokenized, token_ids, with_texts=asked.return_token_strs)
        except Exception as error:
            raise as_api_error(error) from error

    def _read_tokenize(self, raw: bytes) -> tuple[TokenizeRequest, list[int] | ChatPrompt]:
        """The request, and the tokens of its text or what its conversation asks of the template."""
        asked = msgspec.convert(decode_object(raw), TokenizeRequest)
        if asked.model is not None:
            self._jobs.adapter_of(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
        if asked.messages is not None:
            request = {"model": self._model.name, "messages": asked.messages, "tools": asked.tools}
            chat = msgspec.convert(request, ChatRequest)
            check_chat(chat)
            tools = read_tools(chat)
            extras = ChatExtras(
                add_generation_prompt=asked.add_generation_prompt,
                add_special_tokens=asked.add_special_tokens,
                continue_final_message=asked.continue_final_message,
                chat_template_kwargs=asked.chat_template_kwargs,
            )
            definitions = None if tools is None else tools.definitions
            most = self._jobs.max_total_tokens
            return asked, self._model.conversation(asked.messages, extras, most, tools=definitions)
        assert asked.prompt is not None
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(asked, name) is not None:
                raise InvalidRequest(f"'{name}' goes with 'messages', not with 'prompt'.", param=name)
        return asked, self._jobs.text_ids(asked.prompt, "prompt", add_special=asked.add_special_tokens is not False)

    def _tokenized(self, token_ids: list[int], *, with_texts: bool) -> Response:
        most = self._jobs.max_total_tokens
        body: dict[str, Any] = {"count": len(token_ids), "max_model_len": most, "tokens": token_ids}
        if with_texts:
            body["token_strs"] = [self._model.token_text(token_id) for token_id in token_ids]
        return _json(body)

    async def detokenize(self, request: Request) -> Response:
        raw = await _body_of(request)
        try:
            return await self._lanes.of(len(raw)).run(self._detokenized, raw)
        except Exception as error:
            raise as_api_error(error) from error

    def _detokenized(self, raw: bytes) -> Response:
        asked = msgspec.convert(decode_object(raw, tokens="tokens"), DetokenizeRequest)
        if asked.model is not None:
            self._jobs.adapter_of(asked.model)
        self._model.check_ids(asked.tokens, "tokens")
        return _json({"prompt": self._model.tokenizer.decode(asked.tokens, skip_special=False)})


async def _body_of(request: Request) -> bytes:
    raw = await read_body(request.scope, request.receive)
    if raw is None:
        raise ClientDisconnect
    return raw


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(msgspec.json.encode(error.body()), error.status, error.headers())
