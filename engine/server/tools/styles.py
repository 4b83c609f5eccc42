"""How a call itself is written, between a family's markers: as JSON, as Python calls a function, or with tags.

A style reads calls, holds answers to them by a grammar, and writes those of the history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.grammar import lark
from engine.server.tools.calls import CallReader
from engine.server.tools.json_call import JsonCall
from engine.server.tools.python_call import PythonCall
from engine.server.tools.tool import Tool
from engine.server.tools.xml_call import XmlCall, is_text


class Style(Protocol):
    """`begins`: with what a call begins, a character or "a" for any letter; calls in JSON are read besides."""

    begins: str

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """For one call."""
        ...

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        """Rules of a grammar; `call`, the first, is a call of any of these tools."""
        ...

    def write(self, name: str, arguments: str) -> str:
        """A call with these arguments, JSON. Arguments that are no object stand as they are."""
        ...

    example: str


class JsonStyle:
    """`{"name": …, "arguments": {…}}`; `arguments` is how that member is called."""

    begins = "{"

    def __init__(self, arguments: str = "arguments") -> None:
        self._arguments = arguments
        self.example = f'{{"name": <name>, "{arguments}": <object>}}'

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return JsonCall()

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        return ["call: " + " | ".join(map(self._rule, tools))]

    def _rule(self, tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = lark.literal(f'{{"name": {name}, "{self._arguments}": ')
        return f'{head} {lark.schema(tool.parameters, lenient=not tool.strict)} "}}"'

    def write(self, name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self._arguments}": {arguments}}}'


class PythonStyle:
    """`f(city="Rome")`. Grammars write the values as JSON, which is nearly Python."""

    begins = "a"
    example = "<name>(<parameter>=<value>)"

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return PythonCall([tool.name for tool in tools])

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            values = [
                (f"{lark.literal(f'{name}=')} {lark.schema(schema, lenient=not tool.strict)}", required)
                for name, schema, required in tool.properties()
            ]
            rules.append(f"call_{i}: {lark.literal(f'{tool.name}(')} {_in_order(values)} {lark.literal(')')}")
        return rules

    def write(self, name: str, arguments: str) -> str:
        values = _members(arguments)
        if values is None:
            return f"{name}({arguments})"
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


class XmlStyle:
    """`<function=f>` with a tag per parameter: Qwen3-Coder. Texts are held to their `enum` and to nothing else."""

    begins = "<"
    example = "<function=<name>>\n<parameter=<parameter>>\n<value>\n</parameter>\n</function>"

    def reader(self, tools: Sequence[Tool]) -> CallReader:
        return XmlCall({tool.name: tool.parameters for tool in tools})

    def rules(self, tools: Sequence[Tool]) -> list[str]:
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            parts = [lark.literal(f"<function={tool.name}>\n")]
            for number, (name, schema, required) in enumerate(tool.properties()):
                value, needed = self._value(schema, f"value_{i}_{number}", lenient=not tool.strict)
                rules += needed
                opening, line_break = lark.literal(f"<parameter={name}>\n"), lark.literal("\n")
                one = f"{opening} {value} {line_break}"
                parts.append(one if required else f"({one})?")
            rules.append(f"call_{i}: {' '.join(parts)} {lark.literal('</function>')}")
        return rules

    def _value(self, schema: Any, name: str, *, lenient: bool) -> tuple[str, list[str]]:
        """A value and the end of its tag."""
        end = "\n</parameter>"
        if not is_text(schema):
            return f"{lark.schema(schema, lenient=lenient)} {lark.literal(end)}", []
        values = schema.get("enum", [schema["const"]] if "const" in schema else None) if schema else None
        if values:
            return f"{lark.choice(values)} {lark.literal(end)}", []
        return lark.up_to(end, name, lark.literal)

    def write(self, name: str, arguments: str) -> str:
        values = _members(arguments)
        if values is None:
            return f"<function={name}>\n{arguments}\n</function>"
        told = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values.values())
        tags = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in zip(values, told, strict=True))
        return f"<function={name}>\n{''.join(tags)}</function>"


def _members(arguments: str) -> Mapping[str, Any] | None:
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _in_order(values: Sequence[tuple[str, bool]]) -> str:
    """Values with commas between them, in this order; those that are not required may be left out."""
    either: list[str] = []
    for first, (value, required) in enumerate(values):
        rest = [f'", " {other}' if needed else f'(", " {other})?' for other, needed in values[first + 1 :]]
        either.append(" ".join([value, *rest]))
        if required:
            break
    else:
        either.append('""')
    return f"({' | '.join(either)})"
