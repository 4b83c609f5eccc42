"""How the served model writes thoughts and calls, and what that makes of a request: a grammar, and a parser.

request → what is asked (Asked) → grammar for the core      (what the answer must be)
                                → parser per answer         (what it turns out to be)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.grammar import lark
from engine.grammar.lark import Grammar
from engine.server.asked import Asked
from engine.server.parsers import HARMONY
from engine.server.reasoning import CLOSE, OPEN, Thinking
from engine.server.reply import PlainText, ReplyParser
from engine.server.structured import Format
from engine.server.tools.families import FAMILIES, Family
from engine.server.tools.harmony import CHANNEL, CONSTRAIN, END, MARKERS, MESSAGE, START, Harmony
from engine.server.tools.request import ToolUse
from engine.text.chat_template import ChatTemplate

_GAP = r"/[ \n]{0,3}/"  # between a thought and what follows


def of_text(format: Format) -> Grammar:
    """What a plain text must be."""
    return Grammar((f"start: {format.expression}", *format.rules), format.users)


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """Of one model. `reads_tools`: its template tells it of tools; `thinks`: it may write thoughts."""

    family: Family
    is_harmony: bool
    thinks: bool
    reads_tools: bool
    control_ids: Mapping[str, int]

    @classmethod
    def choose(
        cls, template: ChatTemplate, control_ids: Mapping[str, int], *, tools: str = "auto", reasoning: str = "auto"
    ) -> ReplyForm:
        """By the template's text, or as told. `control_ids`: the model's control tokens by name.

        Raises:
            ValueError: two settings that contradict each other.
        """
        sources = template.source + (template.tool_template.source if template.tool_template is not None else "")
        speaks_harmony = CHANNEL in control_ids and CHANNEL in sources
        if tools == "auto":
            known = (name for name, family in FAMILIES.items() if any(text in sources for text in family.template))
            tools = HARMONY if speaks_harmony else next(known, "hermes")
        if reasoning == "auto":
            reasoning = HARMONY if tools == HARMONY else ("think" if CLOSE in sources else "none")
        if (tools == HARMONY) != (reasoning == HARMONY):
            raise ValueError("harmony is one form for tools and reasoning: choose it for both or for neither")
        return cls(
            family=FAMILIES["hermes" if tools == HARMONY else tools],
            is_harmony=tools == HARMONY,
            thinks=reasoning != "none",
            reads_tools="tools" in template.variables,
            control_ids=control_ids,
        )

    def in_thought(self, prompt: str) -> bool:
        """Whether a prompt, as the template wrote it, ends within a thought."""
        return self.thinks and not self.is_harmony and prompt.rstrip().endswith(OPEN)

    def markers(self, asked: Asked) -> frozenset[int]:
        """Control tokens that the parser must see."""
        if self.is_harmony:
            names: tuple[str, ...] = MARKERS
        else:
            form = self.family.form
            names = (OPEN, CLOSE) if self.thinks else ()
            if asked.tools is not None:
                names += (*form.opens, *((form.close,) if form.close else ()))
        return frozenset(self.control_ids[name] for name in names if name in self.control_ids)

    def parser(self, asked: Asked, *, in_thought: bool) -> ReplyParser:
        """For one answer. `in_thought`: the prompt ends within a thought."""
        if self.is_harmony:
            return Harmony()
        rest: ReplyParser = PlainText()
        if asked.tools is not None:
            rest = self.family.parser(asked.tools.tools)
        return Thinking(rest, opened=in_thought) if self.thinks else rest

    def grammar(self, asked: Asked, *, in_thought: bool) -> Grammar | None:
        """What the answers must be, thoughts aside; None: anything."""
        format, tools = asked.format, asked.tools
        if tools is not None and tools.required:
            format = None  # the answer is a call
        mark = lark.marker(self.control_ids)
        if format is None and (tools is None or not tools.required):
            if tools is None or not tools.is_held or self.is_harmony:
                return None
            return Grammar(tuple(self._text_with_calls(tools, mark)))
        thought, rules = self._thought(mark, in_thought=in_thought)
        either: list[str] = []
        if tools is not None:
            calls, needed = self._calls(tools, mark)
            either.append(calls)
            rules += needed
        if format is not None:
            either.append(self._final(format.expression, mark))
            rules += format.rules
        start = f"start: {thought} ({' | '.join(either)})"
        return Grammar((start, *rules), None if format is None else format.users)

    def _calls(self, tools: ToolUse, mark: lark.Marker) -> tuple[str, list[str]]:
        if not self.is_harmony:
            return self.family.calls(mark, several=tools.several), self.family.style.rules(tools.tools)
        calls = [
            f"{mark(CHANNEL)} {lark.literal(f'commentary to=functions.{tool.name} ')} {mark(CONSTRAIN)} "
            f'"json" {mark(MESSAGE)} {lark.schema(tool.parameters, lenient=not tool.strict)}'
            for tool in tools.tools
        ]
        return "call", ["call: " + " | ".join(calls)]

    def _final(self, expression: str, mark: lark.Marker) -> str:
        if not self.is_harmony:
            return expression
        return f'{mark(CHANNEL)} "final" {mark(MESSAGE)} {expression}'

    def _text_with_calls(self, tools: ToolUse, mark: lark.Marker) -> list[str]:
        """A text in which calls may stand, each of them one of the tools'."""
        rules, body = self.family.style.rules(tools.tools), self.family.body(mark, several=tools.several)
        if not self.family.open:  # a call, or a list of them, is the whole answer
            return [f"start: {body} | text", rf"text: /[^\{self.family.form.bare}\s](?s:.*)/", *rules]
        return [*lark.text_with_tags("start", {self.family.open: [body]}, mark, only_one=not tools.several), *rules]

    def _thought(self, mark: lark.Marker, *, in_thought: bool) -> tuple[str, list[str]]:
        """An expression for the thoughts before the answer, and the rules it needs."""
        if not self.thinks:
            return "", []
        if self.is_harmony:
            rule = (
                f'thought: {mark(CHANNEL)} "analysis" {mark(MESSAGE)} /(?s:.*)/ {mark(END)} {mark(START)} "assistant"'
            )
            return "thought*", [rule]
        end, rules = lark.up_to(CLOSE, "thought", mark)
        return (f"{end} {_GAP}" if in_thought else f"({mark(OPEN)} {end} {_GAP})?"), rules
