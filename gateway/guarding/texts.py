"""The texts of a JSON body: each string that somebody wrote, where it stands, so that it can be read and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

# Where a request holds what people and models wrote, in whatever dialect.
WRITTEN: Final = ("system", "instructions", "messages", "prompt", "suffix", "input", "query", "documents", "prediction")
# Strings that are names, addresses or data, and never prose.
_NO_TEXT: Final = frozenset(
    {"id", "type", "role", "name", "call_id", "tool_call_id", "tool_use_id", "data", "url", "image_url", "file_id",
     "media_type", "format", "detail", "signature", "encrypted_content", "status", "b64_json", "file_data"}
)  # fmt: skip


class Place(NamedTuple):
    """A string in a JSON body: `holder[key]`."""

    holder: Any
    key: Any

    @property
    def text(self) -> str:
        found: str = self.holder[self.key]
        return found

    def put(self, text: str) -> None:
        self.holder[self.key] = text


class Parts:
    """Parts of text that stand one after the other and are read as one: what is torn between them is found as well."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places

    @property
    def text(self) -> str:
        return "".join(place.text for place in self._places)

    def put(self, text: str) -> None:
        """All of it into the first part: where the others began in a text that was changed, nobody can say."""
        self._places[0].put(text)
        for place in self._places[1:]:
            place.put("")


def places(body: dict[str, Any], names: tuple[str, ...] = WRITTEN) -> Iterator[Place | Parts]:
    """Every text under these fields of a body. Token ids are none."""
    for name in names:
        if name in body:
            yield from _within(body, name)


def _within(holder: Any, key: Any) -> Iterator[Place | Parts]:
    """Without recursion: bodies may be as deep as the decoder takes them."""
    waiting = [(holder, key)]
    while waiting:
        holder, key = waiting.pop()
        value = holder[key]
        if isinstance(value, str):
            if value:
                yield Place(holder, key)
        elif isinstance(value, dict):
            waiting += [(value, name) for name in value if name not in _NO_TEXT]
        elif isinstance(value, list) and not (value and isinstance(value[0], int)):
            parts = [part for part in value if _is_part(part)]
            if len(parts) > 1:
                yield Parts([Place(part, "text") for part in parts])
            waiting += [(value, index) for index in range(len(value)) if len(parts) < 2 or not _is_part(value[index])]


def _is_part(value: Any) -> bool:
    """Whether it is a part of a message that holds text and nothing else that somebody wrote."""
    return isinstance(value, dict) and isinstance(value.get("text"), str) and isinstance(value.get("type"), str)
