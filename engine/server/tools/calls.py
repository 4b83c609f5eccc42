"""Tool calls between the text of an answer, as the families write them.

    <tool_call>{"name": "f", "arguments": {…}}</tool_call>     Hermes, Qwen: one tag per call
    [TOOL_CALLS][{"name": …}, …]   [TOOL_CALLS]f{…}            Mistral, older and newer
    <|tool_call|>[{"name": …}]<|/tool_call|>                   Phi-4
    {"name": "f", "parameters": {…}}; …                        Llama 3, perhaps behind <|python_tag|>
    <tool_call><function=f><parameter=a>…                      Qwen3-Coder
    [f(a=1), g()]   ```tool_code f(a=1) ```                    as in Python: Llama 4 and others; Gemma

What turns out to be no call is text, to the letter. White space at either end of a text with calls is dropped.
Of a call that was cut off, what is known is given: its name and the arguments so far, or nothing before the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from engine.server.reply import Arguments, Called, Part, Said, Spans, cut
from engine.server.tools.json_call import JsonCall, JsonValue, NotACall

_SEPARATORS = frozenset(" \n\r\t[],;")
_LONGEST_NAME = 256
_NAME = re.compile(r"\s*([\w.:/-]{1,128})\s*(\[CALL_ID\]\w*)?\s*(\[ARGS\])?\s*")


class CallReader(Protocol):
    """State of one call that is being read, as `JsonCall`."""

    name: str | None
    is_done: bool

    def take(self, character: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Form:
    """How a family marks its calls."""

    opens: tuple[str, ...]
    close: str | None = None
    bare: str = ""  # an answer that begins with this character is a call, too
    named: bool = False  # the name may stand before the arguments: `f{…}`


class Calls:
    """`ReplyParser` for one form. `names` are those of the tools, which a bare call must have."""

    def __init__(
        self,
        form: Form,
        names: Collection[str],
        reader: Callable[[], CallReader] = JsonCall,
        begins: str = "{",
    ) -> None:
        """`reader`: what reads a call that begins with `begins`, "a" for any letter. JSON is read in any case."""
        self.spans: Spans = []
        self._form = form
        self._reader, self._begins = reader, begins
        self._names = frozenset(names)
        self._markers = (*form.opens, form.close) if form.close else form.opens
        self._states = {
            "text": self._in_text,
            "tag": self._in_tag,
            "object": self._in_object,
            "name": self._in_name,
            "value": self._in_value,
        }
        self._state = "text"
        self._held = ""  # what was not looked at yet
        self._blank = ""  # white space that is part of the text only if more of it comes, or no call at all
        self._raw = ""  # since the marker or the last call: text, if no call comes of it
        self._said = False
        self._bare = False
        self._in_tag_called = False
        self._call: CallReader = JsonCall()
        self._value = JsonValue()
        self._count = 0

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and self._states[self._state](parts):
            pass
        return merged(parts)

    def finish(self, *, cut_off: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "tag" and self._in_tag_called:
            self._raw = self._held = ""  # no more than a marker that is not closed
        elif cut_off and (self._state != "text" or self._is_half_a_marker(self._held)):
            # A call without a name can be told neither as a call nor as text.
            self._raw = self._held = self._blank = ""
        if self._state == "text" or self._raw:
            self._say(self._raw + self._held, parts)
        if self._blank and not self._count:
            parts.append(Said(self._blank))
        self._held = self._raw = self._blank = ""
        return merged(parts)

    def _is_half_a_marker(self, text: str) -> bool:
        return any(marker.startswith(text) and 2 * len(text) >= len(marker) for marker in self._form.opens)

    # --- states: each takes what it can of `_held`; False: it takes more text to go on ----------------------------

    def _in_text(self, parts: list[Part]) -> bool:
        if self._form.bare and not self._said and not self._count and self._held.lstrip()[:1] == self._form.bare:
            begins = self._held.lstrip()
            self._blank += self._held[: len(self._held) - len(begins)]
            self._held = begins
            self._open("", bare=True)
            return True
        said, marker, self._held = cut(self._held, self._form.opens)
        self._say(said, parts)
        if marker is None:
            return False
        self._open(marker, bare=False)
        return True

    def _open(self, marker: str, *, bare: bool) -> None:
        self._raw, self._bare, self._in_tag_called, self._state = marker, bare, False, "tag"

    def _in_tag(self, parts: list[Part]) -> bool:
        if any(marker != self._held and marker.startswith(self._held) for marker in self._markers):
            return False  # also where it is a marker already: a longer one may begin with it
        for marker in self._markers:
            if self._held.startswith(marker):
                self._held = self._held[len(marker) :]
                if marker == self._form.close:
                    if not self._in_tag_called:
                        self._say(self._raw + marker, parts)
                    self._raw, self._state = "", "text"
                else:
                    self._raw += marker
                return True
        first = self._held[0]
        if first in _SEPARATORS:
            self._raw += first
            self._held = self._held[1:]
        elif first == "{":
            self._call, self._state = JsonCall(), "object"
        elif first == self._begins or (self._begins == "a" and (first.isalpha() or first == "_")):
            self._call, self._state = self._reader(), "object"
        elif self._form.named:
            self._state = "name"
        else:
            self._give_up(parts)
        return True

    def _in_object(self, parts: list[Part]) -> bool:
        for at, character in enumerate(self._held):
            announced = self._call.name is not None
            try:
                arguments = self._call.take(character)
                name = self._call.name
                if self._bare and name is not None and name not in self._names:
                    raise NotACall(f"there is no tool {name!r}")
            except NotACall:
                if announced:  # what is out cannot be taken back: the call ends here
                    self._held, self._state = self._held[at + 1 :], "tag"
                else:
                    self._raw += self._held[:at]
                    self._held = self._held[at:]
                    self._give_up(parts)
                return True
            if name is not None and not announced:
                self._announce(name, parts)
            if arguments:
                parts.append(Arguments(self._count - 1, arguments))
            if self._call.is_done:
                self._held, self._state = self._held[at + 1 :], "tag"
                return True
        if self._call.name is None:
            self._raw += self._held
        self._held = ""
        return False

    def _in_name(self, parts: list[Part]) -> bool:
        brace = self._held.find("{")
        if brace < 0 and len(self._held) <= _LONGEST_NAME:
            return False
        found = _NAME.fullmatch(self._held[:brace]) if brace >= 0 else None
        if found is None:
            self._give_up(parts)
            return True
        self._announce(found[1], parts)
        self._held, self._value, self._state = self._held[brace:], JsonValue(), "value"
        return True

    def _in_value(self, parts: list[Part]) -> bool:
        for at, character in enumerate(self._held, 1):
            if self._value.take(character):
                parts.append(Arguments(self._count - 1, self._held[:at]))
                self._held, self._state = self._held[at:], "tag"
                return True
        parts.append(Arguments(self._count - 1, self._held))
        self._held = ""
        return False

    # --- what comes of it ----------------------------------------------------------------------------------------

    def _announce(self, name: str, parts: list[Part]) -> None:
        parts.append(Called(self._count, name))
        self._count += 1
        self._raw, self._in_tag_called = "", True

    def _give_up(self, parts: list[Part]) -> None:
        """No call: what stands here is text."""
        self._say(self._raw, parts)
        self._raw, self._state = "", "text"
        if self._bare and not self._said:
            self._said = True  # and the same text is not looked at again

    def _say(self, text: str, parts: list[Part]) -> None:
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            parts.append(Said(said))
            self._said = True


def merged(parts: list[Part]) -> list[Part]:
    """The same with neighbours of one kind as one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        match last, part:
            case Said(before), Said(text):
                result[-1] = Said(before + text)
            case Arguments(index, before), Arguments(same, text) if index == same:
                result[-1] = Arguments(index, before + text)
            case _:
                result.append(part)
    return result
