"""The families: which form their calls have, how to recognise one by its template, and how to hold an answer to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.grammar import lark
from engine.server.tools.calls import Calls, Form
from engine.server.tools.styles import JsonStyle, PythonStyle, Style, XmlStyle
from engine.server.tools.tool import Tool

_JSON = JsonStyle()


@dataclass(frozen=True, slots=True)
class Family:
    """`template`: texts by which a template that writes calls in this form is known.

    A call, or the list of several where they are written as one (`listed`), stands between `open` and `lead` before it
    and `tail` and the form's closing marker after it.
    """

    form: Form
    template: tuple[str, ...]
    open: str = ""
    lead: str = ""
    tail: str = ""
    listed: bool = False
    several: bool = True
    style: Style = _JSON
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

    def parser(self, tools: Sequence[Tool]) -> Calls:
        """For one answer."""
        return Calls(self.form, [tool.name for tool in tools], lambda: self.style.reader(tools), self.style.begins)

    def write(self, name: str, arguments: str) -> str:
        """A call of the history, with its markers. `arguments`: JSON."""
        return self._marked(self.style.write(name, arguments))

    @property
    def example(self) -> str:
        """What to tell a model of calls."""
        return self._marked(self.style.example)

    def _marked(self, call: str) -> str:
        call = f"[{call}]" if self.listed and self.form.bare else call
        return f"{self.before}{call}{self.after}"


def _literal(text: str) -> str:
    return lark.literal(text) if text else ""


# In the order in which they are looked for: markers of the first ones are not all that they have.
FAMILIES: Mapping[str, Family] = {
    "qwen3_coder": Family(
        Form(("<tool_call>",), "</tool_call>"), ("<function=",), "<tool_call>", "\n", "\n", style=XmlStyle()
    ),
    "pythonic": Family(Form((), bare="["), ("[func_name1(",), listed=True, style=PythonStyle()),
    "mistral": Family(
        Form(("[TOOL_CALLS]",), named=True), ("[TOOL_CALLS]",), open="[TOOL_CALLS]", listed=True, short_ids=True
    ),
    "llama3": Family(
        Form(("<|python_tag|>",), bare="{"),
        ("<|python_tag|>", "Environment: ipython"),
        several=False,
        style=JsonStyle("parameters"),
    ),
    "phi4": Family(
        Form(("<|tool_call|>", "functools"), "<|/tool_call|>"),
        ("<|tool_call|>", "<|tool|>"),
        open="<|tool_call|>",
        listed=True,
    ),
    "gemma": Family(
        Form(("```tool_code", "```tool_call"), "```"),
        ("tool_code",),
        "```tool_code",
        "\n",
        "\n",
        style=PythonStyle(),
    ),
    "hermes": Family(Form(("<tool_call>",), "</tool_call>"), ("<tool_call>",), "<tool_call>", "\n", "\n"),
}
