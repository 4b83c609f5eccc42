"""Messages to prompt text, by the Jinja template that the model file carries.

The template comes from a file that someone downloaded, so it runs in Jinja's immutable sandbox, with the functions
that templates in the field expect (`raise_exception`, `strftime_now`, `tojson`). The sandbox bounds no work: a template
can loop for hours or ask for all memory, when it is rendered and even when it is compiled. So the engine does both in a
process that may be killed (`template_process.py`); what the HTTP process does here is parsing. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

import jinja2
from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Used when a file carries none: the ChatML layout, which most instruction models understand.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What a template finds under these names is not for a request to say.
RESERVED = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    )
) | frozenset(DEFAULT_NAMESPACE)


class ChatTemplateError(ValueError):
    """The template cannot be parsed, or refuses these messages. The message says which."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template. Raises ChatTemplateError at construction when its syntax is wrong.

    `fields`: the names of attributes and items that it reads of anything, fields of messages among them. `variables`:
    the names that it reads (`tools`, `enable_thinking`, its own ones among them). `tool_template`: the one that renders
    conversations with tools, where the model has a template of its own for them.
    """

    def __init__(
        self, source: str | None, *, bos_token: str = "", eos_token: str = "", tool_source: str | None = None
    ) -> None:
        """`source` None: the ChatML layout. `bos_token`, `eos_token`: texts that templates may insert."""
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now
        self.source = CHATML if source is None else source
        self.bos_token = bos_token
        self.eos_token = eos_token
        try:
            tree = self._environment.parse(self.source)
            self.fields = _fields(tree)
            self.variables = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
            self.constants = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise _broken(error) from error
        self.tool_template: ChatTemplate | None = None
        if tool_source is not None:
            self.tool_template = ChatTemplate(tool_source, bos_token=bos_token, eos_token=eos_token)
            self.fields |= self.tool_template.fields
            self.variables |= self.tool_template.variables

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except (jinja2.TemplateSyntaxError, RecursionError, MemoryError) as error:
            raise _broken(error) from error

    def compile(self) -> None:
        """Make it ready. Raises ChatTemplateError where that fails, an unknown filter for one."""
        _ = self._compiled
        if self.tool_template is not None:
            self.tool_template.compile()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages` (OpenAI's form: `role`, `content` as a string or a list of text parts).

        `tools`: definitions in OpenAI's form. `documents`: texts to answer from, for templates that know them.
        `variables` are further names for the template (`enable_thinking`, …). Raises ChatTemplateError when the
        template refuses the messages or they hold anything but text.
        """
        if tools and self.tool_template is not None:
            return self.tool_template.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
        context: dict[str, object] = dict(variables or {})
        context.update(
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            messages=[with_text(message) for message in messages],
            tools=list(tools) if tools is not None else None,
            documents=list(documents) if documents is not None else None,
            add_generation_prompt=add_generation_prompt,
        )
        try:
            return self._compiled.render(context)
        except ChatTemplateError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            IndexError,
            RecursionError,
        ) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        except MemoryError as error:
            raise ChatTemplateError("the model's chat template takes too much memory with these messages") from error


def with_text(message: Mapping[str, object]) -> dict[str, object]:
    """The message with its content as one string: text parts joined, None (a pure tool call) as the empty string."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"message content must be a string or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ChatTemplateError(f"this model reads text only, not a content part of type {kind!r}")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def with_objects(message: Mapping[str, object]) -> dict[str, object]:
    """The message with the arguments of its tool calls as objects, which templates iterate over or write as JSON.

    The API has them as JSON texts; arguments that are no JSON object stay as they are.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


def _fields(tree: nodes.Template) -> frozenset[str]:
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    items = {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    return frozenset(attributes | {item for item in items if isinstance(item, str)})


def _broken(error: Exception) -> ChatTemplateError:
    where = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    text = str(error) or type(error).__name__
    return ChatTemplateError(f"the model's chat template is broken{where}: {text}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes for HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise ChatTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
