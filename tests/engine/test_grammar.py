"""Grammars: compiled within bounds, and masks that agree with independent judges of the same text."""

from __future__ import annotations

import json
import random
import re
import select

import jsonschema
import numpy as np
import pytest

from engine.grammar import lark
from engine.grammar.checker import GrammarChecker
from engine.grammar.compiling import Compiler, GrammarError, Grammars, Vocabulary
from engine.grammar.lark import Grammar
from engine.types import GrammarFailed

END, CALL = 0, 1
WORDS = ["true", "false", "null", '"a"', '": ', "name", "12", "  ", "\n\n", "</think>", "<tool_call>", "{}"]
TOKENS = [b"<end>", b"<call>", *(bytes([i]) for i in range(256)), *map(str.encode, WORDS)]
VOCABULARY = Vocabulary(TOKENS, [END, CALL], [END], len(TOKENS) + 7)
WIDTH = -(-VOCABULARY.size // 32)
MARK = lark.marker({"<call>": CALL})
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 12},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "kind": {"enum": ["home", "work"]},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/note"}, {"type": "null"}]},
    },
    "required": ["street", "zip", "kind"],
    "additionalProperties": False,
    "$defs": {"note": {"type": "object", "properties": {"b": {"type": "boolean"}}, "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(VOCABULARY)


def ids(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def start(compiler, expression, *rules):
    return compiler.compile(Grammar((f"start: {expression}", *rules)).text())


def allowed(state, drafts=()):
    """The allowed tokens of each row that `fill` writes."""
    out = np.full((1 + len(drafts), WIDTH), -1, dtype=np.int32)
    rows = state.fill(drafts, out)
    bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
    return [set(bits[row].nonzero()[0].tolist()) for row in range(rows)]


def walk(state, seed, most=4000):
    """A random text of the grammar, as bytes; prefers the end where it is allowed."""
    chooser = random.Random(seed)
    text = b""
    for _ in range(most):
        if state.is_complete:
            return text
        [tokens] = allowed(state)
        if END in tokens and chooser.random() < 0.5:
            return text
        token = chooser.choice(sorted(tokens - {END}))
        text += TOKENS[token]
        state.accept([token])
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_schema_lets_through_is_valid_by_another_validator(compiler, seed) -> None:
    value = json.loads(walk(start(compiler, lark.schema(ADDRESS)), seed))
    jsonschema.Draft202012Validator(ADDRESS).validate(value)


@pytest.mark.parametrize("pattern", [r"\d{3}-[a-f]+", "a/b|c\\/d", "(x|yy)*z", "line\nline", r"\\/"])
def test_whatever_a_regex_lets_through_matches_it(compiler, pattern) -> None:
    for seed in range(4):
        assert re.fullmatch(pattern, walk(start(compiler, lark.regex(pattern)), seed).decode())


def test_digits_are_the_ten_of_ascii(compiler) -> None:
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": r"^[\d-]\d\\d$"}}}
    schema["required"], schema["additionalProperties"] = ["pattern"], False
    for seed in range(6):
        assert re.fullmatch(r"[0-9a-]{3}", walk(start(compiler, lark.regex(r"[a\d-]{2}\d")), seed).decode())
        value = json.loads(walk(start(compiler, lark.schema(schema)), seed))
        assert re.fullmatch(r"[0-9-][0-9]\\d", value["pattern"])
    assert allowed(start(compiler, lark.schema({"const": {"pattern": r"\d"}})))


def test_a_choice_is_one_of_its_texts_and_every_one_of_them(compiler) -> None:
    texts = ['say "hi"', "two\nlines", "back\\slash", "日本", "a", "ab", "1/2 [x] (y)? #<z>\r\t&~", ".*", r"\d\n"]
    assert {walk(start(compiler, lark.choice(texts)), seed).decode() for seed in range(120)} == set(texts)


def test_a_choice_may_be_of_thousands_that_begin_alike(compiler) -> None:
    texts = [f"product {number:05}" for number in range(12_000)]
    assert walk(start(compiler, lark.choice(texts)), 1).decode() in texts


def test_a_grammar_that_gets_too_complex_fails_with_the_reason(compiler) -> None:
    texts = " | ".join(lark.literal(f"product {number}") for number in range(2100))
    state = start(compiler, f'"ab" ({texts})')
    state.accept(ids("a"))
    assert allowed(state) == [set(ids("b"))], "the mask takes little"
    with pytest.raises(GrammarFailed, match=r"too complex.*max is 2000"):
        state.accept(ids("b"))
    with pytest.raises(GrammarError, match=r"too complex.*max is 2000"):
        start(compiler, texts)


@pytest.mark.parametrize("users", [None, 'start: "name: true"', 'root ::= "name: true"'])
def test_a_text_that_must_come_may_come_in_any_tokens(compiler, users) -> None:
    rule = "start: " + (lark.literal("name: true") if users is None else lark.USERS)
    state = compiler.compile(Grammar((rule,), users).text())
    assert allowed(state) == [{*ids("n"), TOKENS.index(b"name")}]
    state.accept([TOKENS.index(b"name"), *ids(": ")])
    assert allowed(state) == [{*ids("t"), TOKENS.index(b"true")}]


def test_each_mask_holds_exactly_the_tokens_that_can_be_accepted(compiler) -> None:
    state = start(compiler, lark.schema(ADDRESS))
    for byte in b'{"street": "':
        [tokens] = allowed(state)
        for token in range(len(TOKENS)):
            copy = state.copy()
            if token in tokens:
                copy.accept([token])
            else:
                with pytest.raises(GrammarFailed, match="does not allow"):
                    copy.accept([token])
        assert max(tokens) < len(TOKENS), "padding of the vocabulary is never allowed"
        state.accept([byte + 2])


def test_the_end_is_allowed_only_where_the_grammar_accepts(compiler) -> None:
    state = start(compiler, lark.regex("ab+"))
    assert allowed(state) == [{ids("a")[0]}]
    state.accept(ids("ab"))
    assert allowed(state) == [{END, ids("b")[0]}]
    assert not state.is_complete
    state.accept([END])
    assert state.is_complete


def test_a_grammar_with_nothing_more_to_say_is_complete_without_an_end_token(compiler) -> None:
    state = start(compiler, lark.any_object())
    state.accept(ids('{"a": [1]'))
    assert not state.is_complete
    state.accept(ids("}"))
    assert state.is_complete
    assert allowed(state) == [{END}]


def test_drafts_get_a_row_each_and_leave_the_state_where_it_was(compiler) -> None:
    state = start(compiler, lark.schema(ADDRESS))
    state.accept(ids('{"str'))
    before = allowed(state)
    expected = []
    ahead = state.copy()
    for token in ids('eet": "x'):
        expected += allowed(ahead)
        ahead.accept([token])
    expected += allowed(ahead)
    assert allowed(state, ids('eet": "x')) == expected
    assert allowed(state, ids("eeX")) == expected[:3], "stops at the draft that is refused"
    assert allowed(state, [CALL]) == before
    assert allowed(state) == before
    state.accept(ids('eet": "x'))
    assert allowed(state) == allowed(ahead)


def test_drafts_past_the_end_are_refused_and_forgotten(compiler) -> None:
    state = start(compiler, lark.regex("ab?"))
    state.accept(ids("a"))
    rows = allowed(state, [END, END])
    assert rows[0] == {END, ids("b")[0]}
    assert allowed(state) == rows[:1]


@pytest.mark.parametrize("gap", ['{"a":', '{"a":1', "{"])
def test_white_space_is_bounded_everywhere(compiler, gap) -> None:
    shape = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    state = start(compiler, lark.schema(shape))
    state.accept(ids(gap))
    for _ in range(60):
        [tokens] = allowed(state)
        blank = [t for t in ids(" \n\t") if t in tokens]
        if not blank:
            return
        state.accept([random.Random(len(tokens)).choice(blank)])
    raise AssertionError("white space without end")


def test_pretty_printed_json_fits_the_bound(compiler) -> None:
    value = {"a": [1, {"b": {"c": [2, {"d": None}]}}]}
    state = start(compiler, lark.any_object())
    state.accept(ids(json.dumps(value, indent=4)))
    assert state.is_complete


def test_clients_cannot_change_how_schemas_are_compiled(compiler) -> None:
    with pytest.raises(GrammarError, match="not"):
        start(compiler, lark.schema({"not": {"type": "null"}, "x-guidance": {"lenient": True}}))
    start(compiler, lark.schema({"not": {"type": "null"}}, lenient=True))


def test_control_tokens_are_no_text(compiler) -> None:
    assert allowed(start(compiler, lark.regex("(?s:.*)")))[0] & {CALL} == set()
    state = start(compiler, f'"a" {MARK("<call>")} "b"')
    state.accept(ids("a"))
    assert allowed(state) == [{CALL}]


@pytest.mark.parametrize(("end", "token"), [("</think>", None), ("<call>", CALL)])
def test_a_text_up_to_a_marker_ends_with_the_first_one(compiler, end, token) -> None:
    head, rules = lark.up_to(end, "thinking", MARK)
    state = start(compiler, f'{head} "yes"', *rules)
    state.accept(ids("anything {\n at < all </thin"))
    state.accept([token] if token is not None else ids(end))
    assert allowed(state) == [{ids("y")[0]}]


def test_tags_in_a_text_are_followed_by_what_they_announce(compiler) -> None:
    tags = {"<tool_call>": [lark.literal('{"x":') + " " + lark.regex("[0-9]") + ' "}"']}
    state = compiler.compile(Grammar(tuple(lark.text_with_tags("start", tags, MARK))).text())
    state.accept(ids('well <tool_call>{"x":1} and <tool_call>'))
    assert allowed(state) == [{ids("{")[0]}]
    once = compiler.compile(Grammar(tuple(lark.text_with_tags("start", tags, MARK, only_one=True))).text())
    assert END in allowed(once)[0]
    once.accept(ids('well <tool_call>{"x":1}'))
    assert once.is_complete


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


HOSTILE = {
    "depth": (Grammar(("start: " + lark.schema(nested(200)),)), "recursion|nested|deep"),
    "enum": (Grammar(("start: " + lark.schema({"enum": [f"value {i}" for i in range(99_999)]}),)), "characters"),
    "remote": (Grammar(("start: " + lark.schema({"$ref": "http://127.0.0.1:9/x.json"}),)), "does not fetch"),
    "file": (Grammar(("start: " + lark.schema({"$ref": "file:///etc/passwd"}),)), "does not fetch"),
    "endless": (
        Grammar(("start: " + lark.schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),)),
        "nothing that can be generated",
    ),
    "nothing": (Grammar(("start: " + lark.schema(False),)), "Unsatisfiable|empty"),
    "regex syntax": (Grammar(("start: " + lark.regex("a("),)), "unclosed group"),
    "look-around": (Grammar(("start: " + lark.schema({"type": "string", "pattern": "(?=a)b"}),)), "look-around"),
    "left": (Grammar(("start: start",)), "nothing that can be generated"),
    "unknown rule": (Grammar((f"start: {lark.USERS}",), "start: foo"), "unknown name"),
    "brackets": (Grammar((f"start: {lark.USERS}",), "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
    "gbnf": (Grammar((f"start: {lark.USERS}",), "root ::= ((("), "GBNF"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_with_the_compilers_reason(compiler, name) -> None:
    grammar, reason = HOSTILE[name]
    with pytest.raises((GrammarError, ValueError), match=reason) as raised:
        compiler.compile(grammar.text())
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("pattern", ["(x{1000}){1000}", "(((a{100}){100}){100})", "(.*a){25}", ".*" * 50])
def test_catastrophic_patterns_end_their_own_request_at_worst(compiler, pattern) -> None:
    """What compiles goes on in bounded steps, or fails as a grammar; it never hangs and never raises anything else."""
    try:
        state = start(compiler, lark.regex(pattern))
        for _ in range(20):
            [tokens] = allowed(state)
            state.accept([min(tokens - {END})])
    except (GrammarError, GrammarFailed):
        pass


@pytest.fixture
async def checker():
    checker = GrammarChecker(lambda: VOCABULARY, cpu_seconds=1)
    yield checker
    await checker.stop()


async def test_what_the_checking_process_lets_through_compiles_to_the_same(checker, compiler) -> None:
    digits = Grammar((f"start: {lark.USERS}",), 'root ::= [0-9]+ "!"')
    text = await checker.check(digits)
    assert re.fullmatch(r"[0-9]+!", walk(compiler.compile(text), 1).decode())
    assert await checker.check(Grammar((f"start: {lark.USERS}",), 'root ::= [0-9]+ "!"')) == text
    with pytest.raises(GrammarError, match="unknown name"):
        await checker.check(Grammar(("start: foo",)))


async def test_a_grammar_that_takes_too_long_is_stopped_and_the_next_one_checked() -> None:
    slow = Grammar((f"start: {lark.USERS}",), "root ::= " + " ".join(f'("{i}" | "x")?' for i in range(60_000)))
    checker = GrammarChecker(lambda: VOCABULARY, cpu_seconds=1)
    try:
        with pytest.raises(GrammarError, match="processor time"):
            await checker.check(slow)
        assert await checker.check(Grammar(('start: "a"',)))
    finally:
        await checker.stop()


async def test_a_compiler_that_is_killed_is_replaced(checker) -> None:
    await checker.check(Grammar(('start: "a"',)))
    process = checker._process._process
    process.kill()
    assert await checker.check(Grammar(('start: "b"',)))


def test_the_core_gets_its_grammars_from_a_thread_and_is_woken() -> None:
    loads = []
    grammars = Grammars(lambda: loads.append(1) or Compiler(VOCABULARY))
    try:
        assert grammars.take() == []
        text = Grammar(('start: "ab"',)).text()
        for number, asked in enumerate([text, "start: nobody", text]):
            grammars.ask(number, asked)
        done = {}
        while len(done) < 3:
            select.select([grammars], [], [])
            done.update(grammars.take())
        assert isinstance(done[1], GrammarError)
        done[0].accept(ids("a"))
        assert allowed(done[0]) == [{ids("b")[0]}]
        assert allowed(done[2]) == [{ids("a")[0]}], "requests with one grammar do not share a state"
        assert loads == [1]
    finally:
        grammars.close()
