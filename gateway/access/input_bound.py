"""How many tokens a prompt has at most, before a server has counted them: what a hold sets aside for the input.

A byte-level tokenizer makes no more tokens of a text than the text has bytes. Of small letters and of spaces it makes
far fewer; of nothing else can one be sure. So:

    text      0.45 for each a-z, 0.25 for each space, 1 for every other byte of its UTF-8; a space beside a number is
              a token of its own: 0.75 more for as many spaces as there are digits
    message   its text, its name and tool calls as JSON, and 8 for the template around it
    image     2,048; sound and files: 1 for each 256 bytes of their encoding
    tools     their JSON, and 400 for the instructions that templates add; a JSON schema: its JSON
    request   80 for the beginning of the template, which may hold a system prompt of the model's own

How often that is enough, by tokenizer and kind of text, is in docs/finance.md. Linear in the bytes, at memory speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

PER_REQUEST: Final = 80
PER_MESSAGE: Final = 8
PER_IMAGE: Final = 2048
TOOLS: Final = 400
BYTES_PER_TOKEN_OF_DATA: Final = 256

_LETTER: Final = 0.45
_SPACE: Final = 0.25
_LETTERS: Final = bytes(range(ord("a"), ord("z") + 1))
_SLICE_BYTES: Final = 1 << 20
_IMAGES: Final = frozenset({"image_url", "input_image", "image"})
_DIGITS: Final = b"0123456789"
_PLAIN: Final = frozenset({"role", "content"})

_encode = msgspec.json.Encoder().encode


def input_bound(payload: Mapping[str, Any]) -> int:
    """Upper estimate of the input tokens of a chat request, already checked for types."""
    total = PER_REQUEST
    texts: list[str] = []
    objects: list[bytes] = []
    for message in payload["messages"]:
        total += PER_MESSAGE
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            for part in content:
                text = part.get("text")
                if isinstance(text, str):
                    texts.append(text)
                else:
                    total += _data(part)
        if not message.keys() <= _PLAIN:
            objects.append(_encode({name: value for name, value in message.items() if name not in _PLAIN}))
    if tools := payload.get("tools"):
        total += TOOLS
        objects.append(_encode(tools))
    response_format = payload.get("response_format")
    if isinstance(response_format, Mapping) and "json_schema" in response_format:
        objects.append(_encode(response_format["json_schema"]))
    text = "".join(texts).encode("utf-8", "surrogatepass")
    return total + text_bound(b"".join([*objects, text]) if objects else text)


def text_bound(text: bytes) -> int:
    """Upper estimate of the tokens of a text in UTF-8. In slices, so that other threads have their turn."""
    size, spaces = len(text), text.count(b" ")
    letters = digits = size  # less what is none
    for start in range(0, size, _SLICE_BYTES):
        part = text[start : start + _SLICE_BYTES] if size > _SLICE_BYTES else text
        letters -= len(part.translate(None, _LETTERS))
        digits -= len(part.translate(None, _DIGITS)) if spaces else 0
    return math.ceil(size - (1 - _LETTER) * letters - (1 - _SPACE) * max(0, spaces - digits))


def _data(part: Mapping[str, Any]) -> int:
    if part.get("type") in _IMAGES:
        return PER_IMAGE
    return len(_encode(part)) // BYTES_PER_TOKEN_OF_DATA + PER_MESSAGE
