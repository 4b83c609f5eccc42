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


def places(body: dict[str, Any], names: tuple[str, ...] = WRITTEN) -> Iterator[Place]:
    """Every text under these fields of a body. Token ids are none."""
    for name in names:
        if name in body:
            yield from _within(body, name)


def _within(holder: Any, key: Any) -> Iterator[Place]:
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
            waiting += [(value, index) for index in range(len(value))]
