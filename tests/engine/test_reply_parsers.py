"""Thoughts, text and calls found in generated text: the same ones however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.reasoning import Thinking
from engine.server.reply import Call, PlainText, Reply, cut
from engine.server.tools.families import FAMILIES
from engine.server.tools.harmony import Harmony
from engine.server.tools.tool import Tool

TOOLS = [
    Tool("get_weather", {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}}),
    Tool("add", {"properties": {"a": {"type": "integer"}, "b": {}, "text": {"type": "string"}}}),
]
WEATHER = '{"city": "Zürich 🏔", "days": [1, {"x": "}]"}], "say": "\\"<tool_call>\\""}'


def read(parser, pieces, *, cut_off=False) -> Reply:
    reply = Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish(cut_off=cut_off))
    return reply


def make(family, *, thinking=None):
    calls = Harmony() if family == "harmony" else FAMILIES[family].parser(TOOLS)
    return calls if thinking is None else Thinking(calls, opened=thinking)


def cuts(text: str, places) -> list[str]:
    edges = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in pairwise(edges)]


# (family, generated text, text of the answer, calls)
CASES = [
    ("hermes", "Just text.\n", "Just text.\n", []),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        "Let me see.",
        [("get_weather", WEATHER)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>\n{"arguments": {}, "name": "add"}'
        "</tool_call>\n",
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", "<tool_call> is how it is done", "<tool_call> is how it is done", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ', "", [("add", '{"a": ')]),
    ("hermes", '<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("llama3", f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [("get_weather", WEATHER)]),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 2}}; {"name": "add", "parameters": {}}',
        "",
        [("add", '{"a": 2}'), ("add", "{}")],
    ),
    ("llama3", '{"answer": 42, "name": "add"}', '{"answer": 42, "name": "add"}', []),
    ("llama3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama3", 'It is {"name": "add", "parameters": {}}', 'It is {"name": "add", "parameters": {}}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": [1]}}, {"name": "add", "arguments": {}, "id": "123456789"}]',
        "",
        [("add", '{"a": [1]}'), ("add", "{}")],
    ),
    ("mistral", 'Hm.[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 2}', "Hm.", [("add", '{"a": 1}'), ("add", '{"a": 2}')]),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS]what is this", "[TOOL_CALLS]what is this", []),
    (
        "phi4",
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]<|/tool_call|>',
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    ("gemma", '```tool_code\n{"name": "add", "arguments": {"a": 1}}\n```', "", [("add", '{"a": 1}')]),
    ("gemma", "```tool_code\nprint(add(a=1, text='it\\'s'))\n```", "", [("add", '{"a": 1, "text": "it\'s"}')]),
    ("gemma", "```tool_code\n[default_api.add(a=-1.5), add()]\n```", "", [("add", '{"a": -1.5}'), ("add", "{}")]),
    ("gemma", "```tool_code\nadd()```tool_code\nadd(a=1)\n```", "", [("add", "{}"), ("add", '{"a": 1}')]),
    ("gemma", "```tool_code\nprint(1 + 1)\n```", "```tool_code\nprint(1 + 1)\n```", []),
    (
        "pythonic",
        "[add(a=1), get_weather(city='Rome')]",
        "",
        [("add", '{"a": 1}'), ("get_weather", '{"city": "Rome"}')],
    ),
    ("pythonic", "add(a=1) is a call", "add(a=1) is a call", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[add(1)]", "[add(1)]", []),
    (
        "pythonic",
        r"""[add(text="a\"b\n\x41\u00e9\q", b=[True, None, {'x': (1, "}),")}], a=0x10,)]""",
        "",
        [("add", r"""{"text": "a\"b\nAé\\q", "b": [true, null, {"x": [1, "}),"]}], "a": 16}""")],
    ),
    ("pythonic", '''[add(text="""say "hi"\n""", b='')]''', "", [("add", r"""{"text": "say \"hi\"\n", "b": ""}""")]),
    ("pythonic", "[add(text='one ' 'two', b=true)]", "", [("add", '{"text": "one two", "b": true}')]),
    ("pythonic", r"[add(text='\ud83d\ude00')]", "", [("add", r"""{"text": "\ud83d\ude00"}""")]),
    (
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=text>\n<b>\n</parameter\n\n"
        "</parameter>\n</function>\n</tool_call>\n",
        "Well.",
        [("add", '{"a": 3, "text": "<b>\\n</parameter\\n"}')],
    ),
    (
        "qwen3_coder",
        '<tool_call><function=get_weather><parameter=city>Zürich "x"</parameter>'
        "<parameter=days>[1, 'b', True]</parameter></function></tool_call>\n<tool_call>\n<function=add>\n</function>\n"
        "</tool_call>",
        "",
        [("get_weather", '{"city": "Zürich \\"x\\"", "days": [1, "b", true]}'), ("add", "{}")],
    ),
    ("qwen3_coder", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "", [("add", "{}")]),
    ("qwen3_coder", "<tool_call>\n<fun", "<tool_call>\n<fun", []),
    (
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>twelve</parameter></function></tool_call>",
        "",
        [("add", '{"a": "twelve"}')],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
        "Four.",
        [],
    ),
    (
        "harmony",
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "",
        [("add", '{"a": 1}')],
    ),
]


@pytest.mark.parametrize(("family", "generated", "text", "calls"), CASES)
def test_what_families_write_is_read_and_in_pieces_of_one_character_the_same(family, generated, text, calls) -> None:
    expected = [Call(*call) for call in calls]
    halves = ([generated[:at], generated[at:]] for at in range(1, len(generated)))
    for pieces in ([generated], list(generated), cuts(generated, range(0, 999, 7)), *halves):
        reply = read(make(family), pieces)
        assert (reply.text, reply.calls) == (text, expected)


@pytest.mark.parametrize(
    ("family", "generated", "text", "calls"),
    [
        ("hermes", 'Well. <tool_call>\n{"nam', "Well.", []),
        ("hermes", "<tool_call>", "", []),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "n', "", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1', "", [("add", '{"a": [1')]),
        ("hermes", '<tool_call>{"name": "add"}\n<tool_call>{"name": "ad', "", [("add", "{}")]),
        ("hermes", "a <tool_c", "a", []),
        ("hermes", "if a <", "if a <", []),
        ("hermes", "<tool_call> is how", "<tool_call> is how", []),
        ("llama3", '{"name": "ad', "", []),
        ("llama3", '{"answer": 4', '{"answer": 4', []),
        ("mistral", "[TOOL_CALLS]ad", "", []),
        ("mistral", '[TOOL_CALLS]add{"a": ', "", [("add", '{"a": ')]),
        ("phi4", '<|tool_call|>[{"na', "", []),
        ("gemma", "```tool_code\n", "", []),
        ("gemma", "Code: ```", "Code: ```", []),
        ("harmony", "<|channel|>commentary to=functions.a", "", []),
        ("qwen3_coder", "<tool_call>\n<function=ad", "", []),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=text>\nSo fa", "", [("add", '{"text": "So fa')]),
        ("pythonic", "[add(", "", []),
        ("pythonic", "[add(a=1, text='So fa", "", [("add", '{"a": 1, "text": "So fa')]),
    ],
)
def test_a_call_that_was_cut_off_leaks_no_marker(family, generated, text, calls) -> None:
    expected = [Call(*call) for call in calls]
    for pieces in ([generated], list(generated)):
        reply = read(make(family), pieces, cut_off=True)
        assert (reply.text, reply.calls) == (text, expected)


FRAGMENTS = [
    "text ",
    "\n",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "```tool_code",
    "```",
    '{"name": "add", "arguments": {"a": [1, "}"]}}',
    '{"parameters": {"b": null}, "name": "add"}',
    'add{"x": 1}',
    "<function=add>",
    "<parameter=text>\n",
    "\n</parameter>",
    "</function>",
    "add(",
    "text='",
    "b=",
    "')",
    "\\",
    "[ARGS]",
    '{"name": ',
    '"',
    "\\",
    "}",
    "[",
    ",",
    "<think>",
    "</think>",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
    "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
    "日本",
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([*FAMILIES, "harmony"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from([None, True, False]),
    st.booleans(),
)
def test_the_reply_is_the_same_however_the_text_is_cut(family, generated, places, thinking, cut_off) -> None:
    whole = read(make(family, thinking=thinking), [generated], cut_off=cut_off)
    assert read(make(family, thinking=thinking), cuts(generated, places), cut_off=cut_off) == whole
    assert read(make(family, thinking=thinking), list(generated), cut_off=cut_off) == whole
    if not cut_off and not whole.calls and not whole.thoughts and family != "harmony" and thinking is None:
        assert whole.text == generated, "what is no call is text, to the letter"


@given(st.text(alphabet="ab<>", max_size=12), st.lists(st.sampled_from(["<a>", "<ab", "b>"]), min_size=1, max_size=3))
def test_nothing_that_may_be_a_marker_leaves_too_early(text, markers) -> None:
    before, marker, rest = cut(text, markers)
    if marker is None:
        assert before + rest == text
        assert not any(m in text for m in markers)
        assert any(m.startswith(rest) for m in markers)
        assert not any(m.startswith(text[i:]) for m in markers for i in range(len(before)))
    else:
        assert before + marker + rest == text
        assert text.find(marker) == min(text.find(m) for m in markers if m in text)


@pytest.mark.parametrize(
    ("generated", "opened", "thoughts", "text"),
    [
        ("<think>\nWell, well.\n</think>\n\nFour.", False, "Well, well.", "Four."),
        ("\n<think>x</think>y", False, "x", "y"),
        ("Well.\n</think>\n\nFour. <think>", True, "Well.", "Four. <think>"),
        ("No thought < here", False, "", "No thought < here"),
        ("  <thin", False, "", "  <thin"),
        ("never closed </thi ", True, "never closed </thi", ""),
        ("<think></think>", False, "", ""),
        ("</think>\n\nYes", True, "", "Yes"),
    ],
)
def test_thoughts_are_told_from_what_is_said(generated, opened, thoughts, text) -> None:
    for pieces in ([generated], list(generated)):
        parser = Thinking(PlainText(), opened=opened)
        reply = read(parser, pieces)
        assert (reply.thoughts, reply.text) == (thoughts, text)
        if parser.spans:
            start, end = parser.spans[0]
            assert generated[start:end].count("</think>") == generated.count("</think>")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_arguments_come_out_as_they_were_written(value) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    generated = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    assert read(make("hermes"), [generated]).calls == [Call("add", arguments)]
