"""A conversation in the form of chat completions, as Anthropic's Messages API takes it: system text and turns.

It promises that no text, image, document, tool call or tool result is lost on the way: what that API has no word for
raises CannotTranslate with the place in the request. Messages of one side that follow each other become one turn, so
that the results of parallel tool calls stand together, as the API demands. Left out, because the server refuses or
ignores them: text of nothing but white space, and the reasoning of earlier turns (it takes only its own, signed).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from backends.dialect import CannotTranslate
from backends.protocol import Json

Block = dict[str, Any]

_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_TOOL_ID = re.compile(r"[a-zA-Z0-9_-]+")
_arguments = msgspec.json.Decoder(dict[str, msgspec.Raw])

# The fields of a message that are read or mean nothing to another server, by role; `cache_control` is Anthropic's own,
# and what the OpenAI SDK's helpers have `parsed` is said in the text as well.
_COMMON = ("role", "content", "cache_control")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "system": _COMMON,
    "developer": _COMMON,
    "user": _COMMON,
    "assistant": (*_COMMON, "refusal", "tool_calls", "annotations", "parsed", "reasoning_content", "reasoning"),
    "tool": (*_COMMON, "tool_call_id", "name"),
}
_PARTS: Mapping[str, tuple[str, ...]] = {
    "system": ("text",),
    "developer": ("text",),
    "user": ("text", "image_url", "file"),
    "assistant": ("text", "refusal"),
    "tool": ("text", "image_url", "file"),
}


def conversation(messages: list[Json]) -> tuple[str | list[Block], list[Json]]:
    """Split a conversation into its system text (empty if there is none) and alternating turns.

    System and developer messages go to the system text wherever they stand, separated by blank lines; they are blocks
    instead of one string if one of them has a mark for the prompt cache.

    Raises:
        CannotTranslate: with the message, or the part of it, that the API cannot take.
    """
    system: list[Block] = []
    turns: list[Json] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = str(message.get("role"))
        if role not in _FIELDS:
            raise CannotTranslate(f"Anthropic servers take no message of the role '{role}'.", param=f"{where}.role")
        only(message, _FIELDS[role], where)
        blocks = _MESSAGES[role](message, where)
        if not blocks:
            continue
        if message.get("cache_control"):
            blocks[-1]["cache_control"] = message["cache_control"]
        side = "assistant" if role == "assistant" else "user"
        if role in ("system", "developer"):
            system += blocks
        elif turns and turns[-1]["role"] == side:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": side, "content": blocks})
    if not turns:
        raise CannotTranslate("Anthropic servers need a message with text of a user.", param="messages")
    if any("cache_control" in block for block in system):
        return system, turns
    return "\n\n".join(block["text"] for block in system), turns


def only(fields: Json, known: Collection[str], where: str) -> None:
    """Refuse every field that is not `known` and says something. `where` may be empty for the request itself."""
    for name, value in fields.items():
        if name in known or value is None or value is False or (isinstance(value, (str, list, dict)) and not value):
            continue
        param = f"{where}.{name}" if where else name
        raise CannotTranslate(f"Anthropic servers have no word for '{param}': leave it out.", param=param)


def tool_id(given: str) -> str:
    """The id of a tool call as the API allows it: one of another server that it does not allow becomes its hash."""
    if _TOOL_ID.fullmatch(given):
        return given
    return "id_" + hashlib.blake2b(given.encode(), digest_size=16).hexdigest()


def _content(message: Json, where: str) -> list[Block]:
    """The blocks of a message's content."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return _text({"text": content or ""}, where)
    if not isinstance(content, list):
        raise CannotTranslate(f"'{where}.content' is neither text nor a list of parts.", param=f"{where}.content")
    blocks: list[Block] = []
    for number, part in enumerate(content):
        here = f"{where}.content[{number}]"
        kind = part.get("type")
        if kind not in _PARTS[message["role"]]:
            text = f"Anthropic servers take no part of the type '{kind}' in a message of the role '{message['role']}'."
            raise CannotTranslate(text, param=here)
        only(part, ("type", kind, "cache_control"), here)
        made = _MAKE[kind](part, here)
        if made and part.get("cache_control"):
            made[0]["cache_control"] = part["cache_control"]
        blocks += made
    return blocks


def _text(part: Json, where: str) -> list[Block]:
    text = part.get("text")
    if not isinstance(text, str):
        raise CannotTranslate(f"'{where}.text' is not text.", param=f"{where}.text")
    return [{"type": "text", "text": text}] if text.strip() else []


def _refusal(part: Json, where: str) -> list[Block]:
    return _text({"text": part.get("refusal")}, where)


