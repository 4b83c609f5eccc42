"""What a field of a request takes where it takes one of a few words: for the error of whoever sent another."""

from __future__ import annotations

import re
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

_PARTS = re.compile(r"[^.\[\]]+")


def choices(kind: Any, path: str) -> tuple[str, ...]:
    """The words that the field at `path`, such as `messages[0].role`, takes by its type; empty where any will do."""
    kinds = _plain(kind)
    for part in _PARTS.findall(path):
        kinds = [inner for one in kinds for inner in _inside(one, part)]
    return tuple(dict.fromkeys(str(word) for one in kinds if get_origin(one) is Literal for word in get_args(one)))


def _inside(kind: Any, part: str) -> list[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
        return _plain(get_type_hints(kind)[fields[part]]) if part in fields else []
    # An element of a list, or a value of a dict: its type stands last.
    arguments = get_args(kind)
    return _plain(arguments[-1]) if get_origin(kind) in (list, dict, tuple) and arguments else []


def _plain(kind: Any) -> list[Any]:
    """The types of a union, or the one type."""
    if get_origin(kind) in (Union, UnionType):
        return [plain for one in get_args(kind) for plain in _plain(one)]
    return [kind]
