"""What clients may send to the routes of pooling models. A field that stands in no struct is refused by name."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from backends.bounds import MAX_TEXTS
from backends.protocol import MAX_SALT_CHARACTERS, InvalidRequest, convert
from engine.pooled_text import Turn
from engine.server.params import check_turn
from engine.server.respond import Arrival
from engine.server.schema import refuse_fields, refuse_unknown


class PoolingRequest(msgspec.Struct, kw_only=True):
    """What all of them have in common; the meaning is that of completions."""

    model: str
    user: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    priority: int | None = None
    deadline_ms: int | None = None

    def turn(self, arrival: Arrival) -> Turn:
        """When the texts of a request that came so are computed."""
        salt = self.cache_salt
        return Turn(salt, self.tenant or salt or "", self.priority or 0, arrival.due(self.deadline_ms))


class EmbeddingsRequest(PoolingRequest, kw_only=True):
    """`POST /v1/embeddings`, OpenAI's. `dimensions`: so many first numbers, brought to length 1 again."""

    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: str | None = None
    add_special_tokens: bool | None = None


class RerankRequest(PoolingRequest, kw_only=True):
    """`POST /v1/rerank`, as Jina, Cohere and vLLM have it. `instruction`: for templates that read one."""

    query: str
    documents: list[str | dict[str, object]]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """`POST /v1/score`, vLLM's: one text against one or many, or as many as there are of the other."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None


_Request = TypeVar("_Request", bound=PoolingRequest)


def parse(body: dict[str, object], kind: type[_Request]) -> _Request:
    """The request.

    Raises:
        ApiError: an unknown field.
        msgspec.ValidationError: a field of the wrong type.
        InvalidRequest: a value out of range, or too many texts.
    """
    refuse_unknown(body, kind)
    request = convert(body, kind)
    salt = request.cache_salt
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise InvalidRequest(f"'cache_salt' must have 1 to {MAX_SALT_CHARACTERS} characters.", param="cache_salt")
    check_turn(request.tenant, request.priority, request.deadline_ms)
    for name in ("documents", "text_1", "text_2"):
        texts = getattr(request, name, ())
        if isinstance(texts, list) and len(texts) > MAX_TEXTS:
            text = f"'{name}' holds {len(texts)} texts; at most {MAX_TEXTS} are taken. Send them in several requests."
            raise InvalidRequest(text, code="array_too_long", param=name)
    return request


def document_text(document: str | dict[str, object], where: str) -> str:
    """The text of a document. `where`: its name in messages.

    Raises:
        ApiError: it has a field that nobody would read.
        InvalidRequest: it has no text.
    """
    if isinstance(document, str):
        return document
    refuse_fields(document, {"text"}, f"{where}.")
    text = document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{where}' must be a text or have a 'text'.", param=where)
    return text
