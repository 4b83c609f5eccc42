"""Several header lines of one name, and headers that are not ASCII: what the gateway takes from them."""

from __future__ import annotations

import json

import httpx
import pytest

from gateway.dialects.errors import BadRequest
from gateway.http import Exchange
from tests.gateway.front_door import FrontDoor


async def chat(door: FrontDoor, *headers: tuple[str, str | bytes], key: bool = True) -> httpx.Response:
    lines: list[tuple[bytes, bytes]] = [(b"authorization", f"Bearer {door.token}".encode())] if key else []
    lines += [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in headers]
    body = {"model": "mock", "messages": [{"role": "user", "content": "Hi"}]}
    return await door.client.post("/v1/chat/completions", json=body, headers=lines)


def exchange(*lines: tuple[bytes, bytes]) -> Exchange:
    async def nothing(*_: object) -> None:
        raise AssertionError("no test here reads or writes")

    return Exchange({"type": "http", "headers": list(lines)}, nothing, nothing)  # type: ignore[arg-type]


def test_lines_of_one_name_are_one_list() -> None:
    asked = exchange(
        (b"x-tierline-cache", b"no-store"), (b"anthropic-beta", b"one,two"), (b"x-tierline-cache", b"no-cache"),
        (b"anthropic-beta", b"three"), (b"host", b"here"), (b"host", b"here"),
    )  # fmt: skip
    assert asked.header(b"x-tierline-cache") == "no-store, no-cache"
    assert asked.header(b"anthropic-beta") == "one,two, three"
    assert asked.header(b"host") == "here"
    assert asked.header(b"x-none") is None


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "x-tierline-deadline-ms", "x-tierline-tier"])
def test_what_can_be_said_once_is_not_guessed(name: str) -> None:
    same = exchange((name.encode(), b"small"), (name.encode(), b"small"))
    assert same.header(name.encode()) == "small"
    with pytest.raises(BadRequest, match=f"'{name}' more than once"):
        exchange((name.encode(), b"small"), (name.encode(), b"large")).header(b"host")


async def test_every_line_of_tags_and_of_cache_directives_counts(door: FrontDoor) -> None:
    response = await chat(
        door,
        ("x-tierline-tags", "a=1, b=2"),
        ("x-tierline-tags", "c=3"),
        ("x-tierline-cache", "no-cache"),
        ("x-tierline-cache", "never"),
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_cache_directive")
    response = await chat(door, ("x-tierline-tags", "a=1, b=2"), ("x-tierline-tags", "c=3"))
    assert response.status_code == 200, response.text
    (row,) = await door.rows()
    assert json.loads(row["tags"]) == {"a": "1", "b": "2", "c": "3"}


async def test_two_keys_are_refused(door: FrontDoor) -> None:
    response = await chat(door, ("authorization", "Bearer tl-another"))
    assert response.status_code == 400
    assert "'authorization' more than once" in response.json()["error"]["message"]
    assert await door.rows() == []


async def test_a_key_in_either_header_is_one_key(door: FrontDoor) -> None:
    response = await chat(door, ("x-api-key", await door.key()))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
    assert "'authorization' and another in 'x-api-key'" in response.json()["error"]["message"]
    assert await door.rows() == []
    assert (await chat(door, ("x-api-key", door.token))).status_code == 200
    assert (await chat(door, ("x-api-key", ""))).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_tags_are_text_of_any_language(door: FrontDoor, encoding: str) -> None:
    tags = {"é": "日本", "ü": "ß"} if encoding == "utf-8" else {"é": "ü"}
    header = ",".join(f"{name}={value}" for name, value in tags.items()).encode(encoding)
    response = await chat(door, ("x-tierline-tags", header))
    assert response.status_code == 200, response.text
    (row,) = await door.rows()
    assert json.loads(row["tags"]) == tags
