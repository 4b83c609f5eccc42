"""Routes of the engine's server: completions, models, health, metrics, tokenize and detokenize.

The two completion endpoints are plain ASGI (they stream and watch for a client that leaves); the rest is small.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from backends.protocol import ChatRequest, InvalidRequest, whole_number
from engine.answer import EngineDown, Generation
from engine.client import EngineClient
from engine.detokenizer import Detokenizer
from engine.renderer import RenderedTooLong
from engine.server.dialect import ChatDialect, CompletionDialect
from engine.server.echo import Echo, echo
from engine.server.errors import ApiError, as_api_error, http_exception, unexpected
from engine.server.lanes import Lanes
from engine.server.model import ChatPrompt, Model
from engine.server.pages import PageEvents
from engine.server.params import Options, chat_options, check_chat, completion_options
from engine.server.respond import Job, respond, send_error
from engine.server.sampling import bad_word_ids
from engine.server.schema import (
    ChatExtras,
    DetokenizeRequest,
    TokenizeRequest,
    decode_object,
    parse_chat,
    parse_completion,
)
from engine.types import BeamParams

MAX_BODY_BYTES = 32 * 1024 * 1024

# Turns the body of the request with this id into a job; raises what `as_api_error` knows.
MakeJob = Callable[[bytes, str], Awaitable[Job]]


def create_app(model: Model, client: EngineClient, lanes: Lanes) -> Starlette:
    """The ASGI application. Starts and stops the core with its own life, and stops the lanes."""

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        client.start()
        try:
            yield
        finally:
            await lanes.stop()
            await client.stop()

    server = EngineServer(model, client, lanes)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", _Endpoint(client, server.chat_job), methods=["POST"]),
            Route("/v1/completions", _Endpoint(client, server.completion_job), methods=["POST"]),
            Route("/v1/models", server.models, methods=["GET"]),
            Route("/v1/kv_events", PageEvents(client), methods=["GET"]),
            Route("/health", server.health, methods=["GET"]),
            Route("/metrics", server.metrics, methods=["GET"]),
            Route("/tokenize", server.tokenize, methods=["POST"]),
            Route("/detokenize", server.detokenize, methods=["POST"]),
        ],
        exception_handlers={HTTPException: http_exception, ApiError: _api_error, Exception: unexpected},
        lifespan=life,
    )


class _Endpoint:
    """An ASGI endpoint that reads a JSON body, makes a job of it and responds."""

    def __init__(self, client: EngineClient, make_job: MakeJob) -> None:
        self._client = client
        self._make_job = make_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get("x-request-id") or uuid.uuid4().hex
        try:
            raw = await read_body(scope, receive)
            if raw is None:
                return  # the client left before it had asked
            await respond(self._client, await self._make_job(raw, request_id), receive, send)
        except Exception as error:
            await send_error(as_api_error(error), request_id, send)


class EngineServer:
    """The handlers, with the model and the engine that they serve."""

    def __init__(self, model: Model, client: EngineClient, lanes: Lanes) -> None:
        self._model = model
        self._client = client
        self._lanes = lanes

    @property
    def _max_total_tokens(self) -> int:
        ready = self._client.ready
        if ready is None:
            raise EngineDown("The model is not loaded. Try again in a few seconds.")
        return ready.max_total_tokens

    # --- completions ---------------------------------------------------------------------------------------------

    async def chat_job(self, raw: bytes, request_id: str) -> Job:
        options, asked = await self._lanes.of(len(raw)).run(self._read_chat, raw)
        prompt = await self._chat_ids(asked, len(raw))
        dialect = ChatDialect(self._model, prompt, **_dialect_options(options))
        return self._job(options, [prompt], request_id, dialect)

    def _read_chat(self, raw: bytes) -> tuple[Options, ChatPrompt]:
        body = decode_object(raw)
        request, extras = parse_chat(body)
        self._model.check_name(request.model)
        options = chat_options(request, extras, self._model.vocab_size, self._model.sampling)
        self._check_options(options)
        return options, self._model.conversation(body["messages"], extras, self._max_total_tokens)

    async def _chat_ids(self, asked: ChatPrompt, size: int) -> list[int]:
        """Token ids of a conversation that came in a body of `size` bytes."""
        try:
            text = await self._lanes.of(size).renderer.render(asked.asked)
        except RenderedTooLong as error:
            self._model.check_length(error.characters, self._max_total_tokens, "messages")
            raise
        return await self._lanes.of(len(text)).run(self._model.chat_ids, asked, text)

    async def completion_job(self, raw: bytes, request_id: str) -> Job:
        return await self._lanes.of(len(raw)).run(self._completion_job, raw, request_id)

    def _completion_job(self, raw: bytes, request_id: str) -> Job:
        request, extras = parse_completion(decode_object(raw, tokens="prompt"))
        self._model.check_name(request.model)
        options = completion_options(request, extras, self._model.vocab_size, self._model.sampling)
        # Counted before anything is made of them: a small body can ask for a great many.
        self._check_options(options)
        if isinstance(request.prompt, list) and not isinstance(next(iter(request.prompt), 0), int):
            self._check_answers(options.best_of * len(request.prompt), "prompt")
        prompts = self._completion_prompts(request.prompt, add_special=extras.add_special_tokens is not False)
        echoes = self._echoes(request.prompt, prompts, options.skip_special) if request.echo else None
        dialect = CompletionDialect(self._model, prompts, echoes, options.n, **_dialect_options(options))
        return self._job(options, prompts, request_id, dialect)

    def _check_options(self, options: Options) -> None:
        """Raises ApiError if one prompt asks for more than the engine holds."""
        self._check_answers(options.best_of, "n" if options.best_of == options.n else "best_of")
        beam, most = options.params.beam, self._client.max_rows
        if beam is not None and beam.width > most:
            text = f"{beam.width} beams asked for; this engine runs at most {most} requests at a time."
            raise ApiError(400, text, code="too_many_answers", param="beam_width")

    def _check_answers(self, answers: int, param: str) -> None:
        """Raises ApiError if one request asks for more answers than the engine ever holds."""
        most = self._client.max_answers
        if answers > most:
            raise ApiError(
                400,
                f"{answers} answers asked for at once; this engine holds at most {most}.",
                code="too_many_answers",
                param=param,
            )

    def _completion_prompts(self, prompt: str | list[str | int | list[int]], *, add_special: bool) -> list[list[int]]:
        """One list of token ids per prompt.

        Raises:
            InvalidRequest: an empty list, or texts and ids mixed.
        """
        if isinstance(prompt, str):
            prompt = [prompt]
        if not prompt:
            raise InvalidRequest("'prompt' must not be an empty list.", param="prompt", code="empty_array")
        texts = [item for item in prompt if isinstance(item, str)]
        ids = [item for item in prompt if isinstance(item, int)]
        lists = [item for item in prompt if isinstance(item, list)]
        if len(prompt) not in (len(texts), len(ids), len(lists)):
            raise InvalidRequest(
                "'prompt' must hold texts, token ids or lists of token ids, not a mixture.", param="prompt"
            )
        prompts = lists or ([ids] if ids else [self._text_ids(text, add_special=add_special) for text in texts])
        for token_ids in prompts:
            self._model.check_ids(token_ids, "prompt")
            if not token_ids:
                raise InvalidRequest("A prompt must have at least one token.", param="prompt")
        return prompts

    def _text_ids(self, text: str, *, add_special: bool) -> list[int]:
        self._model.check_length(len(text), self._max_total_tokens, "prompt")
        return self._model.tokenizer.encode(text, add_special=add_special)

    def _echoes(
        self, prompt: str | list[str | int | list[int]], prompts: list[list[int]], skip_special: bool
    ) -> list[Echo]:
        """The prompts as text: the client's own where it sent text."""
        given = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
        texts: list[str] | list[None] = given or [None] * len(prompts)
        return [
            echo(self._model.tokenizer, ids, text, skip_special=skip_special)
            for ids, text in zip(prompts, texts, strict=True)
        ]

    def _job(
        self, options: Options, prompts: list[list[int]], request_id: str, dialect: ChatDialect | CompletionDialect
    ) -> Job:
        room = self._room(options.params.beam)
        options = dataclasses.replace(
            options,
            params=dataclasses.replace(
                options.params, bad_words=bad_word_ids(options.bad_words, self._model.tokenizer)
            ),
        )
        if (longest := max(map(len, prompts))) >= room:
            raise ApiError(
                400,
                f"The prompt has {longest} tokens and at least 1 must be generated, but this engine holds {room} "
                "tokens of a request.",
                code="context_length_exceeded",
                param=dialect.prompt_field,
            )
        generations = [
            self._generation(options, prompt, index, room - len(prompt), group)
            for group, prompt in enumerate(prompts)
            for index in range(options.best_of)
        ]
        return Job(
            model_name=self._model.name,
            request_id=request_id,
            generations=generations,
            n=options.n,
            best_of=options.best_of,
            dialect=dialect,
            stream=options.stream,
            include_usage=options.include_usage,
        )

    def _generation(self, options: Options, prompt: list[int], index: int, room: int, group: int) -> Generation:
        params = options.params_for(index, room)
        detokenizer = Detokenizer(
            self._model.tokenizer,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=params.min_tokens,
            skip_special=options.skip_special,
            opens_with_space=self._model.tokenizer.opens_with_space(prompt),
        )
        return Generation(prompt, params, detokenizer, options.cache_salt, group if options.best_of > 1 else None)

    def _room(self, beam: BeamParams | None) -> int:
        """How many tokens one sequence can have. Beams divide the pages among them, so that all of them always fit."""
        room, ready = self._max_total_tokens, self._client.ready
        if beam is None or ready is None:
            return room
        return min(room, (ready.num_blocks - 1) // beam.width * ready.block_size)

    # --- the rest ------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        ready = self._client.ready
        card = {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "tierline",
            "max_model_len": None if ready is None else ready.max_total_tokens,
        }
        return _json({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        """200 if the loop of the core answers now; otherwise 503 and why."""
        health = await self._client.health()
        body = {"status": health.state, "model": self._model.name} | dataclasses.asdict(health)
        del body["state"]
        return _json(body, 200 if health.state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        await self._client.metrics.gpus.refresh()
        return Response(self._client.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def tokenize(self, request: Request) -> Response:
        raw = await _body_of(request)
        lane = self._lanes.of(len(raw))
        try:
            asked, prompt = await lane.run(self._read_tokenize, raw)
            token_ids = prompt if isinstance(prompt, list) else await self._chat_ids(prompt, len(raw))
            return await lane.run(self._tokenized, token_ids, with_texts=asked.return_token_strs)
        except Exception as error:
            raise as_api_error(error) from error

    def _read_tokenize(self, raw: bytes) -> tuple[TokenizeRequest, list[int] | ChatPrompt]:
        """The request, and the tokens of its text or what its conversation asks of the template."""
        asked = msgspec.convert(decode_object(raw), TokenizeRequest)
        if asked.model is not None:
            self._model.check_name(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
        if asked.messages is not None:
            check_chat(msgspec.convert({"model": self._model.name, "messages": asked.messages}, ChatRequest))
            extras = ChatExtras(
                add_generation_prompt=asked.add_generation_prompt,
                add_special_tokens=asked.add_special_tokens,
                continue_final_message=asked.continue_final_message,
                chat_template_kwargs=asked.chat_template_kwargs,
            )
            return asked, self._model.conversation(asked.messages, extras, self._max_total_tokens)
        assert asked.prompt is not None
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(asked, name) is not None:
                raise InvalidRequest(f"'{name}' goes with 'messages', not with 'prompt'.", param=name)
        return asked, self._text_ids(asked.prompt, add_special=asked.add_special_tokens is not False)

    def _tokenized(self, token_ids: list[int], *, with_texts: bool) -> Response:
        body: dict[str, Any] = {"count": len(token_ids), "max_model_len": self._max_total_tokens, "tokens": token_ids}
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
            self._model.check_name(asked.model)
        self._model.check_ids(asked.tokens, "tokens")
        return _json({"prompt": self._model.tokenizer.decode(asked.tokens, skip_special=False)})


async def _body_of(request: Request) -> bytes:
    raw = await read_body(request.scope, request.receive)
    if raw is None:
        raise ClientDisconnect
    return raw


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
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _dialect_options(options: Options) -> dict[str, Any]:
    return {
        "logprobs": options.params.logprobs is not None,
        "return_token_ids": options.return_token_ids,
        "stop_token_ids": options.params.stop_token_ids,
        "prompt_logprobs": options.prompt_logprobs,
    }


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(msgspec.json.encode(error.body()), error.status, error.headers())
