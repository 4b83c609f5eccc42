"""`POST /v1/messages`, the Anthropic dialect: read a request into the common form, say errors in its words.

The client's own request is kept beside the translation (`Asked.native`): a backend that speaks the dialect gets it
unchanged. For the others everything is translated, or the request names what it needs: a block, a tool or a setting
that has no equal in the common form needs a model with the capability `anthropic`. Left out without a word are only
hints that change no answer (`cache_control`) and the signed thinking of earlier turns, which only its maker can read.
Answers are written in `anthropic_answer.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from backends.attempt import Native
from backends.protocol import Json
from gateway.dialects.anthropic_answer import MessagesWriter, error_object
from gateway.dialects.dialect import Asked, Writer
from gateway.dialects.errors import BadRequest, GatewayError
from gateway.dialects.reading import convert, decode

NAME = "anthropic"

# Fields of the request that say nothing to a model, or that are translated below. Any other needs an Anthropic backend.
_KNOWN = frozenset(
    (
        "model", "max_tokens", "messages", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences",
        "tools", "tool_choice", "thinking", "metadata", "output_config", "cache_control", "service_tier",
    )
)  # fmt: skip
# How many tokens of thinking each effort stands for, upper ends.
_EFFORTS = ((2048, "low"), (8192, "medium"))
# What each number may be.
RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("temperature", 0, 1),
    ("top_p", 0, 1),
    ("top_k", 0, 2**31 - 1),
)
# Words for an effort that the common form does not have.
_EFFORT_NAMES = {"max": "xhigh"}


class MessagesTurn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class MessagesRequest(msgspec.Struct):
    model: str
    messages: list[MessagesTurn]
    max_tokens: int | None = None
    system: str | list[Json] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    metadata: Json | None = None
    output_config: Json | None = None


class AnthropicMessages:
    """The dialect of the Anthropic SDKs. See `gateway.dialects.dialect.Dialect`."""

    route = "messages"
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'
    request_id_header = "request-id"

    def parse(self, body: bytes) -> Asked:
        native = decode(body)
        request = convert(native, MessagesRequest)
        if request.max_tokens is None:
            raise BadRequest("'max_tokens' is missing.", code="missing_required_parameter", param="max_tokens")
        _check(request)
        return translate(native, request)

    def parse_count(self, body: bytes) -> Asked:
        """The body of `/v1/messages/count_tokens`: a request without the fields that only concern its answer."""
        native = decode(body)
        request = convert(native, MessagesRequest)
        _check(request)
        return translate(native, request)

    def writer(self, asked: Asked, request_id: str) -> Writer:
        return MessagesWriter(asked.model, request_id)

    def error(self, error: GatewayError, request_id: str) -> bytes:
        return msgspec.json.encode(error_object(error, request_id))


def _check(request: MessagesRequest) -> None:
    if not request.messages:
        raise BadRequest("'messages' must hold at least one message.", code="empty_array", param="messages")
    for i, turn in enumerate(request.messages):
        if turn.content == []:
            where = f"messages[{i}].content"
            raise BadRequest(f"'{where}' must hold at least one block.", code="empty_array", param=where)
    for name, low, high in RANGES:
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            text = f"'{name}' must be between {low} and {high}, got {value}."
            raise BadRequest(text, code="invalid_value", param=name)
    if any(not stop for stop in request.stop_sequences or []):
        raise BadRequest(
            "'stop_sequences' must not hold an empty string.", code="invalid_value", param="stop_sequences"
        )


def translate(native: Json, request: MessagesRequest) -> Asked:
    """The common form of a checked request.

    Raises:
        BadRequest: a block or a tool that is malformed.
    """
    needs: dict[str, str] = {}
    for name in native:
        if name not in _KNOWN and native[name] is not None:
            needs.setdefault("anthropic", name)
    payload: Json = {"model": request.model, "messages": _messages(request, needs)}
    if request.max_tokens is not None:
        payload["max_tokens"] = request.max_tokens
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(request, name)) is not None:
            payload[name] = value
    if request.stop_sequences:
        payload["stop"] = request.stop_sequences
    if request.stream:
        payload["stream"] = True
    if isinstance(user := (request.metadata or {}).get("user_id"), str):
        payload["user"] = user
    if request.tools:
        payload["tools"] = [_tool(tool, f"tools[{i}]", needs) for i, tool in enumerate(request.tools)]
        needs["tools"] = "tools"
    if request.tool_choice is not None:
        _tool_choice(request.tool_choice, payload)
    _thinking(request, payload, needs)
    _output_format(request.output_config or {}, payload, needs)
    if request.messages[-1].role == "assistant":
        # The answer continues the text that the client began.
        needs["prefill"] = f"messages[{len(request.messages) - 1}]"
        payload |= {"continue_final_message": True, "add_generation_prompt": False}
    return Asked(
        operation="chat",
        model=request.model,
        payload=payload,
        messages=payload["messages"],
        stream=bool(request.stream),
        output_limit=None if request.max_tokens is None else ("max_tokens", request.max_tokens),
        needs=needs,
        native=Native(NAME, native),
    )


def _thinking(request: MessagesRequest, payload: Json, needs: dict[str, str]) -> None:
    effort = (request.output_config or {}).get("effort")
    if isinstance(effort, str):
        payload["reasoning_effort"] = _EFFORT_NAMES.get(effort, effort)
        needs["reasoning"] = "output_config.effort"
    thinking = request.thinking or {}
    kind = thinking.get("type")
    if kind == "enabled":
        budget = thinking.get("budget_tokens")
        if not isinstance(budget, int) or budget < 1:
            text = "'thinking.budget_tokens' must be a positive whole number."
            raise BadRequest(text, code="invalid_value", param="thinking.budget_tokens")
        payload.setdefault("reasoning_effort", next((name for most, name in _EFFORTS if budget <= most), "high"))
        needs["reasoning"] = "thinking"
    elif kind not in (None, "disabled", "adaptive"):
        needs.setdefault("anthropic", "thinking.type")


def _output_format(config: Json, payload: Json, needs: dict[str, str]) -> None:
    form = config.get("format")
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        text = '\'output_config.format\' must be {"type": "json_schema", "schema": {...}}.'
        raise BadRequest(text, code="invalid_value", param="output_config.format")
    schema = {"name": "answer", "schema": form["schema"], "strict": True}
    payload["response_format"] = {"type": "json_schema", "json_schema": schema}
    needs["json_schema"] = "output_config.format"


def _tool(tool: Json, where: str, needs: dict[str, str]) -> Json:
    if tool.get("type") not in (None, "custom"):
        needs.setdefault("anthropic", f"{where}.type")  # a tool that Anthropic itself runs or defines
        return {"type": "function", "function": {"name": str(tool.get("name"))}}
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"'{where}.name' is missing.", code="missing_required_parameter", param=f"{where}.name")
    if not isinstance(schema, dict):
        text = f"'{where}.input_schema' must be a JSON Schema object."
        raise BadRequest(text, code="invalid_type", param=f"{where}.input_schema")
    function: Json = {"name": name, "parameters": schema}
    if tool.get("description"):
        function["description"] = tool["description"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(choice: Json, payload: Json) -> None:
    kind = choice.get("type")
    match kind:
        case "auto" | "none":
            payload["tool_choice"] = kind
        case "any":
            payload["tool_choice"] = "required"
        case "tool" if isinstance(choice.get("name"), str):
            payload["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        case _:
            text = "'tool_choice' must have the type auto, any, none, or tool with a name."
            raise BadRequest(text, code="invalid_value", param="tool_choice")
    if "tools" not in payload:
        raise BadRequest(
            "'tool_choice' is only allowed when 'tools' are given.", code="invalid_value", param="tool_choice"
        )
    if choice.get("disable_parallel_tool_use"):
        payload["parallel_tool_calls"] = False


def _messages(request: MessagesRequest, needs: dict[str, str]) -> list[Json]:
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": _text_only(request.system, "system")})
    for i, message in enumerate(request.messages):
        where = f"messages[{i}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where, needs))
        elif message.role == "system":
            messages.append({"role": "system", "content": _text_only(message.content, where)})
        else:
            messages += _user(message.content, where, needs)
    return messages


def _text_only(content: str | list[Json], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.get("type") != "text":
            raise BadRequest(f"'{where}[{i}]' must be a text block.", code="invalid_value", param=f"{where}[{i}].type")
    return "\n\n".join(_string(block, "text", f"{where}[{i}]") for i, block in enumerate(content))


def _assistant(blocks: list[Json], where: str, needs: dict[str, str]) -> Json:
    texts: list[str] = []
    calls: list[Json] = []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", here))
            case "tool_use":
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                function = {"name": _string(block, "name", here), "arguments": arguments}
                calls.append({"id": _string(block, "id", here), "type": "function", "function": function})
            case "thinking" | "redacted_thinking":
                pass  # see the head of this file
            case kind:
                _foreign(kind, here, needs)
    message: Json = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: list[Json], where: str, needs: dict[str, str]) -> list[Json]:
    """Results of tools become messages of their own, before what the user says: as chat completions ask for."""
    results: list[Json] = []
    parts: list[Json] = []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            if not isinstance(content, str):
                if not isinstance(content, list):
                    raise BadRequest(f"'{here}.content' must be a string or a list of blocks.", param=f"{here}.content")
                inner = [_part(part, f"{here}.content[{j}]", needs) for j, part in enumerate(content)]
                plain = all(part["type"] == "text" for part in inner)
                content = "\n".join(part["text"] for part in inner) if plain else inner
            if block.get("is_error") and isinstance(content, str):
                content = f"Error: {content}"
            results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", here), "content": content})
        else:
            parts.append(_part(block, here, needs))
    if len(parts) == 1 and parts[0]["type"] == "text":
        return [*results, {"role": "user", "content": parts[0]["text"]}]
    return [*results, {"role": "user", "content": parts}] if parts else results


def _part(block: Any, where: str, needs: dict[str, str]) -> Json:
    if not isinstance(block, dict):
        raise BadRequest(f"'{where}' must be an object.", code="invalid_type", param=where)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    match block.get("type"):
        case "text":
            return {"type": "text", "text": _string(block, "text", where)}
        case "image" if kind == "base64":
            url = f"data:{_string(source, 'media_type', where)};base64,{_string(source, 'data', where)}"
            needs.setdefault("vision", where)
            return {"type": "image_url", "image_url": {"url": url}}
        case "image" if kind == "url":
            needs.setdefault("vision", where)
            return {"type": "image_url", "image_url": {"url": _string(source, "url", where)}}
        case "document" if kind == "text":
            title = f"{block['title']}\n\n" if block.get("title") else ""
            return {"type": "text", "text": title + _string(source, "data", where)}
        case "search_result" if isinstance(block.get("content"), list):
            texts = [_string(part, "text", where) for part in block["content"]]
            return {"type": "text", "text": "\n".join((f"{block.get('title')} ({block.get('source')})", *texts))}
        case other:
            _foreign(other, where, needs)
            return {"type": "text", "text": ""}


def _foreign(kind: object, where: str, needs: dict[str, str]) -> None:
    """A block that only Anthropic's own models understand."""
    if not isinstance(kind, str):
        raise BadRequest(f"'{where}.type' must be a string.", code="invalid_type", param=f"{where}.type")
    needs.setdefault("anthropic", f"{where}.type")


def _string(block: Any, name: str, where: str) -> str:
    value = block.get(name) if isinstance(block, dict) else None
    if not isinstance(value, str):
        raise BadRequest(f"'{where}.{name}' must be a string.", code="invalid_type", param=f"{where}.{name}")
    return value


MESSAGES = AnthropicMessages()
