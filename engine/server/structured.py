"""What text an answer must be: `response_format` as OpenAI has it, `structured_outputs` and `guided_*` as vLLM does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.bounds import check_bounds
from backends.protocol import InvalidRequest, Json
from engine.grammar import lark
from engine.grammar.compiling import MAX_CHARACTERS
from engine.server.errors import unsupported
from engine.server.schema import Extras

_TAGS = "tagged"


@dataclass(frozen=True, slots=True)
class Format:
    """An expression and the rules it needs; `users`: a grammar of the client's. `param`: the field that asks for it."""

    param: str
    expression: str
    rules: tuple[str, ...] = ()
    users: str | None = None


def read_format(response_format: Json | None, extras: Extras) -> Format | None:
    """The format that a request asks for; None: any text.

    Raises:
        InvalidRequest: it is incomplete or of the wrong type, or there are several.
        ApiError: an option that this engine does not implement.
    """
    found = [_response_format(response_format)] if response_format is not None else []
    if extras.structured_outputs is not None:
        found.append(_structured_outputs(extras.structured_outputs))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(extras, f"guided_{kind}")
        if value is not None:
            found.append(_READERS[kind](f"guided_{kind}", value))
    asked = [format for format in found if format is not None]
    if len(asked) > 1:
        text = f"'{asked[0].param}' and '{asked[1].param}' both say what the answer must be; give one of them."
        raise InvalidRequest(text, param=asked[1].param)
    return asked[0] if asked else None


def _response_format(value: Json) -> Format | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Format("response_format", lark.any_object())
    if kind == "structural_tag":
        return _structural_tag("response_format", value)
    described = value.get("json_schema")
    where = "response_format.json_schema"
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise _wrong(where, "an object with a 'schema'")
    # OpenAI's `strict` promises that the whole schema is kept; without it the part that can be enforced is.
    return _schema(f"{where}.schema", described["schema"], lenient=described.get("strict") is not True)


def _structured_outputs(value: Json) -> Format:
    given = {name: item for name, item in value.items() if item not in (None, False)}
    for name in given:
        if name not in _READERS:
            raise unsupported(f"structured_outputs.{name[:64]}", f"It can have one of {', '.join(_READERS)}.")
    if len(given) != 1:
        raise _wrong("structured_outputs", f"an object with one of {', '.join(_READERS)}")
    [(name, item)] = given.items()
    return _READERS[name](f"structured_outputs.{name}", item)


def _json(param: str, value: object) -> Format:
    if isinstance(value, str):
        value = _parsed(param, value)
    if not isinstance(value, dict | bool):
        raise _wrong(param, "a JSON schema, as an object or as its text")
    return _schema(param, value, lenient=False)


def _schema(param: str, value: Mapping[str, Any] | bool, *, lenient: bool) -> Format:
    return Format(param, lark.schema(value, lenient=lenient))


def _json_object(param: str, value: object) -> Format:
    return Format(param, lark.any_object())


def _regex(param: str, value: object) -> Format:
    return Format(param, lark.regex(_text(param, value)))


def _choice(param: str, value: object) -> Format:
    if not isinstance(value, list) or not _are(str, value):
        raise _wrong(param, "a list of texts, at least one")
    if "" in value:
        empty = f"{param}[{value.index('')}]"
        raise InvalidRequest(f"'{empty}' is empty: an answer is a text.", param=empty)
    return Format(param, lark.choice(value))


def _grammar(param: str, value: object) -> Format:
    return Format(param, lark.USERS, users=_text(param, value))


def _structural_tag(param: str, value: object) -> Format:
    """vLLM's tags in a text: `triggers`, and `structures` of `begin`, `schema` and `end`."""
    if isinstance(value, str):
        value = _parsed(param, value)
    if not isinstance(value, dict):
        raise _wrong(param, "an object with 'structures' and 'triggers'")
    triggers, structures = value.get("triggers"), value.get("structures")
    if not _are(str, triggers) or not _are(dict, structures):
        raise _wrong(param, "an object with lists of 'structures' and 'triggers'")
    tags: dict[str, list[str]] = {}
    for number, tag in enumerate(structures or ()):
        begin, schema, end = tag.get("begin"), tag.get("schema", tag.get("structure")), tag.get("end")
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict | bool):
            raise _wrong(f"{param}.structures[{number}]", "an object with 'begin', 'schema' and 'end'")
        trigger = next((t for t in triggers or () if t and begin.startswith(t)), None)
        if trigger is None:
            raise _wrong(f"{param}.structures[{number}].begin", "a text that begins with one of the triggers")
        parts = [lark.literal(begin[len(trigger) :]), lark.schema(schema), lark.literal(end)]
        tags.setdefault(trigger, []).append(" ".join(part for part in parts if part != '""'))
    # Triggers are texts here: whoever sends them does not know which of them the model has as a token.
    return Format(param, _TAGS, tuple(lark.text_with_tags(_TAGS, tags, lark.literal)))


_READERS: Mapping[str, Callable[[str, object], Format]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}


def _text(param: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(param, "a text")
    if len(value) > MAX_CHARACTERS:
        raise InvalidRequest(f"'{param}' must have at most {MAX_CHARACTERS} characters.", param=param)
    return value


def _parsed(param: str, text: str) -> object:
    try:
        value = msgspec.json.decode(_text(param, text))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is not valid JSON: {error}.", param=param) from error
    if isinstance(value, dict):
        check_bounds(value)
    return value


def _are(kind: type, values: Sequence[Any] | None) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, kind) for value in values)


def _wrong(param: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' must be {wanted}.", param=param, code="invalid_type")
