"""One tool call written as Python calls a function, read character by character: `f(city="Rome", days=[1, 2])`.

Arguments come out as JSON: texts as they are written, other values when they are complete.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from engine.server.tools.json_call import NotACall, value_as_json

_LONGEST_NAME = 256
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "'\"\\"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonCall:
    """State of one call of a function of `names`, by keywords. It may stand in `print(…)` or behind a module's name."""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.is_done = False
        self._names = names
        self._known = ""  # the function, whose call is none yet
        self._states = {
            "name": self._in_name,
            "key": self._in_key,
            "value": self._in_value,
            "string": self._in_string,
            "behind": self._behind_value,
            "end": self._at_end,
        }
        self._state = "name"
        self._held = ""
        self._wrappers = 0  # `print(` around the call
        self._has_arguments = False
        self._text = _Text()
        self._quote = ""
        self._is_empty = True  # the text that is being read

    def take(self, character: str) -> str:
        """The arguments that this character brings; only once there is a name.

        Raises:
            NotACall: this is no call, or none that JSON has words for.
        """
        return self._states[self._state](character)

    def _in_name(self, character: str) -> str:
        if character != "(":
            self._held += character
            if not (character.isalnum() or character in "_.- \n") or len(self._held) > _LONGEST_NAME:
                raise NotACall(f"{self._held[:40]!r} is no function")
            return ""
        name, self._held = self._held.strip(), ""
        if name == "print" and name not in self._names:
            self._wrappers += 1
            return ""
        known = name if name in self._names else name.rpartition(".")[2]
        if known not in self._names:
            raise NotACall(f"there is no function {name!r}")
        self._known, self._state = known, "key"
        return ""

    def _in_key(self, character: str) -> str:
        key = self._held.strip()
        if character == ")" and not key:
            return self._close()
        if character == "," and not key and self._has_arguments:
            return ""
        if character != "=":
            self._held += character
            if not (character.isspace() or self._held.strip().isidentifier()) or len(self._held) > _LONGEST_NAME:
                raise NotACall(f"{self._held[:40]!r} is no keyword")
            return ""
        if not key.isidentifier():
            raise NotACall(f"{key[:40]!r} is no keyword")
        before, self._has_arguments = ", " if self._has_arguments else "{", True
        self.name, self._held, self._state, self._text = self._known, "", "value", _Text()
        return f"{before}{json.dumps(key, ensure_ascii=False)}: "

    def _in_value(self, character: str) -> str:
        if not self._held:
            if character.isspace():
                return ""
            if character in "'\"":
                self._quote, self._state, self._is_empty = character, "string", True
                return '"'
        if character in ",)" and self._text.is_balanced(self._held):
            value = value_as_json(self._held)
            self._state = "behind"
            return value + self._behind_value(character)
        self._held += character
        return ""

    def _in_string(self, character: str) -> str:
        self._held += character
        if self._held.startswith("\\"):
            decoded = _escape(self._held)
            if decoded is None:
                return ""
            self._held, self._is_empty = "", False
            return decoded
        if self._quote.startswith(self._held):
            if self._held == self._quote:
                self._held, self._state = "", "behind"
            return ""
        text, self._held, self._is_empty = self._held, "", False
        if text.endswith("\\"):  # quotes in a text of three quotes, and then an escape
            text, self._held = text[:-1], "\\"
        return _inner(text)

    def _behind_value(self, character: str) -> str:
        """Behind a value; a further text goes on with the one before it."""
        closes = '"' if self._quote else ""
        if character in "'\"" and self._quote:
            triple = self._is_empty and len(self._quote) == 1 and character == self._quote
            self._quote = 3 * character if triple else character
            self._is_empty, self._state = triple, "string"
            return ""
        if character.isspace():
            self._is_empty = False
            return ""
        self._quote = ""
        if character == ",":
            self._held, self._state = "", "key"
            return closes
        if character == ")":
            return closes + self._close()
        raise NotACall(f"{character!r} behind a value")

    def _close(self) -> str:
        self.name = self._known
        self._state, self.is_done = "end", self._wrappers == 0
        return "}" if self._has_arguments else "{}"

    def _at_end(self, character: str) -> str:
        if character == ")":
            self._wrappers -= 1
            self.is_done = self._wrappers == 0
        elif not character.isspace():
            raise NotACall(f"{character!r} behind the call")
        return ""


class _Text:
    """Whether what has come of a value is balanced: no bracket and no quote is open. Each character is read once."""

    def __init__(self) -> None:
        self._seen = 0
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def is_balanced(self, text: str) -> bool:
        for character in text[self._seen :]:
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = character == "\\"
                if character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            else:
                self._depth += (character in "([{") - (character in ")]}")
        self._seen = len(text)
        return self._depth <= 0 and not self._quote


def _is_sound(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _inner(text: str) -> str:
    """A piece of a text within quotes, as JSON writes it."""
    return json.dumps(text, ensure_ascii=not _is_sound(text))[1:-1]


def _escape(written: str) -> str | None:
    """What an escape stands for, as JSON writes it; None: it is not complete. One that Python does not know stays."""
    kind = written[1:2]
    if not kind:
        return None
    if (digits := _HEX_DIGITS.get(kind)) is None:
        return _inner(_ESCAPES.get(kind, written))
    if len(written) < 2 + digits:
        return None
    try:
        return _inner(chr(int(written[2:], 16)))
    except (ValueError, OverflowError):
        return _inner(written)
