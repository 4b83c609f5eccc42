"""`POST /v1/responses`, the Responses dialect of the OpenAI SDKs: read a request into the common form.

Every documented parameter is honoured or refused with its name; one that nobody knows is refused as well, so that none
is dropped. What a request says about the gateway's memory (`store`, `previous_response_id`) is in its `ResponsesTurn`,
which the pipeline completes with the earlier turns before anything is decided. Items of a conversation are read in
`responses_input.py`, answers written in `responses_answer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from backends.protocol import MAX_SALT_CHARACTERS, InvalidRequest, Json
from backends.validation import check_ranges
from gateway.dialects import errors
from gateway.dialects.dialect import Asked, Keep, Writer
from gateway.dialects.errors import BadRequest, GatewayError
from gateway.dialects.reading import bad_request, convert, decode
from gateway.dialects.responses_answer import ResponsesWriter, described
from gateway.dialects.responses_input import image_in, messages, only, read, string, unsupported

_NO_TOOLS = "Tierline runs no tools of its own"
# Documented parameters that ask for what is not there, each with what to do. False asks for nothing.
REFUSED: Final[Mapping[str, str]] = {
    "access_programs": "Tierline has no access programs; leave 'access_programs' out.",
    "background": "Tierline answers while the client waits; leave 'background' out, or stream.",
    "background_options": "Tierline answers while the client waits; leave 'background_options' out.",
    "context_management": "Tierline compacts no conversation; leave 'context_management' out.",
    "conversation": "Tierline has no conversation objects; send 'previous_response_id' instead.",
    "image": "Images are given to the model as they are; leave 'image' out.",
    "max_tool_calls": f"{_NO_TOOLS}, and calls of functions are not counted; leave 'max_tool_calls' out.",
    "moderation": "Tierline moderates nothing; leave 'moderation' out.",
    "prompt": "Tierline keeps no prompt templates; send 'instructions' and 'input'.",
    "prompt_cache_options": "Servers cache prompts by themselves; leave 'prompt_cache_options' out.",
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LOGPROBS = "message.output_text.logprobs"
# What `include` may name: the second is there without asking.
INCLUDABLE = (_LOGPROBS, "message.input_image.image_url")
# Passed on as they are: the common form has the same words.
_SAME = (
    "temperature", "top_p", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier",
    "cache_salt",
)  # fmt: skip
# Fields of the common form that this dialect names differently.
_CHAT_FIELDS: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
_TOOL_FIELDS: Final[Mapping[str, tuple[type, str]]] = {
    "description": (str, "a string"),
    "parameters": (dict, "a JSON Schema object"),
    "strict": (bool, "true or false"),
}
MAX_PAIRS, MAX_NAME, MAX_VALUE = 16, 64, 512


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: Json | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Every documented parameter that can be honoured, and the engines' `cache_salt`."""

    model: str
    input: str | list[Any]
    cache_salt: str | None = None
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: float | None = None
    text: TextOptions | None = None
    tool_choice: str | Json | None = None
    tools: list[Json] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: str | None = None
    user: str | None = None


class ResponsesTurn:
    """A request's place in a conversation that the gateway remembers. See `gateway.dialects.dialect.Memory`."""

    def __init__(self, request: ResponsesRequest, payload: Json, needs: dict[str, str]) -> None:
        self.request = request
        self.previous = request.previous_response_id
        self.store = request.store
        self.items: Sequence[Json] = read(request.input)
        self.keep: Keep | None = None
        self._payload = payload
        self._needs = needs
        payload["messages"] = self._messages(self.items)
        if (place := image_in(self.items)) is not None:
            needs["vision"] = f"input{place}"

    def go_on(self, earlier: Sequence[Json]) -> None:
        """Put the items of the earlier turns before those of this one. Their instructions are not among them."""
        self._payload["messages"][:] = self._messages([*earlier, *self.items])
        if image_in(earlier) is not None:
            self._needs.setdefault("vision", "previous_response_id")

    def changed(self) -> None:
        if self.request.instructions:
            self.request.instructions = self._payload["messages"][0]["content"]

    def _messages(self, items: Sequence[Json]) -> list[Json]:
        instructions = self.request.instructions
        return [*([{"role": "system", "content": instructions}] if instructions else []), *messages(items)]


