"""The most tokens of an answer reach each server under the name that it knows, whatever the client calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from bench.mock_agent import AgentWire
from bench.mock_upstream import MockUpstream
from gateway.settings import BackendSettings
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

NAMES = ("max_tokens", "max_completion_tokens")
MESSAGES = [{"role": "user", "content": "Name three rivers."}]


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(AgentWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    """A model per kind of server: one for each name, and one that takes what comes."""
    kinds = {"older": "max_tokens", "newer": "max_completion_tokens", "either": None}
    model = {"tier": "small", "price": PRICE, "capabilities": ["prefill"]}
    models: dict[str, Any] = {}
    for kind in kinds:
        models[kind] = {**model, "backend": kind}
        models[f"{kind}-bounded"] = {**model, "backend": kind, "max_output_tokens": 70}
        models[f"{kind}-cut"] = {**model, "backend": kind, "upstream_model": "cut,after=3,times=1"}
    document = configuration(dict.fromkeys(kinds, upstream), models)
    for kind, field in kinds.items():
        document["backends"][kind] |= {"output_limit_field": field} if field else {}
    async with front_door(tmp_path, document) as running:
        yield running


def sent(upstream: MockUpstream) -> dict[str, int]:
    """The limits in the latest request that a server got."""
    asked = msgspec.json.decode(upstream.records[-1].body)
    return {name: asked[name] for name in NAMES if name in asked}


async def ask(door: FrontDoor, path: str, **body: Any) -> None:
    response = await door.client.post(path, json=body, headers=door.headers())
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("kind", "name"), [("older", "max_tokens"), ("newer", "max_completion_tokens")])
async def test_every_dialect(door: FrontDoor, upstream: MockUpstream, kind: str, name: str, stream: bool) -> None:
    said = {"model": kind, "stream": stream}
    for field in NAMES:
        await ask(door, "/v1/chat/completions", messages=MESSAGES, **said, **{field: 40})
        assert sent(upstream) == {name: 40}
    await ask(door, "/v1/messages", messages=MESSAGES, max_tokens=41, **said)
    assert sent(upstream) == {name: 41}
    await ask(door, "/v1/responses", input="Name three rivers.", max_output_tokens=42, **said)
    assert sent(upstream) == {name: 42}
    await ask(door, "/v1/chat/completions", messages=MESSAGES, **said)
    assert sent(upstream) == {}
    await ask(door, "/v1/chat/completions", messages=MESSAGES, **{**said, "model": f"{kind}-bounded"})
    assert sent(upstream) == {name: 70}


async def test_the_newer_name_counts_where_a_client_says_both(door: FrontDoor, upstream: MockUpstream) -> None:
    both = {"max_tokens": 30, "max_completion_tokens": 20}
    for kind, name in (("older", "max_tokens"), ("newer", "max_completion_tokens")):
        await ask(door, "/v1/chat/completions", model=kind, messages=MESSAGES, **both)
        assert sent(upstream) == {name: 20}
        await ask(door, "/v1/chat/completions", model=kind, messages=MESSAGES, **both | {"max_completion_tokens": None})
        assert sent(upstream) == {name: 30}


async def test_without_the_setting_it_stays_as_the_client_wrote_it(door: FrontDoor, upstream: MockUpstream) -> None:
    for said in ({"max_tokens": 30}, {"max_completion_tokens": 20}, {"max_tokens": 30, "max_completion_tokens": 20}):
        await ask(door, "/v1/chat/completions", model="either", messages=MESSAGES, **said)
        assert sent(upstream) == said


async def test_a_text_completion_has_the_older_name_alone(door: FrontDoor, upstream: MockUpstream) -> None:
    await ask(door, "/v1/completions", model="newer", prompt="The Rhine", max_tokens=30)
    assert sent(upstream) == {"max_tokens": 30}


@pytest.mark.parametrize("field", NAMES)
async def test_what_is_left_of_an_answer_that_broke_off(door: FrontDoor, upstream: MockUpstream, field: str) -> None:
    await ask(door, "/v1/chat/completions", model="newer-cut", messages=MESSAGES, stream=True, **{field: 40})
    (row,) = [row for row in await door.rows() if row["outcome"] == "success"]
    assert row["attempt"] == 2
    left = sent(upstream)["max_completion_tokens"]
    assert sent(upstream) == {"max_completion_tokens": left}
    assert 0 < left < 40


@pytest.mark.parametrize(
    ("urls", "field"),
    [
        (["https://api.openai.com/v1"], "max_completion_tokens"),
        (["https://API.OpenAI.com:443/v1"], "max_completion_tokens"),
        (["https://a.openai.azure.com/openai/v1", "https://b.openai.azure.com/openai/v1"], "max_completion_tokens"),
        (["https://api.openai.com/v1", "http://10.0.0.1/v1"], None),
        (["https://api.openai.com.example/v1"], None),
        (["https://notopenai.azure.com/v1"], None),
        (["http://10.0.0.1/v1/api.openai.com"], None),
    ],
)
def test_openais_own_addresses_are_known(urls: list[str], field: str | None) -> None:
    assert BackendSettings(base_urls=tuple(urls)).limits_output_by == field
    explicit = BackendSettings(base_urls=tuple(urls), output_limit_field="max_tokens")
    assert explicit.limits_output_by == "max_tokens"
