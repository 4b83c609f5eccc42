"""`service_tier: flex`: passed on where the servers know it, charged as they say that they served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.mock_upstream import MockUpstream
from gateway.settings.serving import BackendSettings
from tests.gateway.front_door import FrontDoor, configuration, front_door
from tests.gateway.script_wire import ScriptWire

LISTED = {"tier": "small", "price_as": "openai:gpt-5.4", "upstream_model": "script"}


@pytest.fixture
def script() -> ScriptWire:
    return ScriptWire()


@pytest.fixture
async def upstream(script: ScriptWire) -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(script)
    await mock.start()
    yield mock
    await mock.stop()


@pytest.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    models = {"plain": {**LISTED, "backend": "plain"}, "knows": {**LISTED, "backend": "knows"}}
    document = configuration({"plain": upstream, "knows": upstream}, models)
    document["backends"]["knows"]["flex"] = True
    async with front_door(tmp_path, document) as running:
        yield running


def sent(upstream: MockUpstream) -> Any:
    return msgspec.json.decode(upstream.records[-1].body).get("service_tier")


async def test_it_goes_only_to_servers_that_know_it(door: FrontDoor, upstream: MockUpstream) -> None:
    for model, tier, expected in (
        ("plain", "flex", None),
        ("knows", "flex", "flex"),
        ("plain", "priority", "priority"),
        ("plain", None, None),
    ):
        assert (await door.chat(model, service_tier=tier)).status_code == 200
        assert sent(upstream) == expected
        body = {"model": model, "input": "Hello", "service_tier": tier}
        assert (await door.client.post("/v1/responses", json=body, headers=door.headers())).status_code == 200
        assert sent(upstream) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_the_price_is_that_of_the_tier_that_served(door: FrontDoor, script: ScriptWire, stream: bool) -> None:
    script.usage = {"prompt_tokens": 1000, "completion_tokens": 1000, "total_tokens": 2000}
    for served in (None, "flex", "default", 7):
        script.more = {} if served is None else {"service_tier": served}
        answer = await door.chat("knows", service_tier="flex", stream=stream)
        assert answer.status_code == 200
    usual, flex, default, nonsense = await door.rows()
    assert flex["cost_nanousd"] * 2 == usual["cost_nanousd"] > 0
    assert flex["price_version"] != usual["price_version"]
    assert default["cost_nanousd"] == nonsense["cost_nanousd"] == usual["cost_nanousd"]
    assert default["price_version"] == nonsense["price_version"] == usual["price_version"]


@pytest.mark.parametrize(
    ("backend", "knows"),
    [
        ({"base_urls": ["https://api.openai.com/v1"]}, True),
        ({"base_urls": ["https://api.openai.com/v1"], "flex": False}, False),
        ({"base_urls": ["http://127.0.0.1:8000/v1"]}, False),
        ({"engine": "smollm2"}, False),
    ],
)
def test_who_knows_it(backend: dict[str, Any], knows: bool) -> None:
    assert BackendSettings(**backend).knows_flex is knows


def test_who_cannot_know_it() -> None:
    for backend in (
        {"engine": "e", "flex": True},
        {"base_urls": ["http://a/v1"], "dialect": "anthropic", "flex": True},
    ):
        with pytest.raises(ValueError, match="can know 'flex'"):
            BackendSettings(**backend)
