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
    """`template`: texts by which a template that writes calls in this form is known.

    A call, or the list of several where they are written as one (`listed`), stands between `open` and `lead` before it
    and `tail` and the form's closing marker after it. `arguments`: how that member of a call is called.
    """

    form: Form
    template: tuple[str, ...]
    open: str = ""
    lead: str = ""
    tail: str = ""
    listed: bool = False
    several: bool = True
    arguments: str = "arguments"
    short_ids: bool = False  # ids of calls have nine letters and digits, because the template wants them so

    @property
    def before(self) -> str:
        return self.open + self.lead

    @property
    def after(self) -> str:
        return self.tail + (self.form.close or "")

    def body(self, mark: lark.Marker, *, several: bool) -> str:
        """An expression: what follows the opening marker. It refers to the rule `call`, a call of any tool."""
        items = "call"
        if self.listed:
            items = '"[" call (", " call)* "]"' if several else '"[" call "]"'
        parts = [_literal(self.lead), items, _literal(self.tail), mark(self.form.close) if self.form.close else ""]
        return " ".join(filter(None, parts))

    def calls(self, mark: lark.Marker, *, several: bool) -> str:
        """An expression: one call, or several."""
        several = several and self.several
        one = " ".join(filter(None, [mark(self.open) if self.open else "", self.body(mark, several=several)]))
        return f'{one} ("\\n" {one})*' if several and not self.listed else one

    def rule(self, tools: Sequence[Tool]) -> str:
        """The rule `call`."""
        return "call: " + " | ".join(map(self._call, tools))

    def _call(self, tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = lark.literal(f'{{"name": {name}, "{self.arguments}": ')
        return f'{head} {lark.schema(tool.parameters, lenient=not tool.strict)} "}}"'


def _literal(text: str) -> str:
    return lark.literal(text) if text else ""


FAMILIES: Mapping[str, Family] = {
    "mistral": Family(
        Form(("[TOOL_CALLS]",), named=True), ("[TOOL_CALLS]",), open="[TOOL_CALLS]", listed=True, short_ids=True
    ),
    "llama3": Family(
        Form(("<|python_tag|>",), bare=True),
        ("<|python_tag|>", "Environment: ipython"),
        several=False,
        arguments="parameters",
    ),
    "phi4": Family(
        Form(("<|tool_call|>", "functools"), "<|/tool_call|>"),
        ("<|tool_call|>", "<|tool|>"),
        open="<|tool_call|>",
        listed=True,
    ),
    "gemma": Family(Form(("```tool_code", "```tool_call"), "```"), ("tool_code",), "```tool_code", "\n", "\n"),
    "hermes": Family(Form(("<tool_call>",), "</tool_call>"), ("<tool_call>",), "<tool_call>", "\n", "\n"),
}
