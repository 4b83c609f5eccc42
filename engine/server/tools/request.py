"""Which tools a request offers and whether the model must call one: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from backends.protocol import ChatRequest, InvalidRequest, Json
from engine.server.errors import unsupported
from engine.server.tools.tool import Tool

_NAME = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_CHOICES = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
_ALLOWED = "tool_choice.allowed_tools"
_FUNCTION = 'must be {"type": "function", "function": {"name": …}}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What may be called. `definitions`: as the client sent them, for the template, which is told of no other tool."""

    tools: tuple[Tool, ...]
    definitions: list[Json]
    required: bool
    several: bool

    @property
    def is_held(self) -> bool:
        """Whether the calls of the answer must be kept to a grammar even where the model is free to make none."""
        return not self.several or any(tool.strict for tool in self.tools)


def read_tools(request: ChatRequest) -> ToolUse | None:
    """None where no tool may be called.

    Raises:
        InvalidRequest: a definition or the choice is not understood.
        ApiError: a kind of tool or of choice that this engine does not have.
    """
    definitions = request.tools or []
    tools = [_tool(definition, f"tools[{i}]") for i, definition in enumerate(definitions)]
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            where = f"tools[{i}].function.name"
            raise InvalidRequest(f"'{where}' is '{name}', as that of another tool.", param=where)
    choice = request.tool_choice
    if not tools and request.parallel_tool_calls is not None:
        text = "'parallel_tool_calls' is only allowed when 'tools' are given."
        raise InvalidRequest(text, param="parallel_tool_calls")
    if not tools or choice == "none":
        return None
    named = None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed(choice.get("allowed_tools"), names)
        definitions = [d for d, tool in zip(definitions, tools, strict=True) if tool.name in allowed]
        tools = [tool for tool in tools if tool.name in allowed]
    elif isinstance(choice, dict):
        named = _named(choice, names)
    elif choice not in (None, "auto", "required"):
        raise InvalidRequest(f"'tool_choice' {_CHOICES}.", param="tool_choice")
    return ToolUse(
        tools=tuple(tool for tool in tools if named in (None, tool.name)),
        definitions=definitions,
        required=named is not None or choice == "required",
        several=request.parallel_tool_calls is not False and named is None,
    )


def _tool(definition: Json, where: str) -> Tool:
    kind = definition.get("type")
    if kind != "function":
        raise unsupported(f"{where}.type", 'Tools are of type "function".', what=f"'{str(kind)[:64]}'")
    function = definition.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"'{where}.function' must be an object with a 'name'.", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{where}.function.name' must have 1 to 64 letters, digits and '_', '-', '.' or ':'.",
            param=f"{where}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        where = f"{where}.function.parameters"
        raise InvalidRequest(f"'{where}' must be a JSON schema.", param=where, code="invalid_type")
    return Tool(name, parameters or {"type": "object", "properties": {}}, function.get("strict") is True)


def _allowed(value: object, names: list[str]) -> tuple[str, set[str]]:
    """The mode and the names of OpenAI's `allowed_tools`."""
    if not isinstance(value, dict) or value.get("mode") not in ("auto", "required"):
        raise InvalidRequest(f'\'{_ALLOWED}.mode\' must be "auto" or "required".', param=f"{_ALLOWED}.mode")
    listed = value.get("tools")
    if not isinstance(listed, list) or not listed or not all(isinstance(tool, dict) for tool in listed):
        raise InvalidRequest(f"'{_ALLOWED}.tools' must be a list of tools, at least one.", param=f"{_ALLOWED}.tools")
    return value["mode"], {_named(tool, names, f"{_ALLOWED}.tools[{i}]") for i, tool in enumerate(listed)}


def _named(choice: Json, names: list[str], where: str = "tool_choice") -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidRequest(f"'{where}' {_CHOICES if where == 'tool_choice' else _FUNCTION}.", param=where)
    if name not in names:
        where = f"{where}.function.name"
        raise InvalidRequest(f"'{where}' is '{name[:64]}', the tools are {', '.join(names)[:300]}.", param=where)
    return name
