"""The families: which form their calls have, how to recognise one by its template, and how to hold an answer to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.grammar import lark
from engine.server.tools.calls import Form


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """`template`: texts by which a template that writes calls in this form is known. `arguments`: the member's name.

    `before` and `after` surround a call, or the list of several where they are written as one (`listed`).
    """

    form: Form
    template: tuple[str, ...]
    before: str
    after: str
    listed: bool = False
    several: bool = True
    arguments: str = "arguments"

    def call(self, tool: Tool) -> str:
        """An expression: a call of this tool without what surrounds it."""
        head = lark.literal('{"name": ' + json.dumps(tool.name, ensure_ascii=False) + f', "{self.arguments}": ')
        return f'{head} {lark.schema(tool.parameters, lenient=not tool.strict)} "}}"'

    def calls(self, tools: Sequence[Tool], mark: lark.Marker, *, several: bool) -> tuple[str, list[str]]:
        """An expression for one call or several, and the rules that it needs."""
        rules = ["call: " + " | ".join(self.call(tool) for tool in tools)]
        opening = _marked(self.before, self.form, mark)
        closing = _marked(self.after, self.form, mark)
        several = several and self.several
        if self.listed:
            items = '"[" call (", " call)* "]"' if several else '"[" call "]"'
            return f"{opening} {items} {closing}", rules
        one = f"{opening} call {closing}"
        return (f"{one} ({lark.literal(chr(10))} {one})*" if several else one), rules


def _marked(text: str, form: Form, mark: lark.Marker) -> str:
    """A text that may hold a marker of the form: an expression."""
    markers = (*form.opens, form.close) if form.close else form.opens
    for marker in markers:
        if marker in text:
            before, _, after = text.partition(marker)
            around = [lark.literal(before) if before else "", mark(marker), lark.literal(after) if after else ""]
            return " ".join(filter(None, around))
    return lark.literal(text) if text else ""


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(Form(("<tool_call>",), "</tool_call>"), ("<tool_call>",), "<tool_call>\n", "\n</tool_call>"),
    "mistral": Family(Form(("[TOOL_CALLS]",), named=True), ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", listed=True),
    "llama3": Family(
        Form(("<|python_tag|>",), bare=True),
        ("<|python_tag|>", "Environment: ipython"),
        "",
        "",
        several=False,
        arguments="parameters",
    ),
    "phi4": Family(
        Form(("<|tool_call|>", "functools"), "<|/tool_call|>"),
        ("<|tool_call|>", "<|tool|>"),
        "<|tool_call|>",
        "<|/tool_call|>",
        listed=True,
    ),
    "gemma": Family(Form(("```tool_code", "```tool_call"), "```"), ("tool_code",), "```tool_code\n", "\n```"),
}
