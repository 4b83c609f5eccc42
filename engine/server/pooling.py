"""The routes of pooling models: `/v1/embeddings` of those that embed, `/v1/rerank` and `/v1/score` of those that score.

    body → texts → token ids → the core, a few at a time and every request in its turn → vectors → JSON

A request of a thousand texts therefore holds nobody up: when one of its texts is done, whoever waits longest sends the
next one. The core computes whatever is there together.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.bounds import MAX_TOKEN_IDS
from backends.protocol import InvalidRequest, Json
from engine.client import EngineClient
from engine.models.pooling import PoolingSpec, Task
from engine.pipelines.pairs import PairForm
from engine.pooled_text import PooledText, Turn
from engine.server.errors import ApiError
from engine.server.jobs import Jobs
from engine.server.lanes import Lanes
from engine.server.model import Model
from engine.server.pooling_schema import EmbeddingsRequest, RerankRequest, ScoreRequest, document_text, parse
from engine.server.respond import Arrival
from engine.server.schema import ChatExtras, decode_object
from engine.text.answer import EngineBusy
from engine.types import Vector

_ROLES = ("query", "document")


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What is to be scored; `instruction` is for the template."""

    pairs: list[tuple[str, str]]
    instruction: str | None
    turn: Turn
    param: str  # the field to name where one is too long


