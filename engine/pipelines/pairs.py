"""How a tokenizer writes two texts as one: what a model that scores pairs was trained with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FIRST, SECOND = "A", "B"


@dataclass(frozen=True, slots=True)
class PairForm:
    """The two texts, each once, and the ids of the tokens around them."""

    parts: tuple[str | int, ...] = (FIRST, SECOND)

    @classmethod
    def of(cls, definition: str | None) -> PairForm:
        """As the text of a `tokenizer.json` says it; None, or without such words: one behind the other.

        Raises:
            ValueError: a form in which a text comes twice or not at all.
        """
        processor = None if definition is None else json.loads(definition).get("post_processor")
        template = _template(processor)
        if template is None:
            return cls()
        parts: list[str | int] = []
        for piece in template["pair"]:
            ((kind, value),) = piece.items()
            parts += [value["id"]] if kind == "Sequence" else template["special_tokens"][value["id"]]["ids"]
        if sorted(part for part in parts if isinstance(part, str)) != [FIRST, SECOND]:
            raise ValueError(f"the tokenizer writes pairs of texts as {parts}")
        return cls(tuple(parts))

    def ids(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """Token ids of a pair."""
        texts = {FIRST: first, SECOND: second}
        return [i for part in self.parts for i in (texts[part] if isinstance(part, str) else (part,))]


def _template(processor: Any) -> Any:
    if processor is None:
        return None
    if processor["type"] == "Sequence":
        return next((found for part in processor["processors"] if (found := _template(part)) is not None), None)
    return processor if processor["type"] == "TemplateProcessing" else None