class OpenAIResponses:
    """The Responses API of the OpenAI SDKs. See `gateway.dialects.dialect.Dialect`."""

    route = "responses"
    keep_alive = b": keep-alive\n\n"
    request_id_header = "x-request-id"

    def parse(self, body: bytes) -> Asked:
        given = decode(body)
        for name, advice in REFUSED.items():
            value = given.pop(name, None)
            if value is not None and value is not False:
                raise unsupported(advice, name)
        request = convert(given, ResponsesRequest)
        try:
            check_ranges(request)
        except InvalidRequest as error:
            raise bad_request(error) from None
        _check(request)
        return _translate(request)

    def writer(self, asked: Asked, request_id: str) -> Writer:
        assert isinstance(asked.memory, ResponsesTurn)
        turn = asked.memory
        summary = turn.request.reasoning is not None and turn.request.reasoning.summary is not None
        return ResponsesWriter(described(turn.request, request_id), turn, request_id, summary=summary)

    def error(self, error: GatewayError, request_id: str) -> bytes:
        # Backends name fields of the chat that they got.
        named = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
        error.param = _CHAT_FIELDS.get(named, error.param)
        return errors.body(error, request_id)


RESPONSES = OpenAIResponses()


def _translate(request: ResponsesRequest) -> Asked:
    needs: dict[str, str] = {}
    payload: Json = {"model": request.model}
    turn = ResponsesTurn(request, payload, needs)
    for name in _SAME:
        if (value := getattr(request, name)) is not None:
            payload[name] = value
    if request.stream:
        payload["stream"] = True
    if request.max_output_tokens is not None:
        payload["max_tokens"] = request.max_output_tokens
    if request.tools:
        payload["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
        needs["tools"] = "tools"
        if request.parallel_tool_calls is not None:
            payload["parallel_tool_calls"] = request.parallel_tool_calls
    _tool_choice(request.tool_choice, payload)
    _text(request.text or TextOptions(), payload, needs)
    _reasoning(request.reasoning or ReasoningOptions(), payload, needs)
    for i, name in enumerate(request.include or ()):
        if name == _LOGPROBS:
            payload |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
            needs["logprobs"] = f"include[{i}]"
    limit = request.max_output_tokens
    return Asked(
        operation="chat",
        model=request.model,
        payload=payload,
        messages=payload["messages"],
        stream=bool(request.stream),
        output_limit=None if limit is None else ("max_output_tokens", limit),
        needs=needs,
        input_field="input",
        memory=turn,
        metadata=request.metadata or {},
    )


def _check(request: ResponsesRequest) -> None:
    """What only one field says about itself."""
    if request.max_output_tokens is not None and not 1 <= request.max_output_tokens < 2**31:
        raise _invalid(f"must be between 1 and {2**31 - 1}, got {request.max_output_tokens}", "max_output_tokens")
    if request.truncation not in (None, "disabled"):
        raise unsupported("Tierline drops nothing of a conversation; leave 'truncation' out.", "truncation")
    if request.stream_options is not None:
        if not request.stream:
            raise _invalid("is only allowed with 'stream': true", "stream_options")
        if request.stream_options.include_obfuscation:
            name = "stream_options.include_obfuscation"
            raise unsupported(f"Events are not obfuscated; leave '{name}' out, or false.", name)
    for i, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            text = f"'include[{i}]': only {' and '.join(INCLUDABLE)} can be given, not '{name[:80]}'."
            raise unsupported(text, f"include[{i}]")
    if request.top_logprobs and _LOGPROBS not in (request.include or ()):
        raise _invalid(f"needs '{_LOGPROBS}' in 'include'", "top_logprobs")
    metadata = request.metadata or {}
    if len(metadata) > MAX_PAIRS:
        raise _invalid(f"takes at most {MAX_PAIRS} pairs", "metadata")
    if any(len(name) > MAX_NAME or len(value) > MAX_VALUE for name, value in metadata.items()):
        raise _invalid(f"takes names of {MAX_NAME} and values of {MAX_VALUE} characters at most", "metadata")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_CHARACTERS:
        raise _invalid(
            f"must have 1 to {MAX_SALT_CHARACTERS} characters; leave it out to share the cache", "cache_salt"
        )


def _invalid(what: str, param: str) -> BadRequest:
    return BadRequest(f"'{param}' {what}.", code="invalid_value", param=param)


def _tool(tool: Json, where: str) -> Json:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:80]
        raise unsupported(f"{_NO_TOOLS}: '{where}' must be of the type 'function', not '{kind}'.", f"{where}.type")
    only(tool, ("type", "name", *_TOOL_FIELDS), where)
    function: Json = {"name": string(tool, "name", where)}
    for name, (wanted, what) in _TOOL_FIELDS.items():
        value = tool.get(name)
        if value is None:
            continue
        if not isinstance(value, wanted):
            raise BadRequest(f"'{where}.{name}' must be {what}.", code="invalid_type", param=f"{where}.{name}")
        function[name] = value
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Json | None, payload: Json) -> None:
    """What a model may call. `allowed_tools` shows it these and no others, which comes to the same."""
    tools = payload.get("tools", [])
    fields = choice if isinstance(choice, dict) else {}
    match choice:
        case None | "auto" | "none":
            if choice is not None and tools:
                payload["tool_choice"] = choice
            return
        case "required":
            payload["tool_choice"] = "required"
        case {"type": "function"}:
            name = string(fields, "name", "tool_choice")
            _named(name, tools, "tool_choice.name")
            payload["tool_choice"] = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(allowed), "mode": "auto" | "required" as mode}:
            names: set[str] = set()
            for i, tool in enumerate(allowed):
                where = f"tool_choice.tools[{i}]"
                if not isinstance(tool, dict) or tool.get("type") != "function":
                    raise unsupported(f"{_NO_TOOLS}: '{where}' must name a function.", where)
                names.add(_named(string(tool, "name", where), tools, f"{where}.name"))
            payload["tools"] = [tool for tool in tools if tool["function"]["name"] in names]
            payload["tool_choice"] = mode
        case str():
            raise _invalid("must be none, auto, required, or an object", "tool_choice")
        case _:
            text = "'tool_choice' can name a function, or be of the type allowed_tools with a mode and functions."
            raise unsupported(text, "tool_choice")
    if not payload.get("tools"):
        raise _invalid("asks for a call, but there are no 'tools' to call", "tool_choice")


