"""`POST /v1/embeddings` of the cache process: its embedding model as an OpenAI-compatible backend.

The model is loaded anyway, so that applications can have its vectors too; the cache's look-ups go before theirs.
Unlike the cache, which refuses a text with characters that the model does not know, this embeds it, as every embedding
server does; a text longer than the model's window is refused, never cut.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec

from cache.embedding.batcher import Batcher, Overloaded
from cache.embedding.embedder import Embedder, Refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_INPUTS = 2048
BATCH = 8
PATIENCE_S = 20.0
_POLL_S = 0.1
_encode = msgspec.json.Encoder().encode


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: str = "float"
    user: str | None = None


_decoder = msgspec.json.Decoder(_Request)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


class Model(Protocol):
    """What there is to serve; None while the model is being loaded or could not be."""

    embedder: Embedder | None
    batcher: Batcher | None


class _Failed(Exception):
    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class EmbeddingsApp:
    """The ASGI application. Answers `/health`, `/v1/models` and `/v1/embeddings`."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._name = name
        self._counting = asyncio.Lock()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the embedder speaks HTTP, not {scope['type']}")
        try:
            status, answer = 200, await self._answer(scope["method"], scope["path"], receive)
        except _Failed as failure:
            kind = "invalid_request_error" if failure.status < 500 else "server_error"
            error = {"message": str(failure), "type": kind, "code": failure.code, "param": failure.param}
            status, answer = failure.status, {"error": error}
        body = _encode(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if status == 503:
            headers.append((b"retry-after", b"5"))  # so that a gateway does not take it for a fault
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, method: str, path: str, receive: Receive) -> dict[str, Any]:
        match method, path:
            case "GET", "/health":
                self._loaded()
                return {"status": "ready"}
            case "GET", "/v1/models":
                return {"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "tierline"}]}
            case "POST", "/v1/embeddings":
                return await self._embeddings(await _body(receive))
        raise _Failed(404, f"There is nothing at {method} {path[:100]}.", "unknown_url")

    def _loaded(self) -> tuple[Embedder, Batcher]:
        embedder, batcher = self._model.embedder, self._model.batcher
        if embedder is None or batcher is None:
            raise _Failed(503, "The embedding model is not loaded.", "not_ready")
        return embedder, batcher

    async def _when_loaded(self) -> tuple[Embedder, Batcher]:
        """The model; a request that comes while it is being loaded waits for it, as long as that usually takes."""
        for _ in range(round(PATIENCE_S / _POLL_S)):
            if self._model.embedder is not None and self._model.batcher is not None:
                break
            await asyncio.sleep(_POLL_S)
        return self._loaded()

    async def _embeddings(self, body: bytes) -> dict[str, Any]:
        try:
            request = _decoder.decode(body)
        except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
            what, _, where = str(error).partition(" - at `$.")
            if unknown := _UNKNOWN_FIELD.fullmatch(what):
                name = unknown[1][:100]
                raise _Failed(400, f"Unknown parameter '{name}'.", "unknown_parameter", name) from None
            raise _Failed(400, f"{what}.", "invalid_request", where.rstrip("`") or None) from None
        embedder, batcher = await self._when_loaded()
        if request.encoding_format not in ("float", "base64"):
            text = "'encoding_format' must be float or base64."
            raise _Failed(400, text, "invalid_value", "encoding_format")
        if request.dimensions not in (None, embedder.dimension):
            text = f"'{request.model[:100]}' has {embedder.dimension} dimensions and cannot give {request.dimensions}."
            raise _Failed(400, text, "invalid_value", "dimensions")
        given = [request.input] if isinstance(request.input, str) else request.input
        texts = [text for text in given if isinstance(text, str)]
        if len(texts) < len(given):
            raise _Failed(
                400,
                "'input' takes texts, not token ids: those of another model's tokenizer are other words here. "
                "In LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False.",
                "token_ids_not_supported",
                "input",
            )
        if not 1 <= len(texts) <= MAX_INPUTS or not all(texts):
            raise _Failed(400, f"'input' takes 1 to {MAX_INPUTS} texts, none of them empty.", "invalid_value", "input")
        tokens = await self._count(embedder, texts, one=isinstance(request.input, str))
        data: list[msgspec.Raw] = []
        try:
            # A batch at a time: so that many requests take turns, and none holds up this loop.
            for start in range(0, len(texts), BATCH):
                batch = texts[start : start + BATCH]
                vectors = await asyncio.gather(*(batcher.embed(text, checked=True, behind=True) for text in batch))
                for i, vector in enumerate(vectors, start):
                    shown = base64.b64encode(vector.tobytes()).decode()
                    value = shown if request.encoding_format == "base64" else vector.tolist()
                    data.append(msgspec.Raw(_encode({"object": "embedding", "index": i, "embedding": value})))
        except Overloaded:
            raise _Failed(503, "Too many texts wait for the embedding model.", "overloaded") from None
        return {
            "object": "list",
            "data": data,
            "model": request.model,  # as the client calls it: the gateway may have another name for it
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    async def _count(self, embedder: Embedder, texts: list[str], *, one: bool) -> int:
        """Tokens of all texts. The cache's look-ups go on in between, and one request at a time counts."""
        tokens = 0
        async with self._counting:
            for i, text in enumerate(texts):
                if i % BATCH == 0:
                    await asyncio.sleep(0)
                try:
                    tokens += embedder.count(text)
                except Refused as refusal:
                    raise _Failed(
                        400, str(refusal), "context_length_exceeded", "input" if one else f"input[{i}]"
                    ) from None
        return tokens


async def _body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Failed(499, "The client left.", "client_gone")  # nobody reads it
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _Failed(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", "request_too_large")
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)
