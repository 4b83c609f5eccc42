"""One tool call written as a JSON object, read character by character: `{"name": …, "arguments": {…}}`."""

from __future__ import annotations

import ast
import json
from enum import Enum, auto

_NAME_KEYS = frozenset(("name",))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
# What models write beside those two.
_OTHER_KEYS = frozenset(("id", "type", "index", "call_id", "tool_call_id"))


class NotACall(ValueError):
    """The text is something else."""


def value_as_json(text: str) -> str:
    """A value as JSON that was written as JSON, which stands as it is, or in Python.

    Raises:
        NotACall: JSON has no word for it.
    """
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii="\\" in text, allow_nan=False)  # an escape may be half a character
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise NotACall(f"{text[:40]!r} is no value that JSON has") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON's")


class JsonValue:
    """Finds the end of one JSON value. `take` returns True with its last character; scalars need the one after it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._kind = ""  # of the value: an opening bracket, a quote, or "0" for a scalar

    @property
    def is_text(self) -> bool:
        return self._kind == '"'

    def ends_before(self, character: str) -> bool:
        """Whether the value is a scalar that this character does not belong to."""
        return self._kind == "0" and character in ",}] \n\r\t"

    def take(self, character: str) -> bool:
        """True if the value, no scalar, is complete with this character."""
        if not self._kind:
            self._kind = character if character in '{["' else "0"
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._kind != "0" and not self._in_string and self._depth == 0


class _At(Enum):
    START = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    AFTER_VALUE = auto()


class JsonCall:
    """State of one object. Arguments come as soon as the name is known, whatever the order of the two.

    Arguments that are written as a JSON text (`"{\\"a\\": 1}"`) are given as what that text says.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self._at = _At.START
        self._key = ""
        self._value = JsonValue()
        self._text = ""  # of a value that is not passed on as it comes
        self._waiting = ""  # arguments that came before the name
        self._has_arguments = False

    def take(self, character: str) -> str:
        """The arguments that this character brings; only once there is a name.

        Raises:
            NotACall: this is no call, or none whose name came.
        """
        match self._at:
            case _At.START:
                self._expect(character, "{", _At.KEY)
            case _At.KEY | _At.AFTER_VALUE:
                return self._between(character)
            case _At.IN_KEY:
                self._key += character
                if self._value.take(character):
                    self._key = _decoded(self._key)
                    if self._key not in _NAME_KEYS | _ARGUMENT_KEYS | _OTHER_KEYS:
                        raise NotACall(f"a call has no {self._key[:40]!r}")
                    self._at = _At.COLON
            case _At.COLON:
                self._expect(character, ":", _At.VALUE)
            case _At.VALUE:
                if not character.isspace():
                    self._value, self._text, self._at = JsonValue(), "", _At.IN_VALUE
                    return self._in_value(character)
            case _At.IN_VALUE:
                return self._in_value(character)
        return ""

    def _expect(self, character: str, wanted: str, then: _At) -> None:
        if character == wanted:
            self._at = then
        elif not character.isspace():
            raise NotACall(f"{character!r} in place of {wanted!r}")

    def _between(self, character: str) -> str:
        if character == '"' and self._at is _At.KEY:
            self._value, self._key, self._at = JsonValue(), '"', _At.IN_KEY
            self._value.take(character)
        elif character == "," and self._at is _At.AFTER_VALUE:
            self._at = _At.KEY
        elif character == "}":
            if self.name is None:
                raise NotACall("it has no name")
            self.is_done = True
            return "" if self._has_arguments else "{}"
        elif not character.isspace():
            raise NotACall(f"{character!r} between its members")
        return ""

    def _in_value(self, character: str) -> str:
        if self._value.ends_before(character):
            return self._end_value() + self._between(character)
        complete = self._value.take(character)
        passes_on = self._key in _ARGUMENT_KEYS and not self._value.is_text
        if passes_on:
            self._has_arguments = True
            if self.name is None:
                self._waiting += character
                passed = ""
            else:
                passed = character
            return passed + (self._end_value() if complete else "")
        self._text += character
        return self._end_value() if complete else ""

    def _end_value(self) -> str:
        self._at = _At.AFTER_VALUE
        if self._key in _NAME_KEYS:
            name = _decoded(self._text)
            if not name:
                raise NotACall("its name is empty")
            self.name = name
            waiting, self._waiting = self._waiting, ""
            return waiting
        if self._key in _ARGUMENT_KEYS and self._value.is_text:
            self._has_arguments = True
            text = _decoded(self._text)
            if self.name is not None:
                return text
            self._waiting += text
        return ""


def _decoded(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except ValueError as error:
        raise NotACall(f"{text[:40]} is no JSON string") from error
    if not isinstance(value, str):
        raise NotACall(f"{text[:40]} is no string")
    return value
