"""Telling a model of tools where its chat template knows none: in the system message, calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from backends.protocol import Json
from engine.server.tools.families import Family

_RESULT = "<tool_response>\n{}\n</tool_response>"


def tell(messages: Sequence[Json], definitions: Sequence[Json], family: Family) -> list[Json]:
    """The conversation with the tools in its system message, and without fields or roles that are for tools."""
    told: list[Json] = []
    if definitions:
        told.append({"role": "system", "content": _offer(definitions, family)})
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer") and len(told) == 1 and told[0]["role"] == "system" and definitions:
            told[0] = {**message, "content": f"{_text(message.get('content'))}\n\n{told[0]['content']}"}
        elif role == "tool":
            result = _RESULT.format(_text(message.get("content")))
            if told and told[-1].get("results"):
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result, "results": True})
        elif message.get("tool_calls"):
            calls = [_call(call, family) for call in message["tool_calls"]]
            text = "\n".join(filter(None, [_text(message.get("content")), *calls]))
            told.append({**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text})
        else:
            told.append(dict(message))
    for message in told:
        message.pop("results", None)
    return told


def _offer(definitions: Sequence[Json], family: Family) -> str:
    tools = "\n".join(json.dumps(d.get("function", d), ensure_ascii=False) for d in definitions)
    return (
        f"You can call these functions, given as JSON schemas:\n<tools>\n{tools}\n</tools>\n"
        f"To call one, write its name and arguments in this form and nothing else:\n{family.example}"
    )


def _call(call: Any, family: Family) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return family.write(str(function.get("name") or ""), arguments)


def _text(content: Any) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""
