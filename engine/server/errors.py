"""What goes wrong, as the OpenAI dialect says it: one error object, one status, and what to do about it."""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from backends.protocol import InvalidRequest, wrong_type
from engine.text.answer import AdapterMissing, DeadlineMissed, EngineBusy, EngineDown, EngineError, PromptRejected
from engine.text.chat_template import ChatTemplateError


class ApiError(Exception):
    """An answer that is an error. `type`, `code` and `param` as in OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str,
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, object]:
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after_seconds is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_seconds))
        return headers


def unsupported(param: str, advice: str, *, what: str = "") -> ApiError:
    """A parameter that this engine does not implement, or not in the circumstances that `what` names."""
    text = f"'{param}' {what} is" if what else f"'{param}' is"
    return ApiError(400, f"{text} not supported by this engine. {advice}", code="unsupported_parameter", param=param)


def as_api_error(error: Exception, prompt_field: str = "prompt") -> ApiError:
    """The API's form of any error that the engine or the validation raises on purpose.

    `prompt_field` is the field of the request that holds the prompt.

    Raises:
        Exception: `error` itself, if it is none of those.
    """
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), code=error.code, param=error.param)
        case msgspec.ValidationError():
            return as_api_error(wrong_type(error))
        case ChatTemplateError():
            return ApiError(400, str(error), code="invalid_messages", param="messages")
        case PromptRejected():
            return ApiError(400, str(error), code="context_length_exceeded", param=prompt_field)
        case EngineBusy():
            message = f"{error} Try again in {math.ceil(error.retry_after_seconds)} s."
            return ApiError(
                429,
                message,
                type="rate_limit_error",
                code="queue_full",
                retry_after_seconds=error.retry_after_seconds,
            )
        case AdapterMissing():
            return ApiError(404, str(error), code="model_not_found", param="model")
        case EngineDown():
            return ApiError(503, str(error), type="server_error", code="engine_unavailable", retry_after_seconds=2)
        case DeadlineMissed():
            return ApiError(504, str(error), type="server_error", code="deadline_exceeded")
        case EngineError():
            return ApiError(500, str(error), type="server_error", code="generation_failed")
        case _:
            raise error


async def http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown path, wrong method) in the same form."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    text = f"{error.detail}: {request.method} {request.url.path}"
    api_error = ApiError(error.status_code, text, code=code)
    headers = dict(error.headers or {}) | api_error.headers()
    return Response(msgspec.json.encode(api_error.body()), error.status_code, headers)


async def unexpected(request: Request, error: Exception) -> Response:
    """A bug. Starlette logs it with its traceback; the client learns no internals."""
    api_error = ApiError(500, "The engine failed unexpectedly; its log says why.", type="server_error", code="internal")
    return Response(msgspec.json.encode(api_error.body()), 500, api_error.headers())
