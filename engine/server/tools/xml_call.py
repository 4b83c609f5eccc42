"""One tool call written with a tag per parameter, as Qwen3-Coder does, read character by character:

    <function=get_weather>
    <parameter=city>
    Rome
    </parameter>
    </function>

Texts are passed on as they come; whether a value is a text, the tool's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.server.tools.json_call import NotACall, value_as_json

_FUNCTION, _PARAMETER, _END = "<function=", "<parameter=", "</function>"
_VALUE_END = "\n</parameter>"
_LONGEST_NAME = 256


class XmlCall:
    """State of one call. `parameters`: the JSON schema of every tool."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self.name: str | None = None
        self.is_done = False
        self._parameters = parameters
        self._key: str | None = None  # of the parameter that is being read
        self._held = ""
        self._is_text = False
        self._has_begun = False  # the value: a line break before it is not a part of it
        self._has_arguments = False

    def take(self, character: str) -> str:
        """The arguments that this character brings; only once there is a name.

        Raises:
            NotACall: this is no call.
        """
        if self._key is not None:
            return self._in_value(character)
        if not self._held and character.isspace():
            return ""
        self._held += character
        opening = _FUNCTION if self.name is None else _PARAMETER
        if self._held.startswith(opening):
            if len(self._held) > len(opening) + _LONGEST_NAME:
                raise NotACall("its name has no end")
            if character != ">":
                return ""
            named, self._held = self._held[len(opening) : -1].strip(" \"'"), ""
            if not named:
                raise NotACall("a name is empty")
            return self._begin(named)
        if self.name is not None and self._held == _END:
            self.is_done = True
            return "}" if self._has_arguments else "{}"
        if not opening.startswith(self._held) and not (self.name is not None and _END.startswith(self._held)):
            raise NotACall(f"{self._held[:40]!r} is no tag of a call")
        return ""

    def _begin(self, named: str) -> str:
        if self.name is None:
            self.name = named
            return ""
        self._key, self._has_begun = named, False
        self._is_text = is_text(self._schema(named))
        before, self._has_arguments = ", " if self._has_arguments else "{", True
        return f"{before}{json.dumps(named, ensure_ascii=False)}: " + ('"' if self._is_text else "")

    def _schema(self, key: str) -> Any:
        properties = self._parameters.get(self.name or "", {}).get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None

    def _in_value(self, character: str) -> str:
        if not self._has_begun:
            self._has_begun = True
            if character == "\n":
                return ""
        self._held += character
        end = next((end for end in (_VALUE_END, _VALUE_END[1:]) if self._held.endswith(end)), None)
        if end is not None:
            value, self._held, self._key = self._held.removesuffix(end), "", None
            return _inner(value) + '"' if self._is_text else _json(value)
        if not self._is_text:
            return ""
        kept = max(length for length in range(len(_VALUE_END)) if length == 0 or self._may_end(length))
        said, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return _inner(said)

    def _may_end(self, length: int) -> bool:
        """Whether the last `length` characters may begin the end of the value."""
        if length > len(self._held):
            return False
        tail = self._held[-length:]
        return _VALUE_END.startswith(tail) or _VALUE_END[1:].startswith(tail)


def is_text(schema: Any) -> bool:
    """Whether a parameter of this schema is written as plain text: a string, or one of which nothing is known."""
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    if kind is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return all(isinstance(value, str) for value in values)
        return not any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref", "properties", "items"))
    return bool(kind == "string")


def _json(text: str) -> str:
    """A value that is no text, as JSON; a text where it is none after all."""
    try:
        return value_as_json(text)
    except NotACall:
        return json.dumps(text, ensure_ascii=False)


def _inner(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