class PoolingRoutes:
    """Reads requests, has their texts computed and writes the answers' bodies."""

    def __init__(self, model: Model, client: EngineClient, lanes: Lanes, jobs: Jobs, spec: PoolingSpec) -> None:
        self._model = model
        self._client = client
        self._lanes = lanes
        self._jobs = jobs
        self._spec = spec
        self._form = PairForm.of(model.tokenizer_definition)
        self._renders = model.template.constants.issuperset(_ROLES)  # the template is one for pairs
        self._slots = asyncio.Semaphore(min(2 * client.max_rows, client.max_answers))
        self._requests = 0

    # --- embeddings ------------------------------------------------------------------------------------------------

    async def embeddings(self, raw: bytes, arrival: Arrival) -> Json:
        """Raises what `as_api_error` knows."""
        request, prompts = await self._lanes.of(len(raw)).run(self._read_embeddings, raw)
        texts = await self._compute(prompts, request.turn(arrival))
        size = 4 * sum(len(text.result.result()) for text in texts)
        return await self._lanes.of(size).run(self._written, request, texts)

    def _read_embeddings(self, raw: bytes) -> tuple[EmbeddingsRequest, list[list[int]]]:
        request = parse(decode_object(raw, tokens="input"), EmbeddingsRequest)
        self._model.check_name(request.model)
        if request.encoding_format not in (None, "float", "base64"):
            raise InvalidRequest("'encoding_format' must be float or base64.", param="encoding_format")
        width = self._model.hidden_size
        if request.dimensions is not None and not 1 <= request.dimensions <= width:
            text = f"'dimensions' must be 1 to {width}, the length of this model's vectors."
            raise InvalidRequest(text, param="dimensions")
        special = request.add_special_tokens is not False
        prompts = self._jobs.prompt_ids(request.input, "input", add_special=special)
        self._check_length(prompts, "input")
        return request, prompts

    def _written(self, request: EmbeddingsRequest, texts: Sequence[PooledText]) -> Json:
        vectors = [self._vector(text.result.result(), request.dimensions) for text in texts]
        written: list[Any] = [vector.tolist() for vector in vectors]
        if request.encoding_format == "base64":
            written = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)]
        return {"object": "list", "data": data, "model": self._model.name, "usage": _usage(texts)}

    def _vector(self, vector: Vector, dimensions: int | None) -> Vector:
        vector = vector[:dimensions]
        length = float(np.linalg.norm(vector))
        return vector / np.float32(length) if self._spec.normalise and length > 0 else vector

    # --- scores ----------------------------------------------------------------------------------------------------

    async def rerank(self, raw: bytes, arrival: Arrival) -> Json:
        """Raises what `as_api_error` knows."""
        request, asked, documents = await self._lanes.of(len(raw)).run(self._read_rerank, raw, arrival)
        scores, texts = await self._scores(asked, len(raw))
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: request.top_n]
        results: list[Json] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if request.return_documents:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": self._model.name,
            "usage": _usage(texts),
            "results": results,
        }

    def _read_rerank(self, raw: bytes, arrival: Arrival) -> tuple[RerankRequest, _Pairs, list[str]]:
        request = parse(decode_object(raw), RerankRequest)
        self._model.check_name(request.model)
        if request.top_n is not None and request.top_n < 1:
            raise InvalidRequest("'top_n' must be at least 1.", param="top_n")
        documents = [document_text(document, f"documents[{i}]") for i, document in enumerate(request.documents)]
        pairs = [(request.query, document) for document in documents]
        return request, self._pairs(pairs, request, arrival, "documents"), documents

    async def score(self, raw: bytes, arrival: Arrival) -> Json:
        """Raises what `as_api_error` knows."""
        asked = await self._lanes.of(len(raw)).run(self._read_score, raw, arrival)
        scores, texts = await self._scores(asked, len(raw))
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "model": self._model.name,
            "data": data,
            "usage": _usage(texts),
        }

    def _read_score(self, raw: bytes, arrival: Arrival) -> _Pairs:
        request = parse(decode_object(raw), ScoreRequest)
        self._model.check_name(request.model)
        first, second = ([text] if isinstance(text, str) else text for text in (request.text_1, request.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest("'text_1' must be one text, or as many as 'text_2' has.", param="text_1")
        return self._pairs(list(zip(first, second, strict=True)), request, arrival, "text_2")

    def _pairs(
        self, pairs: list[tuple[str, str]], request: RerankRequest | ScoreRequest, arrival: Arrival, param: str
    ) -> _Pairs:
        if not pairs:
            raise InvalidRequest(f"'{param}' must hold at least one text.", param=param, code="empty_array")
        if request.instruction is not None and not self._renders:
            text = "This model has no template for pairs of texts, so it reads no 'instruction'; leave it out."
            raise ApiError(400, text, code="unsupported_parameter", param="instruction")
        return _Pairs(pairs, request.instruction, request.turn(arrival), param)

    async def _scores(self, asked: _Pairs, size: int) -> tuple[list[float], list[PooledText]]:
        """The score of each pair, in the order of the request, whose body has `size` bytes."""
        if self._renders:
            prompts, total = [], 0
            for pair in asked.pairs:
                prompts.append(await self._rendered(pair, asked.instruction, size))
                _check_total(total := total + len(prompts[-1]), asked.param)
        else:
            prompts = await self._lanes.of(size).run(self._pair_ids, asked)
        self._check_length(prompts, asked.param)
        texts = await self._compute(prompts, asked.turn)
        values = [float(text.result.result()[0]) for text in texts]
        return [_sigmoid(value) if self._spec.sigmoid else value for value in values], texts

    async def _rendered(self, pair: tuple[str, str], instruction: str | None, size: int) -> list[int]:
        messages: list[Json] = [{"role": role, "content": text} for role, text in zip(_ROLES, pair, strict=True)]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        most = self._jobs.max_total_tokens
        prompt = await self._lanes.of(size).run(self._model.conversation, messages, ChatExtras(), most)
        return await self._jobs.chat_ids(prompt, size)

    def _pair_ids(self, asked: _Pairs) -> list[list[int]]:
        known: dict[str, list[int]] = {}
        for text in (text for pair in asked.pairs for text in pair):
            if text not in known:
                known[text] = self._jobs.text_ids(text, asked.param, add_special=False)
        _check_total(sum(len(known[text]) for pair in asked.pairs for text in pair), asked.param)
        return [self._form.ids(known[first], known[second]) for first, second in asked.pairs]

    # --- both ------------------------------------------------------------------------------------------------------

    def _check_length(self, prompts: Sequence[Sequence[int]], param: str) -> None:
        most = self._jobs.max_total_tokens
        for i, prompt in enumerate(prompts):
            if len(prompt) > most:
                text = f"Text {i} of '{param}' has {len(prompt)} tokens; this engine holds {most}."
                raise ApiError(400, text, code="context_length_exceeded", param=param)
            if not prompt:
                raise InvalidRequest(f"Text {i} of '{param}' has no tokens.", param=param)

    async def _compute(self, prompts: Sequence[list[int]], turn: Turn) -> list[PooledText]:
        """The texts with their vectors, in order.

        Raises:
            EngineError: one of them failed, or too many requests wait already; the others are given up.
        """
        most = self._client.max_answers
        if self._requests >= most:
            raise EngineBusy(f"{self._requests} requests are here; this engine takes {most}.", 1.0)
        self._requests += 1
        texts: list[PooledText] = []
        try:
            for prompt in prompts:
                await self._slots.acquire()
                try:
                    text = self._client.pool(prompt, turn)
                except BaseException:
                    self._slots.release()
                    raise
                text.result.add_done_callback(lambda _: self._slots.release())
                texts.append(text)
            for text in texts:
                await asyncio.shield(text.result)
        finally:
            self._requests -= 1
            self._client.abort(texts)
        return texts


def _check_total(tokens: int, param: str) -> None:
    """Raises InvalidRequest if a request's texts, the one that each is paired with counted each time, are too much."""
    if tokens > MAX_TOKEN_IDS:
        text = f"The texts of '{param}' and what they are paired with make more than {MAX_TOKEN_IDS} tokens in all."
        raise InvalidRequest(f"{text} Send them in several requests.", code="array_too_long", param=param)


def _usage(texts: Sequence[PooledText]) -> Json:
    tokens = sum(text.num_prompt_tokens for text in texts)
    cached = sum(text.cached_tokens for text in texts)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}


def _sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(value))))


def wrong_task(model: Model, task: Task) -> ApiError:
    """The refusal of a route that is another kind of model's."""
    kinds = {
        Task.GENERATE: "generates text: use /v1/chat/completions or /v1/completions",
        Task.EMBED: "makes vectors of texts: use /v1/embeddings",
        Task.SCORE: "scores pairs of texts: use /v1/rerank or /v1/score",
    }
    return ApiError(400, f"The model '{model.name}' {kinds[task]}.", code="wrong_task")
