"""The text of a request's `prediction`: what the client expects the answer to be, as OpenAI's API has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.protocol import InvalidRequest


def predicted_text(prediction: Mapping[str, Any] | None) -> str:
    """The predicted answer; empty where there is none.

    Raises:
        InvalidRequest: it is not of type "content", or holds something that is not text.
    """
    if prediction is None:
        return ""
    if prediction.get("type") != "content":
        raise InvalidRequest("'prediction.type' must be \"content\".", param="prediction.type")
    content = prediction.get("content")
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidRequest("'prediction.content' must be a text or a list of texts.", param="prediction.content")
    return "".join(_text(part, f"prediction.content[{place}]") for place, part in enumerate(parts))


def _text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(f'\'{where}\' must be {{"type": "text", "text": ...}}.', param=where)
