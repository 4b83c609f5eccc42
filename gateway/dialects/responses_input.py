"""The items of a Responses conversation: read strictly, kept in one form, and put into messages of the common form.

`read` brings what a client sends into the form in which items are stored and listed (content is a list of parts,
every item has a type and a status); `messages` makes a conversation of such items, its own or recalled ones. What the
common form has no word for is refused with its place. Left out without a word is what changes no answer: labels that
an API put on earlier answers (`annotations`, `logprobs`, `phase`), and the reasoning of earlier turns, which servers
either cannot read or refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from backends.protocol import Json
from gateway.dialects.errors import BadRequest

MAX_ITEMS: Final = 10_000
ROLES: Final = ("user", "assistant", "system", "developer")
DETAILS: Final = ("auto", "low", "high", "original")
STATES: Final = ("in_progress", "completed", "incomplete")

# Fields of an item that are read, or that a client may send back as it got them.
_ITEM_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status", "parsed_arguments"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
    "reasoning": ("type", "id", "summary", "content", "encrypted_content", "status"),
}
_PART_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "input_text": ("type", "text"),
    "input_image": ("type", "image_url", "detail"),
    "output_text": ("type", "text", "annotations", "logprobs", "parsed"),
    "refusal": ("type", "refusal"),
}
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "user": ("input_text", "input_image"),
    "system": ("input_text",),
    "developer": ("input_text",),
    "assistant": ("output_text", "refusal", "input_text"),
    "tool": ("input_text", "input_image"),
}


def read(given: str | Sequence[Any]) -> list[Json]:
    """The items of `input` in their one form.

    Raises:
        BadRequest: names the item, or the field of it, that is wrong or has no equal here.
    """
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    if len(given) > MAX_ITEMS:
        text = f"'input' has {len(given)} items; at most {MAX_ITEMS} are taken."
        raise BadRequest(text, code="array_too_long", param="input")
    items = [_item(item, f"input[{i}]") for i, item in enumerate(given)]
    if all(item["type"] == "reasoning" for item in items):
        raise BadRequest("'input' must hold at least one message.", code="empty_array", param="input")
    return items


def messages(items: Sequence[Json]) -> list[Json]:
    """A conversation of items that `read` or an answer has made.

    Calls stand with the message before them, and what was said after them does too: in the common form, only results
    may follow calls.
    """
    found: list[Json] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                message = _said(item["content"])
                if found and found[-1].get("tool_calls"):
                    texts = [found[-1]["content"], message["content"]]
                    message |= {"content": "\n".join(filter(None, texts)) or None}
                    found[-1] |= message
                else:
                    found.append(message)
            case "message":
                found.append({"role": item["role"], "content": _content(item["content"], "")})
            case "function_call":
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item["output"]
                content = output if isinstance(output, str) else _content(output, "\n")
                found.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return found


def image_in(items: Sequence[Json]) -> str | None:
    """Where the first image stands, such as `[2].content[0]`."""
    for i, item in enumerate(items):
        for name in ("content", "output"):
            parts = item.get(name)
            for j, part in enumerate(parts if isinstance(parts, list) else ()):
                if part.get("type") == "input_image":
                    return f"[{i}].{name}[{j}]"
    return None


def only(fields: Json, known: Collection[str], where: str) -> None:
    """Refuse every field that is not `known` and says something."""
    for name, value in fields.items():
        if name not in known and value is not None and value is not False:
            raise unsupported(f"'{where}.{name}' is not supported; leave it out.", f"{where}.{name}")


def unsupported(message: str, param: str) -> BadRequest:
    return BadRequest(message, code="unsupported_parameter", param=param)


def string(fields: Json, name: str, where: str) -> str:
    """A field that must be there and be text."""
    value = fields.get(name)
    if isinstance(value, str):
        return value
    param = f"{where}.{name}"
    if value is None:
        raise BadRequest(f"'{param}' is missing.", code="missing_required_parameter", param=param)
    raise BadRequest(f"'{param}' must be a string.", code="invalid_type", param=param)


def _item(item: Any, where: str) -> Json:
    if not isinstance(item, dict):
        raise BadRequest(f"'{where}' must be an object.", code="invalid_type", param=where)
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if kind is None and "id" in item:
        kind = "item_reference"
    if not isinstance(kind, str):
        raise BadRequest(f"'{where}.type' must be a string.", code="invalid_type", param=f"{where}.type")
    reader = _READERS.get(kind)
    if reader is None:
        advice = "send the item itself, or 'previous_response_id'" if kind == "item_reference" else "leave it out"
        raise unsupported(f"Items of the type '{kind}' are not supported; {advice}.", f"{where}.type")
    only(item, _ITEM_FIELDS[kind], where)
    made = reader(item, where)
    status = item.get("status")
    if status is not None and status not in STATES:
        text = f"'{where}.status' must be one of {', '.join(STATES)}."
        raise BadRequest(text, code="invalid_value", param=f"{where}.status")
    made["status"] = status or "completed"
    if item.get("id") is not None:
        made["id"] = string(item, "id", where)
    return made


def _message(item: Json, where: str) -> Json:
    role = string(item, "role", where)
    if role not in ROLES:
        text = f"'{where}.role' must be one of {', '.join(ROLES)}."
        raise BadRequest(text, code="invalid_value", param=f"{where}.role")
    content = item.get("content")
    if isinstance(content, str):
        parts = [_output_text(content) if role == "assistant" else {"type": "input_text", "text": content}]
    else:
        parts = _parts(content, role, f"{where}.content")
    return {"type": "message", "role": role, "content": parts, "status": "completed"}


def _call(item: Json, where: str) -> Json:
    fields = {name: string(item, name, where) for name in ("call_id", "name", "arguments")}
    return {"type": "function_call", **fields}


def _call_output(item: Json, where: str) -> Json:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, "tool", f"{where}.output")
    return {"type": "function_call_output", "call_id": string(item, "call_id", where), "output": output}


def _reasoning(item: Json, where: str) -> Json:
    made: Json = {"type": "reasoning", "summary": _thoughts(item.get("summary"), "summary_text", f"{where}.summary")}
    if item.get("content") is not None:
        made["content"] = _thoughts(item["content"], "reasoning_text", f"{where}.content")
    if item.get("encrypted_content") is not None:
        made["encrypted_content"] = string(item, "encrypted_content", where)
    return made


def _thoughts(given: Any, kind: str, where: str) -> list[Json]:
    made: list[Json] = []
    for i, part in enumerate(_list(given if given is not None else [], where)):
        if not isinstance(part, dict) or part.get("type") != kind:
            raise BadRequest(f"'{where}[{i}]' must have the type {kind}.", code="invalid_value", param=f"{where}[{i}]")
        made.append({"type": kind, "text": string(part, "text", f"{where}[{i}]")})
    return made


_READERS: Final[Mapping[str, Callable[[Json, str], Json]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _list(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise BadRequest(f"'{where}' must be a list of parts.", code="invalid_type", param=where)
    return given


def _parts(given: Any, role: str, where: str) -> list[Json]:
    """Content parts in their one form. `role` is `tool` for the output of a function."""
    if given is None:
        raise BadRequest(f"'{where}' is missing.", code="missing_required_parameter", param=where)
    if not isinstance(given, list):
        raise BadRequest(f"'{where}' must be a string or a list of parts.", code="invalid_type", param=where)
    return [_part(part, role, f"{where}[{j}]") for j, part in enumerate(given)]


def _part(part: Any, role: str, where: str) -> Json:
    if not isinstance(part, dict):
        raise BadRequest(f"'{where}' must be an object.", code="invalid_type", param=where)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"'{where}.type' must be a string.", code="invalid_type", param=f"{where}.type")
    if kind not in _PARTS[role]:
        whose = "the output of a function" if role == "tool" else f"a message of the role '{role}'"
        raise unsupported(
            f"'{where}': {whose} takes parts of the type {', '.join(_PARTS[role])}, not '{kind}'.", f"{where}.type"
        )
    only(part, _PART_FIELDS[kind], where)
    if kind == "input_image":
        return _image(part, where)
    if kind == "refusal":
        return {"type": "refusal", "refusal": string(part, "refusal", where)}
    text = string(part, "text", where)
    return _output_text(text) if role == "assistant" else {"type": "input_text", "text": text}


def _image(part: Json, where: str) -> Json:
    detail = part.get("detail")
    detail = "auto" if detail is None else detail
    if detail not in DETAILS:
        text = f"'{where}.detail' must be one of {', '.join(DETAILS)}."
        raise BadRequest(text, code="invalid_value", param=f"{where}.detail")
    return {"type": "input_image", "image_url": string(part, "image_url", where), "detail": detail}


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": []}


def _said(parts: Sequence[Json]) -> Json:
    texts = [part["text"] for part in parts if part["type"] == "output_text"]
    refusals = [part["refusal"] for part in parts if part["type"] == "refusal"]
    message: Json = {"role": "assistant", "content": "".join(texts) if texts or not refusals else None}
    if refusals:
        message["refusal"] = "".join(refusals)
    return message


def _content(parts: Sequence[Json], separator: str) -> str | list[Json]:
    """One text where there is nothing else; several are joined by `separator`, or stay apart where it is empty."""
    texts = [part["text"] for part in parts if part["type"] == "input_text"]
    if len(texts) == len(parts) and (separator or len(texts) <= 1):
        return separator.join(texts)
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] == "input_text"
        else {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
        for part in parts
    ]
