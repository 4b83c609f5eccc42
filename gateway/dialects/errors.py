"""What can go wrong with a request, and how the OpenAI dialect says it.

Every error has a `type` and a `code` for programs, a `message` that says what to do, and carries the request id.
The pipeline raises these; `body` is the one place that turns them into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


class GatewayError(Exception):
    """Base of everything that ends a request with an error answer."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status or self.status
        self.type = type or self.type
        self.code = code or self.code
        self.param = param
        self.headers = dict(headers or {})


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthenticated(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotAllowed(GatewayError):
    status = 403
    type = "permission_error"
    code = "not_allowed"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(GatewayError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(GatewayError):
    """The client sends too slowly. What is still to come would pass for the next request, so the connection ends."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"connection": "close"})


class TooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimited(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class OutOfBudget(GatewayError):
    status = 429
    type = "insufficient_quota"
    code = "budget_exhausted"


class Unavailable(GatewayError):
    """No backend could answer, or the gateway itself cannot take the request now."""

    status = 503
    type = "server_error"
    code = "backend_unavailable"


def body(error: GatewayError, request_id: str) -> bytes:
    """The OpenAI error object as JSON bytes."""
    return _encoder.encode({"error": fields(error, request_id)})


def fields(error: GatewayError, request_id: str) -> dict[str, Any]:
    return {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
        "request_id": request_id,
    }


def event(error: GatewayError, request_id: str) -> bytes:
    """The error as an SSE event, for a stream that has begun and cannot be completed."""
    return b"data: " + body(error, request_id) + b"\n\n"