def _image(part: Json, where: str) -> list[Block]:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(image, dict) or not isinstance(url, str):
        raise CannotTranslate(f"'{where}.image_url.url' is not a URL.", param=where)
    only(image, ("url", "detail"), f"{where}.image_url")
    if image.get("detail") not in (None, "auto", "high"):
        text = f"Anthropic servers read images in full: leave out '{where}.image_url.detail'."
        raise CannotTranslate(text, param=f"{where}.image_url.detail")
    if url.startswith("https://"):
        return [{"type": "image", "source": {"type": "url", "url": url}}]
    media_type, data = _data_url(url, where)
    media_type = "image/jpeg" if media_type == "image/jpg" else media_type
    if media_type not in _IMAGE_TYPES:
        raise CannotTranslate(f"Anthropic servers take JPEG, PNG, GIF and WebP, not '{media_type}'.", param=where)
    return [{"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}]


def _file(part: Json, where: str) -> list[Block]:
    file = part.get("file")
    data_url = file.get("file_data") if isinstance(file, dict) else None
    if not isinstance(file, dict) or not isinstance(data_url, str):
        text = f"Anthropic servers know no file of another server: send its data as '{where}.file.file_data'."
        raise CannotTranslate(text, param=where)
    only(file, ("file_data", "filename"), f"{where}.file")
    media_type, data = _data_url(data_url, where)
    source: Json = {"type": "base64", "media_type": media_type, "data": data}
    if media_type == "text/plain":
        try:
            source = {"type": "text", "media_type": media_type, "data": base64.b64decode(data, validate=True).decode()}
        except (binascii.Error, UnicodeDecodeError) as error:
            raise CannotTranslate(f"'{where}.file.file_data' is not text in base64.", param=where) from error
    elif media_type != "application/pdf":
        raise CannotTranslate(f"Anthropic servers take PDF and plain text, not '{media_type}'.", param=where)
    title = {"title": file["filename"]} if file.get("filename") else {}
    return [{"type": "document", "source": source, **title}]


def _data_url(url: str, where: str) -> tuple[str, str]:
    """Media type and base64 data of a data URL (RFC 2397)."""
    head, comma, data = url.partition(",")
    media_type, *parameters = head.removeprefix("data:").split(";")
    if not comma or not head.startswith("data:") or "base64" not in parameters:
        raise CannotTranslate(f"'{where}' needs an https URL or a data URL in base64.", param=where)
    return media_type.lower(), data


def _said(message: Json, where: str) -> list[Block]:
    """What the assistant said and which tools it called."""
    blocks = _content(message, where)
    if message.get("refusal"):
        blocks += _refusal(message, where)
    for number, call in enumerate(message.get("tool_calls") or []):
        blocks.append(_tool_use(call, f"{where}.tool_calls[{number}]"))
    return blocks


def _tool_use(call: Json, where: str) -> Block:
    function = call.get("function")
    if (call.get("type") or "function") != "function" or not isinstance(function, dict):
        raise CannotTranslate(f"Anthropic servers know calls of functions only, unlike '{where}'.", param=where)
    only(call, ("id", "type", "function", "index"), where)
    only(function, ("name", "arguments", "parsed_arguments"), f"{where}.function")
    if not isinstance(call.get("id"), str):
        raise CannotTranslate(
            f"'{where}.id' is missing: it says which result belongs to the call.", param=f"{where}.id"
        )
    arguments = function.get("arguments") or "{}"
    try:
        _arguments.decode(arguments)
    except (msgspec.MsgspecError, RecursionError) as error:
        param = f"{where}.function.arguments"
        raise CannotTranslate(
            f"'{param}' must be a JSON object: Anthropic servers take no other.", param=param
        ) from error
    # The client's own JSON, so that no number or key changes.
    return {
        "type": "tool_use",
        "id": tool_id(call["id"]),
        "name": function.get("name"),
        "input": msgspec.Raw(arguments.encode()),
    }


def _result(message: Json, where: str) -> list[Block]:
    """What a tool gave back."""
    block: Block = {"type": "tool_result", "tool_use_id": tool_id(str(message.get("tool_call_id")))}
    if content := _content(message, where):
        block["content"] = content
    return [block]


_MAKE: Mapping[str, Callable[[Json, str], list[Block]]] = {
    "text": _text,
    "refusal": _refusal,
    "image_url": _image,
    "file": _file,
}
_MESSAGES: Mapping[str, Callable[[Json, str], list[Block]]] = {
    "system": _content,
    "developer": _content,
    "user": _content,
    "assistant": _said,
    "tool": _result,
}
