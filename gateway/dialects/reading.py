"""Request bodies, read alike for every dialect: JSON, its bounds, the types of its fields; errors name the field."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from backends import protocol
from backends.bounds import check_bounds, check_elements
from backends.json_errors import reason
from backends.protocol import InvalidRequest, Json, wrong_type
from gateway.dialects.errors import BadRequest

_T = TypeVar("_T")
_decoder = msgspec.json.Decoder()


def decode(body: bytes, *, tokens: str | None = None) -> Json:
    """The JSON object of a body. `tokens` names the field that may hold a great many token ids, if there is one.

    Raises:
        BadRequest: it is not JSON, not an object, nested too deeply, or holds too many elements.
    """
    try:
        check_elements(body)
        payload = _decoder.decode(body)
        if not isinstance(payload, dict):
            raise BadRequest("The body must be a JSON object.", code="invalid_type")
        check_bounds(payload, tokens=tokens, raw=body)
    except InvalidRequest as error:
        raise bad_request(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(reason(body, error), code="invalid_json") from None
    return payload


def convert(payload: Json, kind: type[_T]) -> _T:
    """The typed view of a decoded body (see `backends.protocol.convert`).

    Raises:
        BadRequest: a field that is missing or of the wrong type; `param` names it.
    """
    try:
        return protocol.convert(payload, kind)
    except msgspec.ValidationError as error:
        raise bad_request(wrong_type(error, kind)) from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.", code="invalid_json") from None


def beams(payload: Json) -> int:
    """How many answers a server follows at once to find the best (`beam_width`), and generates; 1: no search."""
    width = payload.get("beam_width")
    return width if isinstance(width, int) and width > 1 else 1


def bad_request(error: InvalidRequest) -> BadRequest:
    return BadRequest(str(error), code=error.code, param=error.param)
