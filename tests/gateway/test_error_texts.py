"""What an error says to whoever sent the request: the mistake, in its own words, and what to send instead."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from backends.choices import choices
from backends.protocol import ChatRequest, InvalidRequest
from backends.validation import validate
from gateway.dialects import reading
from gateway.dialects.errors import BadRequest
from tests.gateway.admin_door import admin
from tests.gateway.front_door import FrontDoor

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "The body is empty"),
        (b" \n", "The body is empty"),
        (rb'{"a": "\ud800"}', r"'\ud800' (byte 7) is half a surrogate pair"),
        (rb'{"\ud83D": 1}', r"'\ud83D' (byte 2) is half"),
        (rb'{"a": "\\\\\uDBFF\n"}', r"'\uDBFF' (byte 11) is half"),
        (rb'{"a": "\ud83d\ude00 \ud83d"}', r"'\ud83d' (byte 20) is half"),
        (rb'{"a": "\udc00"}', "surrogate"),
        (rb'{"a": "\ud83d\ude00"', "it was cut short"),
        (rb'{"a": "\ud83d', "it was cut short"),
        (rb'{"a": "\\ud800"', "it was cut short"),
        (b'{"a": 1', "it ends, after 7 bytes"),
        (b'{"temperature": 1e999}', "a number in it is out of range"),
        (b'{"a": 01}', "invalid number (byte 7)"),
    ],
)
def test_what_is_no_json(body: bytes, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        reading.decode(body)
    assert said in caught.value.message
    assert caught.value.code == "invalid_json"


def test_half_a_pair_is_found_in_a_large_body_at_once() -> None:
    body = b'{"a": "' + b"\\\\" * 1_000_000 + b"\\ud83d\\ude00" * 100_000 + b'\\ud800"}'
    with pytest.raises(BadRequest, match="half a surrogate pair"):
        reading.decode(body)


def test_a_role_that_is_none_is_told_which_there_are() -> None:
    with pytest.raises(BadRequest) as caught:
        reading.convert({"model": "m", "messages": [*HI, {"role": "usr", "content": "hi"}]}, ChatRequest)
    words = "system, developer, user, assistant, tool, function"
    assert caught.value.message == f"'messages[1].role' must be one of {words}, not 'usr'."
    assert caught.value.param == "messages[1].role"


class Inner(msgspec.Struct):
    word: Literal["a", "b"] | None = None
    renamed: Literal["c"] = msgspec.field(default="c", name="type")


class Outer(msgspec.Struct):
    many: dict[str, list[Inner] | str]
    plain: str = ""


@pytest.mark.parametrize(
    ("path", "words"),
    [("many.x[0].word", ("a", "b")), ("many.x[3].type", ("c",)), ("plain", ()), ("none.such", ()), ("", ())],
)
def test_choices_follow_the_path(path: str, words: tuple[str, ...]) -> None:
    assert choices(Outer, path) == words


@pytest.mark.parametrize("kind", ["x", "", None, 5, "JSON_OBJECT"])
def test_an_unknown_response_format(kind: Any) -> None:
    body = {"model": "m", "messages": HI, "response_format": {"type": kind}}
    with pytest.raises(
        InvalidRequest, match="unknown type: it must be one of text, json_object, json_schema"
    ) as caught:
        validate(reading.convert(body, ChatRequest))
    assert caught.value.param == "response_format.type"


@pytest.mark.parametrize(
    ("method", "path", "body", "param", "said"),
    [
        ("POST", "keys", {"requests_per_minute": 0}, "requests_per_minute", "'requests_per_minute' must be between"),
        ("POST", "keys", {"budget_usd": "-5"}, "budget_usd", "'budget_usd' must be between 0 and"),
        ("POST", "keys", {"budget_usd": "x"}, "budget_usd", "is not an amount of dollars"),
        ("POST", "keys", {"allowed_tiers": ["tiny"]}, "allowed_tiers", "'allowed_tiers' does not know 'tiny'"),
        ("POST", "keys", {"allowed_routes": []}, "allowed_routes", "'allowed_routes' is empty"),
        ("POST", "keys", {"name": "a/b"}, "name", "is no name for a key"),
        ("POST", "keys", {"expires": "2020-01-31"}, "expires", "would have expired already"),
        ("POST", "keys", {"rpm": 5}, "rpm", "Did you mean 'requests_per_minute'?"),
        ("POST", "organisations", {"name": "-"}, "name", "no name for an organisation"),
        ("POST", "teams", {"organisation": "-", "name": "x"}, "organisation", "no name for an organisation"),
        ("POST", "organisations", {"name": "acme", "parallel": -1}, "parallel", "'parallel' must be between"),
        ("POST", "cache/purge", {"all": True}, "all", "Did you mean 'everything'?"),
    ],
)
async def test_the_admin_api_names_the_field_as_it_was_sent(
    door: FrontDoor, method: str, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    response = await (await admin(door)).ask(method, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert "nanousd" not in error["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [({"by": "teem"}, "by"), ({"since": "1d", "until": "2d"}, "since"), ({"until": "soon"}, "until")],
)
async def test_reports_name_the_field(door: FrontDoor, query: dict[str, Any], param: str) -> None:
    response = await (await admin(door)).ask("GET", "costs", **query)
    assert response.json()["error"]["param"] == param, response.text


async def test_a_filter_that_is_none_is_named(door: FrontDoor) -> None:
    response = await (await admin(door)).ask("GET", "organisations", team="x")
    assert response.json()["error"]["param"] == "team"
