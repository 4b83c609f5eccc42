"""What clients may send to the routes of pooling models. A field that stands in no struct is refused by name."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from backends.protocol import InvalidRequest, convert
from engine.server.schema import refuse_unknown

_Request = TypeVar("_Request", bound=msgspec.Struct)
_MOST_SALT = 128


class EmbeddingsRequest(msgspec.Struct):
    """`POST /v1/embeddings`, OpenAI's. `dimensions`: so many first numbers, brought to length 1 again."""

    model: str
    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: str | None = None
    user: str | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None


class RerankRequest(msgspec.Struct):
    """`POST /v1/rerank`, as Jina, Cohere and vLLM have it. `instruction`: for templates that read one."""

    model: str
    query: str
    documents: list[str | dict[str, str]]
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    user: str | None = None
    cache_salt: str | None = None


class ScoreRequest(msgspec.Struct):
    """`POST /v1/score`, vLLM's: one text against one or many, or as many as there are of the other."""

    model: str
    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None
    user: str | None = None
    cache_salt: str | None = None


def parse(body: dict[str, object], kind: type[_Request]) -> _Request:
    """The request.

    Raises:
        ApiError: an unknown field.
        msgspec.ValidationError: a field of the wrong type.
        InvalidRequest: a salt that is too long or empty.
    """
    refuse_unknown(body, kind)
    request = convert(body, kind)
    salt: str | None = getattr(request, "cache_salt", None)
    if salt is not None and not 1 <= len(salt) <= _MOST_SALT:
        raise InvalidRequest(f"'cache_salt' must have 1 to {_MOST_SALT} characters.", param="cache_salt")
    return request
