"""Request bodies, read the same way for every dialect: JSON, then the types of its fields; errors name the field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from backends.protocol import InvalidRequest, Json, wrong_type
from gateway.dialects.errors import BadRequest

_T = TypeVar("_T")
_decoder = msgspec.json.Decoder()


def decode(body: bytes) -> Json:
    """The JSON object of a body.

    Raises:
        BadRequest: it is not JSON, or not an object.
    """
    try:
        payload = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(payload, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_type")
    return payload


def convert(payload: Json, kind: type[_T]) -> _T:
    """The typed view of a decoded body.

    Raises:
        BadRequest: a field that is missing or of the wrong type; `param` names it.
    """
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise bad_request(wrong_type(error)) from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.", code="invalid_json") from None


def bad_request(error: InvalidRequest) -> BadRequest:
    return BadRequest(str(error), code=error.code, param=error.param)
