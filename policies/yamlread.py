"""YAML text as plain data with the place of every key and value: the reader below `yamlfile.py`.

It builds what configuration needs and nothing else: mappings with text as keys, lists, text, numbers, true, false and
null, as YAML 1.2 and JSON write them. A date is text, and so are `yes`, `off` and `12:30`. What the text cannot mean is
refused with its line; there is no text that leads to another error.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import yaml
from yaml.reader import Reader

Location = tuple[str | int, ...]
Position = tuple[int, int]  # line and column, from 1

# No configuration is near these: each keeps a hostile or broken file from taking a minute to refuse.
MAX_CHARACTERS: Final = 2 * 1024 * 1024
MAX_VALUES: Final = 50_000  # keys and values
MAX_DEPTH: Final = 50
MAX_DIGITS: Final = 100

_TAG: Final = "tag:yaml.org,2002:"
_NULL: Final = re.compile(r"(?:~|null|Null|NULL|)$")
_BOOL: Final = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_INT: Final = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT: Final = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_SCALARS: Final = {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}
# Line breaks and tabs belong to texts; other control characters and halves of surrogate pairs (by escapes such as
# "\0" and "\uD800") only break what shows or sends them.
_NO_TEXT: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


# A condition that begins with a text, such as `when: "a" in tags`: YAML takes the text for all of it.
_QUOTED_START: Final = re.compile(r"""\bwhen: *(["'])(?:(?!\1).)*\1 *(?=[^\s,}#])""")


class Unreadable(Exception):
    """The text cannot be read; `position` is where to look."""

    def __init__(self, position: Position, what: str) -> None:
        super().__init__(what)
        self.position = position
        self.what = what


class Tree:
    """The data, and for each path into it where its key and its value stand."""

    def __init__(self) -> None:
        self.data: Any = None
        self.keys: dict[Location, Position] = {}
        self.values: dict[Location, Position] = {}

    def build(self, node: yaml.Node, path: Location) -> Any:
        """The data of a node, with its places noted."""
        position = _start(node)
        if len(self.values) >= MAX_VALUES:
            raise Unreadable(position, "aliases that repeat each other make it too large")
        if len(path) > MAX_DEPTH:
            raise Unreadable(position, f"nested too deeply (more than {MAX_DEPTH} levels)")
        self.values[path] = position
        if isinstance(node, yaml.MappingNode):
            _expect_tag(node, "map")
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            _expect_tag(node, "seq")
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node)

    def mapping(self, node: yaml.MappingNode, path: Location) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            position = _start(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise Unreadable(position, "a key must be a simple value")
            _scalar(key_node)  # a tag must fit here, too
            key = _text(key_node)
            if key == "<<" and key_node.style is None:
                raise Unreadable(
                    position, "merge keys ('<<') are not supported: write out the keys that it would merge"
                )
            if key in found:
                raise Unreadable(position, f"the key '{key}' stands twice")
            self.keys[(*path, key)] = position
            found[key] = self.build(value_node, (*path, key))
        return found


def read(source: str) -> Tree:
    """Read one YAML document.

    Raises:
        Unreadable: the text is no YAML, or holds what no configuration needs.
    """
    if len(source) > MAX_CHARACTERS:
        raise Unreadable((1, 1), f"longer than {MAX_CHARACTERS:,} characters")
    if wrong := Reader.NON_PRINTABLE.search(source):
        line = source.count("\n", 0, wrong.start()) + 1
        column = wrong.start() - source.rfind("\n", 0, wrong.start())
        raise Unreadable((line, column), f"not valid YAML: the character {wrong.group()!r} cannot stand in a file")
    tree = Tree()
    loader = _Loader(source)
    try:
        root = loader.get_single_node()
        if root is not None:
            tree.data = tree.build(root, ())
    except yaml.MarkedYAMLError as error:
        mark, what = _fault(source, error)
        raise Unreadable((mark.line + 1, mark.column + 1) if mark else (1, 1), f"not valid YAML: {what}") from error
    except RecursionError as error:
        raise Unreadable((1, 1), "nested too deeply") from error
    except (ValueError, OverflowError, yaml.YAMLError) as error:
        # The library's own, such as that of "\UFFFFFFFF", a character that there is not.
        mark = loader.get_mark()
        raise Unreadable((mark.line + 1, mark.column + 1), f"not valid YAML: {error}") from error
    return tree


class _Loader(yaml.SafeLoader):
    """Composes nodes, as long as there are not too many of them; nothing is constructed."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MAX_VALUES:,} keys and values",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        return super().compose_node(parent, index)


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """The value of a scalar: by its tag where it has one, else by how it looks.

    Raises:
        Unreadable: the tag is none of JSON's types or does not fit, or the value is out of bounds.
    """
    content = str(node.value)
    kind = "str" if node.style is not None else next((k for k, form in _SCALARS.items() if form.match(content)), "str")
    tag = node.tag.removeprefix(_TAG)
    if node.tag != _resolved(node):  # it is written in the file
        if tag != "str" and tag not in _SCALARS:
            raise Unreadable(_start(node), f"the tag '{tag}' is not supported: values are text, numbers, true or false")
        if tag != "str" and not _SCALARS[tag].match(content):
            raise Unreadable(_start(node), f"'{content[:40]}' is no {tag}")
        kind = tag
    if kind == "null":
        return None
    if kind == "bool":
        return content.lower() == "true"
    if kind in ("int", "float") and len(content) > MAX_DIGITS:
        raise Unreadable(_start(node), f"a number of more than {MAX_DIGITS} digits")
    if kind == "int":
        return int(content, 0) if content[:2] in ("0o", "0x") else int(content)
    if kind == "float":
        return float(content.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return _text(node)


def _text(node: yaml.ScalarNode) -> str:
    """The characters of a scalar.

    Raises:
        Unreadable: one of them is a control character.
    """
    content = str(node.value)
    if wrong := _NO_TEXT.search(content):
        raise Unreadable(_start(node), f"the character {wrong.group()!r} cannot stand in a text")
    return content


def _resolved(node: yaml.ScalarNode) -> str:
    """The tag that the library gives a scalar that has none in the file."""
    implicit = (node.style is None, node.style is not None)
    return str(_RESOLVER.resolve(yaml.ScalarNode, node.value, implicit))  # type: ignore[no-untyped-call]


_RESOLVER: Final = yaml.SafeLoader("")


def _expect_tag(node: yaml.Node, kind: str) -> None:
    if node.tag != _TAG + kind:
        tag = node.tag.removeprefix(_TAG)
        raise Unreadable(_start(node), f"the tag '{tag}' is not supported")


def _start(node: yaml.Node) -> Position:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _fault(source: str, error: yaml.MarkedYAMLError) -> tuple[yaml.Mark | None, str]:
    """Where to look, and what is wrong. What is never closed is shown where it opens, not where the parser gave up."""
    mark, opened = error.problem_mark or error.context_mark, error.context_mark
    what, context = str(error.problem or error.context), error.context or ""
    if mark is None or opened is None:
        return mark, what
    if context == "while scanning a quoted scalar":
        return opened, "the quote that opens here is not closed"
    if context.startswith("while parsing a flow") and mark.line > opened.line:
        bracket = "[" if context.endswith("sequence") else "{"
        return opened, f"the '{bracket}' that opens here is not closed: {what} in line {mark.line + 1}"
    # Another quote further down closes it, and what that one should have opened follows without a blank.
    for token in _tokens(source):
        quoted = isinstance(token, yaml.ScalarToken) and token.style in ("'", '"')
        if quoted and token.end_mark.index == mark.index and token.start_mark.line < mark.line:
            return token.start_mark, f"the quote that opens here is closed by the one in line {mark.line + 1} only"
    quote = _QUOTED_START.search(source.splitlines()[mark.line]) if mark.line < len(source.splitlines()) else None
    if quote and mark.column >= quote.end():
        other = "single" if quote[1] == '"' else "double"
        what += f". The text ends with its second quote: put the whole condition into {other} quotes"
    return mark, what


def _tokens(source: str) -> Iterator[yaml.Token]:
    """The tokens up to the first that is none."""
    with contextlib.suppress(yaml.YAMLError):
        yield from yaml.scan(source, Loader=yaml.SafeLoader)
