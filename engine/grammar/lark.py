"""Grammar texts in llguidance's dialect of Lark: expressions for what can be asked for, and the grammar around them.

An expression (a `str`) stands on the right-hand side of a rule. White space in JSON is bounded here, because a model
that falls into white space would otherwise stay there until its token limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

# Between two tokens of JSON: a few blanks, or a line break and its indentation. Not before or after the whole.
_WHITE_SPACE = r"( {1,8}|\n[ \t]{0,40})"
# `no_forcing`: text that must come may come in any tokens, as the model would write it, in few and not byte by byte.
_HEAD = '%llguidance {"skip_repetition": "once", "no_forcing": true}\n'
_ANYTHING = r"/(?s:.*)/"
_ASKED = "asked"
USERS = f"@{_ASKED}"  # an expression: the grammar that the client wrote

Schema = Mapping[str, Any] | bool


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What an answer must be: rules, one of them `start`, and the client's own grammar where they refer to `USERS`."""

    rules: tuple[str, ...]
    users: str | None = None

    def text(self) -> str:
        """As llguidance reads it. Raises ValueError where the client's grammar is GBNF and cannot be translated."""
        rules = _HEAD + "\n".join(self.rules)
        if self.users is None:
            return rules
        return json.dumps({"grammars": [{"lark_grammar": rules}, {"name": _ASKED, "lark_grammar": _lark(self.users)}]})


def schema(value: Schema, *, lenient: bool = False) -> str:
    """JSON that a schema describes. `lenient`: keywords that cannot be enforced are passed over, not refused."""
    if value is False:
        return '%json {"enum": []}'  # nothing fits, and the compiler says so
    given = {} if value is True else {n: _with_plain_digits(n, v) for n, v in value.items() if n != "x-guidance"}
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}
    return "%json " + json.dumps(given | {"x-guidance": options})


def any_object() -> str:
    """Any JSON object."""
    return schema({"type": "object"})


def regex(pattern: str) -> str:
    """A text that the regular expression matches as a whole (the syntax of Rust's `regex`; `\\d` is 0 to 9)."""
    # In Lark a slash ends the pattern and a line ends the rule.
    instead = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    escaped = re.sub(r"\\[\s\S]|[/\n]", lambda m: instead.get(m[0], m[0]), plain_digits(pattern))
    return f"/{escaped}/"


def plain_digits(pattern: str) -> str:
    """The pattern with `\\d` as 0 to 9, as JSON Schema and everybody means it; Rust's is every script's digits."""
    written, in_class = [], False
    for part in re.findall(r"\\[\s\S]|[\s\S]", pattern):
        if part == r"\d":
            part = "0-9" if in_class else "[0-9]"
        elif part in "[]":
            in_class = part == "["
        written.append(part)
    return "".join(written)


def _with_plain_digits(name: str, value: Any) -> Any:
    """A keyword of a schema, and everything below it."""
    if name == "pattern" and isinstance(value, str):
        return plain_digits(value)
    if name in ("const", "enum", "default", "examples"):  # data, whatever it looks like
        return value
    if isinstance(value, dict):
        return {key: _with_plain_digits(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_plain_digits("", item) for item in value]
    return value


def choice(texts: Sequence[str]) -> str:
    """One of these texts. As a pattern, because llguidance follows at most 2,000 rules at a time."""
    return regex("|".join(map(re.escape, texts)))


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def token(token_id: int) -> str:
    """One token, whatever its text is."""
    return f"<[{token_id}]>"


# A marker of the model's format as an expression: a control token by its id, else the text itself.
Marker = Callable[[str], str]


def marker(control_ids: Mapping[str, int]) -> Marker:
    """How this vocabulary writes markers: `control_ids` are its control tokens by name."""
    return lambda text: token(control_ids[text]) if text in control_ids else literal(text)


def up_to(end: str, name: str, mark: Marker) -> tuple[str, list[str]]:
    """Any text up to the first `end` and `end` itself: an expression, and the rules that it needs, called `name…`."""
    written = mark(end)
    if written.startswith("<["):  # no text holds a token, so the text need not be read lazily
        return name, [f"{name}: {_ANYTHING} {written}"]
    return name, [f"{name}[lazy]: {_ANYTHING} {written}"]


def text_with_tags(name: str, tags: Mapping[str, Sequence[str]], mark: Marker, *, only_one: bool = False) -> list[str]:
    """Rules of a text in which tags may occur: after each trigger one of its bodies must follow. The first is `name`.

    With `only_one` the text ends after the first tag.
    """
    rules: list[str] = []
    tagged = []
    for number, (trigger, bodies) in enumerate(tags.items()):
        head, needed = up_to(trigger, f"{name}_{number}", mark)
        rules += needed
        tagged.append(f"{head} ({' | '.join(bodies)})")
    either = " | ".join(tagged)
    start = f"{name}: {either} | {name}_tail" if only_one else f"{name}: ({either})* {name}_tail"
    return [start, f"{name}_tail: {_ANYTHING}", *rules]


def _lark(users: str) -> str:
    """A client's grammar, which may be GBNF (llama.cpp's form, `root ::= …`), in Lark."""
    if "::=" not in users:
        return users
    from llguidance.gbnf_to_lark import any_to_lark  # in the checking process alone

    try:
        return any_to_lark(users)
    except Exception as error:  # it has no base class of its own
        raise ValueError(f"it is not GBNF: {error}") from error
