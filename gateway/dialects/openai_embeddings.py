"""`POST /v1/embeddings` and `POST /v1/rerank`: texts in, vectors or an order out; never a stream, never any output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from backends.attempt import Operation
from backends.protocol import Json
from gateway.dialects import errors
from gateway.dialects.dialect import Asked, Writer
from gateway.dialects.errors import BadRequest, GatewayError
from gateway.dialects.openai_answer import OpenAIWriter
from gateway.dialects.reading import convert, decode
from tiers.features import estimate_tokens

MAX_INPUTS = 2048


class EmbeddingsRequest(msgspec.Struct):
    """Every documented parameter; an input is text, texts, token ids, or lists of token ids."""

    model: str
    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: str | None = None
    user: str | None = None


class RerankRequest(msgspec.Struct):
    """What servers with this route agree on: a query and the documents to put in order."""

    model: str
    query: str
    documents: list[str | Json]
    top_n: int | None = None
    return_documents: bool | None = None


class _Plain:
    """What both have in common: no streams, and the backend's answer as it is."""

    keep_alive = b""
    request_id_header = "x-request-id"

    def writer(self, asked: Asked, request_id: str) -> Writer:
        return OpenAIWriter(request_id, wants_usage=False)

    def error(self, error: GatewayError, request_id: str) -> bytes:
        return errors.body(error, request_id)


class OpenAIEmbeddings(_Plain):
    """The embeddings of the OpenAI SDKs. See `gateway.dialects.dialect.Dialect`."""

    route = "embeddings"

    def parse(self, body: bytes) -> Asked:
        payload = decode(body, tokens="input")
        request = convert(payload, EmbeddingsRequest)
        if request.encoding_format not in (None, "float", "base64"):
            text = "'encoding_format' must be float or base64."
            raise BadRequest(text, code="invalid_value", param="encoding_format")
        if request.dimensions is not None and request.dimensions < 1:
            raise BadRequest("'dimensions' must be at least 1.", code="invalid_value", param="dimensions")
        if not request.input or (isinstance(request.input, list) and len(request.input) > MAX_INPUTS):
            # A list of token ids may be longer than that, but no model takes so long a text.
            text = f"'input' takes 1 to {MAX_INPUTS} texts, none of them empty."
            raise BadRequest(text, code="invalid_value", param="input")
        texts = texts_of(request.input, "input")
        return _asked("embeddings", request.model, payload, texts, lambda: _longest(texts), "input")


class Rerank(_Plain):
    """The rerank route of vLLM, Jina and Cohere. See `gateway.dialects.dialect.Dialect`."""

    route = "rerank"

    def parse(self, body: bytes) -> Asked:
        payload = decode(body)
        request = convert(payload, RerankRequest)
        if not request.documents:
            raise BadRequest("'documents' must hold at least one.", code="empty_array", param="documents")
        if request.top_n is not None and request.top_n < 1:
            raise BadRequest("'top_n' must be at least 1.", code="invalid_value", param="top_n")
        documents: list[str] = []
        for i, document in enumerate(request.documents):
            text = document if isinstance(document, str) else document.get("text")
            if not isinstance(text, str):
                where = f"documents[{i}]"
                raise BadRequest(f"'{where}' must be a text or have one.", code="invalid_type", param=where)
            documents.append(text)

        def longest() -> int:
            return estimate_tokens(request.query) + _longest(documents)  # the query is read again with each document

        return _asked("rerank", request.model, payload, [request.query, *documents], longest, "documents")


def texts_of(given: str | Sequence[str | int | Sequence[int]], field: str) -> list[str]:
    """Texts or token ids as texts, for counting; a token becomes a digit, which every estimate takes for one token.

    Raises:
        BadRequest: a mixture of them, or an empty one; `field` names it.
    """
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        text = f"'{field}' must be a text, a list of texts, a list of token ids, or a list of such lists."
        raise BadRequest(text, code="invalid_type", param=field)
    if kinds == {int}:
        return ["1" * len(given)]
    return [item if isinstance(item, str) else "1" * len(item) for item in given if not isinstance(item, int)]


def _longest(texts: Sequence[str]) -> int:
    return max(map(estimate_tokens, texts))


def _asked(
    operation: Operation, model: str, payload: Json, texts: list[str], longest: Callable[[], int], field: str
) -> Asked:
    messages = [{"role": "user", "content": text} for text in texts]
    return Asked(operation, model, payload, messages, generated=0, longest=longest, input_field=field)


EMBEDDINGS = OpenAIEmbeddings()
RERANK = Rerank()
