"""How much structure a request body may have, checked right after decoding and before anything walks it.

The size of a body in bytes bounds its texts. It does not bound the work: what looks at each message, tool or key takes
microseconds for each, and a body of a few megabytes holds a million; what recurses fails where JSON nests deeper than
Python's stack. This check itself stops at the bounds, so it costs no more than they allow. Decoding comes before it and
makes an object of 64 bytes of every `{}`, so the elements of a large body are counted before that, in its bytes.
"""

from __future__ import annotations

import re
from typing import Any, Final

from backends.protocol import InvalidRequest, Json

MAX_DEPTH: Final = 64
MAX_FIELDS: Final = 256
# Elements of all arrays and objects together, token ids of a prompt not counted.
MAX_ELEMENTS: Final = 100_000
MAX_TEXTS: Final = 2048
MAX_TOKEN_IDS: Final = 1_048_576
# Elements of the fields that hold many, by name in any dialect.
MOST_ELEMENTS: Final = {
    "messages": 10_000,
    "tools": 1024,
    "functions": 1024,
    "logit_bias": 4096,
    "metadata": 256,
    "stop": 4,
    "stop_sequences": 1024,
    "stop_token_ids": 4096,
    "documents": 10_000,
    "system": 10_000,
}
# What is decoded at all; which field has how many is looked at then.
_MOST_DECODED: Final = MAX_TOKEN_IDS + 2 * MAX_ELEMENTS
# A text in JSON, or the rest of the body where it has no end. Never looks at a byte twice.
_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_MAX_PARTS: Final = 10_000
# A body of so many bytes, with so few marks, has no more elements and is nested no deeper; but in these fields.
_SMALL: Final = 64 * 1024
_FEW: Final = MAX_DEPTH
_LOW: Final = tuple(name for name, most in MOST_ELEMENTS.items() if most < _FEW)
_CONTAINERS: Final = (list, dict)


def check_elements(body: bytes) -> None:
    """Refuse a body, not decoded yet, that holds more elements than any may.

    Every element has a comma behind it or is its container's last; what looks alike within texts does not count.

    Raises:
        InvalidRequest: `array_too_long`.
    """
    if len(body) <= _MOST_DECODED:
        return
    marks = _marks(body)
    for number, text in enumerate(_TEXT.finditer(body)):
        # An element has two texts at most, its name and itself.
        if marks <= _MOST_DECODED or number > 2 * MAX_ELEMENTS:
            break
        marks -= _marks(text[0])
    if marks > _MOST_DECODED:
        raise _too_long(f"The body has more than {_MOST_DECODED} elements in its arrays and objects.", None)


def _marks(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def check_bounds(body: Json, *, tokens: str | None = None, raw: bytes | None = None) -> None:
    """Refuse a decoded body that nests too deeply or holds too many elements.

    `tokens` names the field, if there is one, that holds texts, token ids, or lists of token ids. Their types are the
    caller's to check, so here only their number counts. `raw` is what the body was decoded from: most are so small
    that hardly a bound can be exceeded, which their bytes tell in less time than a walk.

    Raises:
        InvalidRequest: `param` names the field, where it is one field's fault.
    """
    if raw is not None and len(raw) <= _SMALL and _marks(raw) <= _FEW:
        for name in _LOW:
            _check_field(body, name)
        return
    if len(body) > MAX_FIELDS:
        raise _too_long(f"The body has {len(body)} fields; at most {MAX_FIELDS} are taken.", None)
    for name in MOST_ELEMENTS:
        _check_field(body, name)
    messages = body.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and len(content) > _MAX_PARTS:
            where = f"messages[{i}].content"
            raise _too_long(f"'{where}' has {len(content)} parts; at most {_MAX_PARTS} are taken.", where)
    if tokens is not None:
        _check_tokens(body.get(tokens), tokens)
        body = {name: value for name, value in body.items() if name != tokens}
    _walk(body)


def _check_field(body: Json, name: str) -> None:
    value = body.get(name)
    if isinstance(value, _CONTAINERS) and len(value) > (most := MOST_ELEMENTS[name]):
        raise _too_long(f"'{name}' has {len(value)} elements; at most {most} are taken.", name)


def _check_tokens(value: object, name: str) -> None:
    if not isinstance(value, list) or not value:
        return
    most, what = (MAX_TOKEN_IDS, "token ids") if isinstance(value[0], int) else (MAX_TEXTS, "texts")
    if len(value) > most:
        raise _too_long(f"'{name}' holds {len(value)} {what}; at most {most} are taken.", name)


def _walk(body: Json) -> None:
    """Level by level, so that the depth is counted and nothing recurses."""
    level: list[Any] = [body]
    elements = 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            elements += len(container)
            if elements > MAX_ELEMENTS:
                text = f"The body has more than {MAX_ELEMENTS} elements in its arrays and objects."
                raise _too_long(text, None)
            items = container.values() if isinstance(container, dict) else container
            below += [item for item in items if isinstance(item, _CONTAINERS)]
        if not below:
            return
        level = below
    raise InvalidRequest(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")


def _too_long(message: str, param: str | None) -> InvalidRequest:
    return InvalidRequest(message, code="array_too_long", param=param)
