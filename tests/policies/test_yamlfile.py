"""YAML with positions: every fault says where it is, and hostile files are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from policies import yamlfile
from policies.yamlfile import InvalidFile, Problem


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: str = "red"
    size: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    items: tuple[Inner, ...] = ()
    named: dict[str, Inner] = {}


def faults(text: str) -> list[Problem]:
    with pytest.raises(InvalidFile) as caught:
        yamlfile.validate(yamlfile.parse(text, "f.yaml"), Outer)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "where", "suggestion"),
    [
        ("name: a\nitems:\n  - colour: x\n    siez: 2\n", (4, 5), "size"),
        ("name: a\nnamed:\n  one:\n    color: x\n", (4, 5), "colour"),
        ("nane: a\n", (1, 1), "name"),
        ("name: a\nzzz: 1\n", (2, 1), None),
    ],
)
def test_unknown_key(text: str, where: tuple[int, int], suggestion: str | None) -> None:
    problem = faults(text)[0]
    assert (problem.line, problem.column) == where
    assert "unknown key" in problem.message
    assert problem.suggestion == suggestion
    assert suggestion is not None or "Known keys here: items, name, named." in problem.message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("nám\u0065", "It holds U+00E1 (LATIN SMALL LETTER A WITH ACUTE)."),
        ("n\u0430me", "It holds U+0430 (CYRILLIC SMALL LETTER A)."),
        ("name\u200b", "It holds U+200B (ZERO WIDTH SPACE)."),
    ],
)
def test_a_key_that_only_looks_right_has_its_odd_character_named(key: str, words: str) -> None:
    (problem,) = faults(f"{key}: a\n")
    assert words in problem.message
    assert problem.suggestion == "name"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nshort: abcd\n", "'short': it must have at most 3 characters, and has 4."),
        ("name: a\nshort: ''\n", "'short': it must not be empty."),
        ("name: a\nlong: a\n", "'long': it must have at least 2 characters, and has 1."),
        ("name: a\nfew: [1, 2, 3]\n", "'few': it must have at most 1 entry, and has 3."),
        ("name: a\nfew: []\n", "'few': it must not be empty."),
        ("name: a\npairs: {a: 1}\n", "'pairs': it must have at least 2 entries, and has 1."),
        ("name: a\nbig: 1\n", "'big': it must be greater than 5."),
        ("name: a\nlower: A\n", "'lower': it must match pattern '^[a-z]$'."),
    ],
)
def test_bounds_are_said_in_plain_words(text: str, words: str) -> None:
    class Bounded(BaseModel):
        name: str
        short: str = Field("a", min_length=1, max_length=3)
        long: str = Field("aa", min_length=2)
        few: tuple[int, ...] = Field((1,), min_length=1, max_length=1)
        pairs: dict[str, int] = Field({}, min_length=2)
        big: int = Field(6, gt=5)
        lower: str = Field("a", pattern="^[a-z]$")

    with pytest.raises(InvalidFile) as caught:
        yamlfile.validate(yamlfile.parse(text, "f.yaml"), Bounded)
    assert [problem.message for problem in caught.value.problems] == [words]


def test_a_misspelt_key_is_reported_once() -> None:
    assert len(faults("nane: a\n")) == 1


def test_wrong_type_is_placed_at_its_value() -> None:
    (problem,) = faults("name: a\nitems:\n  - size: big\n")
    assert (problem.line, problem.path) == (3, "items.0.size")


def test_all_faults_at_once_in_order() -> None:
    lines = [problem.line for problem in faults("name: a\nfoo: 1\nitems:\n  - bar: 2\n  - baz: 3\n")]
    assert lines == [2, 4, 5]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("name: a\nname: b\n", 2, "stands twice"),
        ("name: a\nitems:\n  - size: 1\n    size: 2\n", 4, "stands twice"),
        ("name: [a\nitems: [b]\n", 1, "the '[' that opens here is not closed"),
        ("a: 1\nname: {b: 1\n", 2, "the '{' that opens here is not closed"),
        ("name: [a b: c: d]\n", 1, "not valid YAML"),
        ('a: 1\nname: "b\nc: 2\nd: 3\n', 2, "the quote that opens here is not closed"),
        ("a: 1\nname: 'b\nc: 2\nd: 'e'\n", 2, "the quote that opens here is closed by the one in line 4 only"),
        ('name: "b\n  c" d\n', 2, "<scalar>"),
        ("name: a\n\tx: 1\n", 2, "not valid YAML"),
        ('a: 1\nwhen: "b" in c\n', 2, "put the whole condition into single quotes"),
        ('a: [{when: "b" in c, d: 1}]\n', 1, "put the whole condition into single quotes"),
        ("when: 'b' in c\n", 1, "put the whole condition into double quotes"),
        ("? [a, b]\n: 1\n", 1, "simple value"),
        ("name: a\n---\nname: b\n", 2, "not valid YAML"),
        ("", 1, "expected a mapping"),
        ("- a\n", 1, "expected a mapping"),
        ("name: !!python/object/apply:os.system [ls]\n", 1, "is not supported"),
    ],
)
def test_not_usable(text: str, line: int, words: str) -> None:
    (problem,) = faults(text)
    assert problem.line == line
    assert words in problem.message


def test_aliases_that_explode_are_refused() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "aliases" in faults("\n".join(levels))[0].message


def test_an_alias_to_itself_is_refused() -> None:
    assert "nested too deeply" in faults("name: &a [*a]\n")[0].message


def test_deep_nesting_is_refused() -> None:
    assert "nested too deeply" in faults("[" * 3_000)[0].message


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(InvalidFile, match="cannot be read"):
        yamlfile.load(path, Outer)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="No such file"):
        yamlfile.load(tmp_path / "no.yaml", Outer)


@pytest.mark.parametrize(
    "text",
    [
        "when: a && bcd\n",
        'when: "a && bcd"\n',
        "when: 'a && bcd'\n",
        "when: |\n  a &&\n  bcd\n",
        "when: >-\n  a &&\n\n    bcd\n",
        "when: a &&\n  bcd\n",
    ],
)
def test_position_inside_a_scalar(text: str) -> None:
    document = yamlfile.parse(text, "f.yaml")
    value = document.data["when"]
    line, column = document.position_inside(("when",), value, value.index("bcd"))
    assert text.split("\n")[line - 1][column - 1 :].startswith("bcd")


@pytest.mark.parametrize(
    "scalar", ["2020-99-99", "2026-13-01", "2026-11-30", "0b_", "0x_", "0b2", "12:30", "off", "yes", "1_0", "<<", "="]
)
def test_what_is_no_number_is_text(scalar: str) -> None:
    """Dates and the booleans of YAML 1.1 are nothing that configuration needs."""
    assert yamlfile.parse(f"name: {scalar}\n", "f.yaml").data == {"name": scalar}


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("0x1f", 31),
        ("0o17", 15),
        ("-12", -12),
        ("010", 10),
        ("1e3", 1000.0),
        ("-.5", -0.5),
        ("-.INF", -math.inf),
        ("True", True),
        ("~", None),
        ("", None),
        ("!!str 12", "12"),
        ('!!int "12"', 12),
        ("!!float 1", 1.0),
        ("'12'", "12"),
    ],
)
def test_scalars_are_those_of_json(scalar: str, value: object) -> None:
    found = yamlfile.parse(f"name: {scalar}\n", "f.yaml").data["name"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("scalar", "words"),
    [
        ("!!int abc", "'abc' is no int"),
        ("!!float x", "'x' is no float"),
        ("!!bool maybe", "'maybe' is no bool"),
        ("!!null x", "'x' is no null"),
        ("!!timestamp foo", "the tag 'timestamp' is not supported"),
        ("!!binary aGk=", "the tag 'binary' is not supported"),
        ("!!set {a}", "the tag 'set' is not supported"),
        ("!!omap [a: 1]", "the tag 'omap' is not supported"),
        ("9" * 6000, "more than 100 digits"),
        ("0x" + "f" * 6000, "more than 100 digits"),
        ('"\\0"', "cannot stand in a text"),
        ('"a\\r\\nb"', "cannot stand in a text"),
        ('"\\uD800"', "cannot stand in a text"),
    ],
)
def test_a_scalar_that_means_nothing_is_refused_at_its_place(scalar: str, words: str) -> None:
    (problem,) = faults(f"items: []\nname: {scalar}\n")
    assert (problem.line, problem.column) == (2, 7)
    assert words in problem.message


def test_an_escape_that_is_no_character_is_refused_in_its_line() -> None:
    (problem,) = faults('items: []\nname: "\\UFFFFFFFF"\n')
    assert problem.line == 2
    assert "not valid YAML" in problem.message


def test_a_control_character_is_refused_at_its_place() -> None:
    (problem,) = faults("items: []\nname: a\x07\n")
    assert (problem.line, problem.column) == (2, 8)


@pytest.mark.parametrize("text", ["base: &b {size: 1}\nname:\n  <<: *b\n", "base: 1\nname: 2\n<<: [{a: 1}]\n"])
def test_merge_keys_are_refused_by_name(text: str) -> None:
    (problem,) = faults(text)
    assert problem.line == 3
    assert "merge keys ('<<') are not supported" in problem.message


def test_too_many_values_are_called_that() -> None:
    names = ", ".join(f"team-{number}" for number in range(60_000))
    (problem,) = faults(f"name: a\nitems: [{names}]\n")
    assert problem.line == 2
    assert "more than 50,000 keys and values" in problem.message


def test_keys_are_text_whatever_they_look_like() -> None:
    document = yamlfile.parse("70: {yes: 1}\nnull: 2\n", "f.yaml")
    assert document.data == {"70": {"yes": 1}, "null": 2}
    assert document.position(("70", "yes")) == (1, 6)


def test_a_problem_is_one_line_whatever_the_file_holds() -> None:
    (problem,) = faults('name: a\n"zz\\nz": 1\n')
    assert str(problem).splitlines() == [str(problem)]
    assert "zz\\nz" in str(problem)


_TAGS = ("int", "float", "bool", "null", "str", "timestamp", "binary", "set", "omap", "map", "seq", "python/name:os")
_NUMBERS = ("0x", "0b_", "1_", ".inf", ".nan", "1e999", "9" * 200, "2020-99-99", "12:61", "~", "=", "name")
_MARKS = ("&a ", "*a", "<<", "? ", "| ", "> ", "'", '"', "\\U", "\\x0", "#", "%", "---", "...", "[", "]", "{", "}", ",")
_BLANKS = (": ", "- ", " ", "  ", "\n", "\n  ", "\t", "\r", "\x85", "\ud800")
_PIECES = st.sampled_from([*(f"!!{tag} " for tag in _TAGS), "!x ", *_NUMBERS, *_MARKS, *_BLANKS])


@settings(max_examples=500, deadline=None)
@given(st.lists(_PIECES, max_size=25).map("".join))
def test_any_pieces_of_yaml_are_read_or_refused(text: str) -> None:
    try:
        document = yamlfile.parse(text, "f.yaml")
    except InvalidFile as error:
        assert all(1 <= p.line <= len(text.splitlines()) + 1 and p.column >= 1 for p in error.problems)  # noqa: PT017
    else:
        json.dumps(document.data)  # nothing that JSON does not have


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        document = yamlfile.parse(text, "f.yaml")
        yamlfile.validate(document, Outer)
    except InvalidFile as error:
        assert all(problem.line >= 1 and problem.column >= 1 for problem in error.problems)  # noqa: PT017
