"""Chat templates: rendered as transformers renders them, refused clearly, harmless when hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.loader import read_info
from engine.text.chat_template import CHATML, ChatTemplate, ChatTemplateError, with_objects

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "hi" & <b>wave</b>\n'},
    {"role": "assistant", "content": "hi 🙂"},
    {"role": "user", "content": "again"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
# Shapes that templates in the field have: whitespace control, loop controls, tojson, namespaces, macros, generation.
TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'system' %}{% continue %}{% endif %}\n[{{ m.role }}] "
    "{{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "{%- if tools %}{{ tools | tojson }}\n{{ tools | tojson(indent=2) }}{% endif %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{% macro show(m) %}<{{ m['role'] }}:{{ m['content'] }}>{% endmacro %}"
    "{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}",
]


@pytest.mark.parametrize("source", TEMPLATES, ids=range(len(TEMPLATES)))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers(source: str, add_generation_prompt: bool) -> None:
    rendered, _ = render_jinja_template(
        [MESSAGES],
        tools=TOOLS,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render(MESSAGES, tools=TOOLS, add_generation_prompt=add_generation_prompt) == rendered[0]


def test_the_files_template_makes_the_reference_prompts(smollm2_path: Path) -> None:
    template = ChatTemplate(read_info(smollm2_path).chat_template)
    case = next(case for case in REFERENCE["cases"] if case["name"] == "chat_fact")
    assert template.render([{"role": "user", "content": "What is the capital of France?"}]) == case["prompt"]


def test_text_parts_are_joined_and_other_parts_refused() -> None:
    template = ChatTemplate(None)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render([{"role": "user", "content": "ab"}])
    for content in ([{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], ["x"], 5):
        with pytest.raises(ChatTemplateError):
            template.render([{"role": "user", "content": content}])


def test_refusals_carry_the_templates_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render([])
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("\n{% if %}")
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages[0].nothing.at_all }}").render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(MESSAGES)


def test_variables_and_date_reach_the_template() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') | length }} {{ enable_thinking }}")
    assert template.render([], variables={"enable_thinking": False}) == "4 False"
    # `messages` cannot be overridden by a variable.
    assert ChatTemplate("{{ messages | length }}").render([], variables={"messages": [1]}) == "0"


DOCUMENTS = [{"title": "a", "text": "b"}]


def test_tools_and_documents_reach_the_template_as_in_transformers() -> None:
    source = "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}{{ tools[0].function.name }}"
    rendered, _ = render_jinja_template([MESSAGES], tools=TOOLS, documents=DOCUMENTS, chat_template=source)
    template = ChatTemplate(source)
    assert template.render(MESSAGES, tools=TOOLS, documents=DOCUMENTS) == rendered[0] == "a: bf"
    assert {"tools", "documents"} <= template.variables


def test_a_template_for_tools_serves_conversations_with_tools_only() -> None:
    template = ChatTemplate("plain {{ bos_token }}", bos_token="<s>", tool_source="{{ bos_token }} {{ tools[0].x }}")
    assert template.render(MESSAGES) == template.render(MESSAGES, tools=[]) == "plain <s>"
    assert template.render(MESSAGES, tools=[{"x": 1}]) == "<s> 1"
    assert "tools" in template.variables
    assert "x" in template.fields
    with pytest.raises(ChatTemplateError, match="broken at line 1"):
        ChatTemplate("", tool_source="{% if %}")


def test_arguments_of_tool_calls_are_objects_to_templates() -> None:
    def call(arguments: object) -> dict[str, object]:
        return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}

    assert with_objects(call('{"a": [1]}')) == call({"a": [1]})
    for other in ("not JSON", "[1]", "7", {"a": 1}, None):
        assert with_objects(call(other)) == call(other)
    for message in ({"role": "user"}, {"tool_calls": None}, {"tool_calls": ["x", {"function": None}]}):
        assert with_objects(message) == message
