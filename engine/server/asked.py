"""What a request wants of its answers beside text: a format, tools, thoughts."""

from __future__ import annotations

from dataclasses import dataclass

from backends.protocol import ChatRequest, CompletionRequest, Json
from engine.server.errors import unsupported
from engine.server.schema import ChatExtras, Extras
from engine.server.structured import Format, read_format
from engine.server.tools.request import ToolUse, read_tools
from engine.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Asked:
    """None where nothing is asked."""

    format: Format | None = None
    tools: ToolUse | None = None

    @property
    def param(self) -> str:
        """The field to name where it cannot be done."""
        return self.format.param if self.format is not None else "tools"


def read_asked(request: ChatRequest | CompletionRequest, extras: Extras) -> Asked:
    """Raises InvalidRequest and ApiError as `read_format` and `read_tools`."""
    tools = read_tools(request) if isinstance(request, ChatRequest) else None
    return Asked(read_format(request.response_format, extras), tools)


def template_variables(request: ChatRequest, extras: ChatExtras, template: ChatTemplate) -> Json | None:
    """Names for the template: the request's own, and how much to think where the template can be told.

    Raises:
        ApiError: it cannot.
    """
    effort = request.reasoning_effort
    if effort is None:
        return extras.chat_template_kwargs
    if "reasoning_effort" in template.variables and effort != "none":
        told: Json = {"reasoning_effort": effort}
    elif "enable_thinking" in template.variables:
        told = {"enable_thinking": effort != "none"}
    elif effort == "none":
        told = {}
    else:
        raise unsupported("reasoning_effort", "The model's template does not read it; leave it out.")
    return told | (extras.chat_template_kwargs or {})


def uses_tools(message: Json) -> bool:
    """Whether a message of the history calls a tool or is its result."""
    return message.get("role") == "tool" or bool(message.get("tool_calls"))
