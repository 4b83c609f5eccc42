"""What clients write stays text: the names of control tokens in it (`<|im_end|>`) do not end or begin turns.

A chat template writes control tokens by name and the contents of messages between them, into one text. Before it is
rendered, each such name in what the client wrote is replaced by one character of the private-use planes that occurs
nowhere else; the tokenizer then reads these characters as the plain text that they stand for, and any name that is
still there as the template's own. A conversation without such names is not touched.

Tokens that are user-defined, not control (`<think>`), stay tokens wherever they stand, as in the libraries that models
are trained with: templates look for them in earlier answers, and clients begin answers with them. They end no turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_STAND_INS = range(0xF0000, 0x10FFFE)
_PRIVATE_USE = re.compile("[\U000f0000-\U0010fffd]")


class LiteralText:
    """The stand-ins of one request. `texts` maps each to the name it stands for; empty where there was none."""

    def __init__(self, names: re.Pattern[str] | None) -> None:
        """`names` matches the names of the control tokens; None: there are none."""
        self._names = names
        self.texts: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """`value` (JSON) with every name in its texts and keys of objects replaced. Call it once.

        Raises:
            ValueError: the value itself holds all characters that could stand in.
        """
        names = self._names
        if names is None or not any(names.search(text) for text in _texts_and_keys(value)):
            return value
        taken = {character for text in _texts_and_keys(value) for character in _PRIVATE_USE.findall(text)}
        free = (chr(point) for point in _STAND_INS if chr(point) not in taken)
        stand_ins: dict[str, str] = {}

        def stand_in(match: re.Match[str]) -> str:
            name = match[0]
            if name not in stand_ins:
                character = next(free, None)
                if character is None:
                    raise ValueError("the messages hold every character of the private-use planes")
                stand_ins[name] = character
            return stand_ins[name]

        hidden = _map(value, lambda text: names.sub(stand_in, text))
        self.texts = {character: name for name, character in stand_ins.items()}
        return hidden


def texts_of(value: Any) -> Iterator[str]:
    """Every text in `value` (JSON), the keys of objects not among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_of(item)


def _texts_and_keys(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts_and_keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_and_keys(item)


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): _map(item, change) for name, item in value.items()}
    return value
