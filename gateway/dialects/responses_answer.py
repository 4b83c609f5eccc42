"""Answers in the Responses dialect: the `response` object, whole or as the last event of a stream.

The object says what was asked (the request's own values, null where it named none and the model's default counts) and
what came of it: output items, status, usage. It is handed to the gateway's memory before the client has its end, so
that whoever saw an answer can go on from its id; where that failed, its `store` says false.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.attempt import Answer, Event
from backends.protocol import Json, Usage
from gateway.dialects.dialect import Memory
from gateway.dialects.errors import GatewayError, fields
from gateway.dialects.responses_stream import StreamedOutput, call_item, message_item, reasoning_item, refusal, text

if TYPE_CHECKING:
    from gateway.dialects.openai_responses import ResponsesRequest

_encode = msgspec.json.Encoder().encode

# Why an answer is not complete, by its finish reason.
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ITEM_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class _Served(msgspec.Struct):
    """What the chat answer of some servers says beside what everybody reads."""

    service_tier: str | None = None


_served = msgspec.json.Decoder(_Served)


def response_id(request_id: str) -> str:
    """The id of the answer to a request; ordered by time, as the request's is."""
    return f"resp_{_hex(request_id)}"


def described(request: ResponsesRequest, request_id: str) -> Json:
    """The object as it is while nothing has been answered."""
    text_options, reasoning = request.text, request.reasoning
    return {
        "id": response_id(request_id),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": None,
        "store": False,
        "temperature": request.temperature,
        "text": {
            "format": (text_options and text_options.format) or {"type": "text"},
            "verbosity": text_options.verbosity if text_options else None,
        },
        "tool_choice": request.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def with_ids(items: Iterable[Json], response: str) -> list[Json]:
    """Items of an answer's input as they are listed: each has an id, the client's own or one made here."""
    base = response.removeprefix("resp_")
    return [{"id": f"{_ITEM_PREFIXES[item['type']]}_{base}i{i}", **item} for i, item in enumerate(items)]


class ResponsesWriter:
    """One answer. See `gateway.dialects.dialect.Writer`. `summary`: reasoning is given as its summary."""

    def __init__(self, response: Json, memory: Memory, request_id: str, *, summary: bool) -> None:
        self._response = response
        self._memory = memory
        self._request_id = request_id
        self._summary = summary
        self._hex = _hex(request_id)
        self._stream = StreamedOutput(self._hex, summary=summary)
        self._started = False
        self._finish: str | None = None
        self._usage: Usage | None = None
        response["store"] = memory.keep is not None

    async def whole(self, answer: Answer) -> bytes:
        completion = answer.completion
        output: list[Json] = []
        finish: str | None = None
        if completion.choices:
            choice = completion.choices[0]
            message, finish = choice.message, choice.finish_reason
            last = "incomplete" if finish in _INCOMPLETE else "completed"
            if thoughts := message.thoughts:
                output.append(reasoning_item(f"rs_{self._hex}_0", thoughts, self._summary))
            parts = [text(message.content, choice.logprobs)] if message.content else []
            parts += [refusal(message.refusal)] if message.refusal else []
            if parts:
                output.append(message_item(f"msg_{self._hex}_{len(output)}", parts))
            for number, call in enumerate(message.tool_calls or ()):
                output.append(call_item(f"fc_{self._hex}_{len(output)}", call, f"call_{self._hex}_{number}"))
            if output:
                output[-1]["status"] = last
        self._usage = completion.usage
        self._model(completion.model)
        self._service_tier(answer.body)
        return _encode(await self._ended(output, finish))

    def event(self, event: Event) -> Sequence[bytes]:
        chunk = event.chunk
        if chunk is None:
            return ()
        out: list[bytes] = []
        if not self._started:
            self._model(chunk.model)
            self._start(out)
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            self._stream.add(choice, out)
            if choice.finish_reason:
                self._finish = choice.finish_reason
                self._service_tier(event.data)
        return out

    async def end(self, summary: Json) -> Sequence[bytes]:
        out: list[bytes] = []
        if not self._started:
            self._start(out)
        incomplete = self._finish in _INCOMPLETE
        self._stream.close(out, "incomplete" if incomplete else "completed")
        response = await self._ended(self._stream.items, self._finish)
        kind = "response.incomplete" if incomplete else "response.completed"
        out.append(self._stream.say(kind, {"response": response, "tierline": summary}))
        return out

    def broken(self, error: GatewayError) -> bytes:
        """The answer as far as it came, as failed, and then an error: SDKs raise the latter."""
        out: list[bytes] = []
        if not self._started:
            self._start(out)
        self._stream.close(None, "incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"status": "failed", "error": {"code": code, "message": error.message}, "store": False}
        response = {**self._response, **failed, "output": self._stream.items}
        out.append(self._stream.say("response.failed", {"response": response}))
        said = {"code": error.code, "message": error.message, "param": error.param}
        out.append(self._stream.say("error", {**said, "error": fields(error, self._request_id)}))
        return b"".join(out)

    def _start(self, out: list[bytes]) -> None:
        self._started = True
        fields = {"response": self._response}
        out += self._stream.say("response.created", fields), self._stream.say("response.in_progress", fields)

    def _model(self, answered: str | None) -> None:
        if answered:
            self._response["model"] = answered

    def _service_tier(self, data: bytes) -> None:
        with suppress(msgspec.MsgspecError):  # of another type: then it stays unknown
            self._response["service_tier"] = _served.decode(data).service_tier

    async def _ended(self, output: list[Json], finish: str | None) -> Json:
        """The finished object, once it is kept if it is to be."""
        reason = _INCOMPLETE.get(finish or "")
        response = self._response
        response |= {
            "status": "incomplete" if reason else "completed",
            "completed_at": None if reason else int(time.time()),
            "incomplete_details": {"reason": reason} if reason else None,
            "output": output,
            "usage": _usage(self._usage),
        }
        if self._memory.keep is not None:
            response["store"] = await self._memory.keep(response)
        return response


def _hex(request_id: str) -> str:
    return request_id.removeprefix("req-").replace("-", "")


def _usage(usage: Usage | None) -> Json | None:
    """Null where the backend has not said: zeros would be a claim."""
    if usage is None or usage.prompt_tokens is None:
        return None
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    output = usage.completion_tokens or 0
    details: dict[str, Any] = {
        "cached_tokens": (prompt.cached_tokens if prompt else None) or 0,
        "cache_write_tokens": (prompt.cache_creation_tokens if prompt else None) or 0,
    }
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": (completion.reasoning_tokens if completion else None) or 0},
        "total_tokens": usage.prompt_tokens + output,
    }