def _named(name: str, tools: Sequence[Json], param: str) -> str:
    if not any(tool["function"]["name"] == name for tool in tools):
        raise _invalid("names none of the functions in 'tools'", param)
    return name


def _text(options: TextOptions, payload: Json, needs: dict[str, str]) -> None:
    if options.verbosity is not None:
        payload["verbosity"] = options.verbosity
    form = options.format
    if form is None or form == {"type": "text"}:
        return
    where = "text.format"
    kind = form.get("type")
    if kind == "json_object":
        only(form, ("type",), where)
        payload["response_format"] = {"type": "json_object"}
    elif kind == "json_schema":
        only(form, ("type", "name", "schema", "strict", "description"), where)
        if not isinstance(form.get("schema"), dict):
            raise _invalid("must be a JSON Schema object", f"{where}.schema")
        schema = {name: form[name] for name in ("schema", "strict", "description") if form.get(name) is not None}
        payload["response_format"] = {"type": kind, "json_schema": {"name": string(form, "name", where), **schema}}
    else:
        raise _invalid("must be text, json_object or json_schema", f"{where}.type")
    needs["json_schema"] = where


def _reasoning(options: ReasoningOptions, payload: Json, needs: dict[str, str]) -> None:
    if options.effort is not None:
        if options.effort not in EFFORTS:
            raise _invalid(f"must be one of {', '.join(EFFORTS)}", "reasoning.effort")
        payload["reasoning_effort"] = options.effort
        needs["reasoning"] = "reasoning.effort"
    # Nobody shortens what a model thought: a summary is its reasoning in the words of the backend.
    if options.summary not in (None, "auto", "detailed"):
        raise unsupported("'reasoning.summary' can be auto or detailed.", "reasoning.summary")
    if options.generate_summary is not None:
        text = "'reasoning.generate_summary' is the deprecated name; send 'reasoning.summary' instead."
        raise unsupported(text, "reasoning.generate_summary")
    if options.context not in (None, "auto"):
        text = "The reasoning of earlier turns is not given to models; leave 'reasoning.context' out."
        raise unsupported(text, "reasoning.context")
    if options.mode not in (None, "standard"):
        raise unsupported("There is one mode of reasoning; leave 'reasoning.mode' out.", "reasoning.mode")
