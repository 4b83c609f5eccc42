"""What a request asks of an answer, held to by grammar and found again by the parser, for every family."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from backends.protocol import ChatRequest, Message
from engine.grammar import lark
from engine.grammar.compiling import Compiler, Vocabulary
from engine.server.asked import Asked
from engine.server.parsers import HARMONY, TOOL_PARSERS
from engine.server.reply import Reply
from engine.server.reply_form import ReplyForm
from engine.server.structured import Format
from engine.server.tools.families import FAMILIES
from engine.server.tools.harmony import MARKERS
from engine.server.tools.prompting import tell
from engine.server.tools.request import ToolUse, read_tools
from engine.server.tools.tool import Tool
from engine.text.chat_template import CHATML, ChatTemplate
from engine.types import GrammarFailed

CONTROL = ["<end>", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>", *MARKERS]
TOKENS = [*map(str.encode, CONTROL), *(bytes([i]) for i in range(256)), b'{"', b'": ', b"</", b"think>", b"<tool"]
VOCABULARY = Vocabulary(TOKENS, list(range(len(CONTROL))), [0], len(TOKENS))
IDS = {name: i for i, name in enumerate(CONTROL)}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "at": {"$ref": "#/$defs/when"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"when": {"type": "object", "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 31}}}},
}
TOOLS = (Tool("get_weather", CITY), Tool("stop", {"type": "object", "properties": {}, "additionalProperties": False}))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
FORMS = {
    "mistral": ChatTemplate("[TOOL_CALLS]{{ tools }}"),
    "llama3": ChatTemplate("<|python_tag|>{{ tools }}"),
    "phi4": ChatTemplate("<|tool_call|>{{ tools }}"),
    "hermes": ChatTemplate("<tool_call></think>{{ tools }}"),
    "qwen3_coder": ChatTemplate("<tool_call><function=name>{{ tools }}"),
    "pythonic": ChatTemplate("[func_name1(params)]{{ tools }}"),
    "gemma": ChatTemplate("tool_code"),
    "harmony": ChatTemplate("<|channel|>{{ tools }}"),
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY)


def test_the_command_line_knows_every_family() -> None:
    assert ("auto", *FAMILIES, HARMONY) == TOOL_PARSERS


def use(*, required=True, several=True, strict=False) -> ToolUse:
    return ToolUse(tuple(Tool(t.name, t.parameters, strict) for t in TOOLS), [], required, several)


def walk(compiler, grammar, seed, most=3000) -> tuple[str, bool]:
    """A random answer under the grammar, as the parser sees it; whether it is complete."""
    chooser, text = random.Random(seed), b""
    state = compiler.compile(grammar.text())
    out = np.zeros((1, -(-VOCABULARY.size // 32)), dtype=np.int32)
    for _ in range(most):
        if state.is_complete:
            return text.decode(errors="replace"), True
        state.fill((), out)
        allowed = np.flatnonzero(np.unpackbits(out.view(np.uint8)[0], bitorder="little")).tolist()
        if 0 in allowed and (len(allowed) == 1 or chooser.random() < 0.4):
            return text.decode(errors="replace"), True
        # Free text would go on for long: what ends it is preferred.
        ends = [t for t in allowed if t and (TOKENS[t] in (b"</", b"think>", b"<tool") or t < len(CONTROL))]
        token = chooser.choice(ends if ends and chooser.random() < 0.5 else [t for t in allowed if t])
        text += TOKENS[token]
        state.accept([token])
    return text.decode(errors="replace"), False


def read(form, asked, text, *, in_thought=False) -> Reply:
    reply = Reply()
    parser = form.parser(asked, in_thought=in_thought)
    for character in text:
        reply.add(parser.push(character))
    reply.add(parser.finish(cut_off=False))
    return reply


def check_calls(reply) -> None:
    for call in reply.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("name", FORMS)
def test_the_family_is_known_by_its_template(name) -> None:
    form = ReplyForm.choose(FORMS[name], IDS)
    assert form.is_harmony == (name == "harmony")
    if name != "harmony":
        assert form.family is FAMILIES[name]
    assert form.thinks == (name in ("hermes", "harmony"))
    assert form.reads_tools == (name != "gemma")


def test_settings_overrule_the_template_and_contradictions_are_refused() -> None:
    form = ReplyForm.choose(FORMS["hermes"], IDS, tools="mistral", reasoning="none")
    assert (form.family, form.thinks) == (FAMILIES["mistral"], False)
    with pytest.raises(ValueError, match="both or for neither"):
        ReplyForm.choose(FORMS["hermes"], IDS, tools="harmony", reasoning="think")


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_required_calls_are_made_and_read_again(compiler, name, several) -> None:
    form = ReplyForm.choose(FORMS[name], IDS)
    asked = Asked(tools=use(several=several))
    counts = set()
    for seed in range(12):
        text, complete = walk(compiler, form.grammar(asked, in_thought=False), seed)
        reply = read(form, asked, text)
        if complete:
            assert reply.text == ""
            counts.add(len(reply.calls))
            check_calls(reply)
    assert 0 not in counts
    assert 1 in counts
    assert (max(counts) > 1) == (several and name not in ("llama3", "harmony"))


def ids(text) -> list[int]:
    """Tokens of a text with control tokens in it."""
    tokens = []
    while text:
        name = next((name for name in CONTROL if text.startswith(name)), None)
        piece = name or text[0]
        tokens += [IDS[name]] if name else [len(CONTROL) + byte for byte in piece.encode()]
        text = text[len(piece) :]
    return tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_free_answers_keep_to_the_schema_where_they_call(compiler, name) -> None:
    form = ReplyForm.choose(FORMS[name], IDS)
    family = form.family
    asked = Asked(tools=use(required=False, strict=True))
    grammar = form.grammar(asked, in_thought=False)
    for city, fits in (("Oslo", True), ("Paris", False)):
        call = family.style.write("get_weather", json.dumps({"city": city})).replace("'", '"')
        call = f"[{call}]" if family.listed else call
        said = "Let me see. " if family.open else ""
        text = said + family.before + call + family.after
        state = compiler.compile(grammar.text())
        if fits:
            state.accept(ids(text))
            assert [call.name for call in read(form, asked, text).calls] == ["get_weather"]
        else:
            with pytest.raises(GrammarFailed):
                state.accept(ids(text))
        compiler.compile(grammar.text()).accept(ids("No call at all.\n"))
    assert form.grammar(Asked(tools=use(required=False)), in_thought=False) is None


@pytest.mark.parametrize("in_thought", [True, False])
@pytest.mark.parametrize("name", ["hermes", "harmony", "mistral"])
def test_a_format_holds_after_the_thoughts(compiler, name, in_thought) -> None:
    form = ReplyForm.choose(FORMS[name], IDS)
    asked = Asked(format=Format("response_format", lark.schema(CITY)))
    thoughts = 0
    for seed in range(12):
        text, complete = walk(compiler, form.grammar(asked, in_thought=in_thought), seed, most=600)
        if complete:
            reply = read(form, asked, text, in_thought=in_thought)
            jsonschema.validate(json.loads(reply.text), CITY)
            thoughts += bool(reply.thoughts)
    assert bool(thoughts) == form.thinks


def test_with_tools_and_a_format_an_answer_is_one_or_the_other(compiler) -> None:
    form = ReplyForm.choose(ChatTemplate(CHATML), {})
    asked = Asked(format=Format("response_format", lark.schema(CITY)), tools=use(required=False))
    kinds = set()
    for seed in range(12):
        text, complete = walk(compiler, form.grammar(asked, in_thought=False), seed)
        if complete:
            reply = read(form, asked, text)
            kinds.add("calls" if reply.calls else "text")
            check_calls(reply)
            if not reply.calls:
                jsonschema.validate(json.loads(reply.text), CITY)
    assert kinds == {"calls", "text"}


def test_a_clients_grammar_goes_along_with_thoughts(compiler) -> None:
    form = ReplyForm.choose(FORMS["hermes"], IDS)
    asked = Asked(format=Format("structured_outputs.grammar", lark.USERS, users='start: "yes" | "no"'))
    grammar = form.grammar(asked, in_thought=False)
    answers = {read(form, asked, walk(compiler, grammar, seed)[0]).text for seed in range(12)}
    assert answers <= {"yes", "no"}
    assert answers


def test_only_the_markers_of_the_form_are_shown_to_the_parser() -> None:
    form = ReplyForm.choose(FORMS["phi4"], IDS)
    assert form.markers(Asked()) == frozenset()
    assert form.markers(Asked(tools=use())) == {IDS["<|tool_call|>"], IDS["<|/tool_call|>"]}
    assert len(ReplyForm.choose(FORMS["harmony"], IDS).markers(Asked())) == len(MARKERS)


def test_allowed_tools_are_all_that_the_model_is_told_of() -> None:
    definitions = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [definitions[2], definitions[0]]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        request = ChatRequest("m", [Message("user", "x")], tools=definitions, tool_choice=choice)
        use = read_tools(request)
        assert use is not None
        assert [tool.name for tool in use.tools] == ["f", "h"]
        assert use.definitions == [definitions[0], definitions[2]]
        assert use.required == (mode == "required")


def test_a_model_whose_template_knows_no_tools_is_told_in_the_system_message() -> None:
    definitions = [{"type": "function", "function": {"name": "stop", "description": "Stops."}}]
    call = {"id": "1", "type": "function", "function": {"name": "stop", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Stop!"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "stopped"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "again"}]},
        {"role": "user", "content": "Thanks."},
    ]
    before = json.dumps(messages)
    told = tell(messages, definitions, FAMILIES["hermes"])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert "Stops." in told[0]["content"]
    assert told[2]["content"].count('<tool_call>\n{"name": "stop", "arguments": {"a": 1}}\n</tool_call>') == 2
    assert told[3]["content"].count("<tool_response>") == 2
    assert all(message.keys() <= {"role", "content", "tool_call_id"} for message in told)
    assert json.dumps(messages) == before
    assert tell(messages[1:2], [], FAMILIES["hermes"]) == messages[1:2]
