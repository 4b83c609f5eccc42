"""What a key may use: routes, tiers, models, until when. Through a whole gateway, as clients see it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.access.ceilings import ROUTES, KeyChange
from gateway.access.keys import InvalidKeyRequest, change_key, list_keys
from gateway.app import ROUTES as PATHS
from gateway.permissions import route_scope
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

POLICY = """\
version: 1
name: default
owner: tests
routes:
  - {when: 'prompt_tokens > 200', tier: large}
  - {tier: small}
fallback: [small]
cache: {mode: "off"}
"""
LONG = [{"role": "user", "content": "a long story " * 200}]


@pytest_asyncio.fixture
async def door(tmp_path: Path) -> AsyncIterator[FrontDoor]:
    mock = MockUpstream()
    await mock.start()
    models: dict[str, Any] = {
        name: {"tier": tier, "backend": "up", "price": PRICE}
        for name, tier in (("tiny", "small"), ("middle", "medium"), ("big", "large"))
    }
    models["vectors"] = {"kind": "embedding", "backend": "up", "price": PRICE}
    async with front_door(tmp_path, configuration({"up": mock}, models), policy=POLICY) as running:
        yield running
    await mock.stop()


async def listed(door: FrontDoor, token: str) -> list[str]:
    response = await door.client.get("/v1/models", headers=door.headers(token))
    return [model["id"] for model in response.json()["data"]]


@pytest.mark.parametrize(
    ("scopes", "names"),
    [
        ({}, ["auto", "big", "middle", "tiny", "vectors"]),
        ({"allowed_tiers": ["small", "medium"]}, ["auto", "middle", "tiny", "vectors"]),
        ({"allowed_tiers": ["medium"]}, ["auto", "middle", "vectors"]),  # the policy's tiers lead to the nearest
        ({"allowed_tiers": ["xlarge"], "allowed_routes": ["chat"]}, []),
        ({"allowed_routes": ["embeddings"]}, ["auto", "vectors"]),
        ({"allowed_routes": ["chat"]}, ["auto", "big", "middle", "tiny"]),
        ({"allowed_routes": ["rerank"]}, []),
        ({"allowed_models": ["middle"]}, ["auto", "middle"]),  # whatever tier the policy's rules lead to
        ({"allowed_models": ["big"]}, ["auto", "big"]),
        ({"allowed_models": ["big"], "allowed_tiers": ["small"]}, []),
        ({"allowed_models": ["auto"], "allowed_tiers": ["small"]}, ["auto"]),
    ],
)
async def test_the_list_of_models_is_what_the_key_may_use(
    door: FrontDoor, scopes: dict[str, list[str]], names: list[str]
) -> None:
    token = await door.key(**scopes)
    assert await listed(door, token) == names
    for name in ("auto", "tiny", "middle", "big", "vectors"):
        response = await door.client.get(f"/v1/models/{name}", headers=door.headers(token))
        assert response.status_code == (200 if name in names else 403), name


@pytest.mark.parametrize("messages", [LONG, [{"role": "user", "content": "hi"}]])
async def test_a_listed_auto_answers_whatever_is_asked(door: FrontDoor, messages: list[dict[str, str]]) -> None:
    for tier in ("small", "medium", "large"):
        token = await door.key(allowed_tiers=[tier])
        response = await door.chat("auto", token=token, messages=messages)
        assert (response.status_code, response.headers["x-tierline-tier"]) == (200, tier)
        if response.headers.get("x-tierline-requested-tier", tier) != tier:
            assert response.headers["x-tierline-fallback"] == "tier_not_allowed"


async def test_a_refused_tier_is_named(door: FrontDoor) -> None:
    token = await door.key(allowed_tiers=["small", "medium"])
    by_model = await door.chat("big", token=token)
    pinned = await door.chat("auto", token=token, headers={"x-tierline-tier": "large"})
    for response in (by_model, pinned):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (403, "tier_not_allowed", "permission_error")
        assert "'large'" in error["message"]
        assert error["message"].endswith("It may use: small, medium.")
    assert (await door.chat("auto", token=token, headers={"x-tierline-tier": "medium"})).status_code == 200


async def test_a_tier_that_nothing_serves_is_no_fault_of_the_gateway(door: FrontDoor) -> None:
    token = await door.key(allowed_tiers=["xlarge"])
    response = await door.chat("auto", token=token)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "tier_not_allowed")


async def test_a_refused_route_is_named(door: FrontDoor) -> None:
    token = await door.key(allowed_routes=["embeddings", "rerank"])
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        response = await door.client.post(path, json={"model": "tiny", **body}, headers=door.headers(token))
        assert response.status_code == 403, path
        message = response.json()["error"]["message"]
        route = "chat" if "chat" in path else path.split("/")[2]
        assert message == f"This key may not use the route '{route}'. It may use: embeddings, rerank."
    answer = await door.client.post(
        "/v1/embeddings", json={"model": "vectors", "input": "hi"}, headers=door.headers(token)
    )
    assert answer.status_code == 200
    assert len(await door.rows()) == 1, "what is refused asks nobody"


def test_every_route_to_models_is_one_that_keys_can_be_kept_to() -> None:
    dialects = [getattr(route.handler, "args", (None,))[0] for route in PATHS.values()]
    scopes = {route_scope(dialect.route) for dialect in dialects if dialect is not None}
    assert {"chat", "messages", "embeddings"} <= scopes <= set(ROUTES)


async def test_a_change_of_what_a_key_may_use_holds_without_a_restart(door: FrontDoor) -> None:
    token = await door.key(name="ci")
    assert (await door.chat("big", token=token)).status_code == 200
    await change_key(door.services.database, "ci", KeyChange(allowed_tiers=["small"]))
    await door.services.keys.refresh()
    assert (await door.chat("big", token=token)).status_code == 403
    await change_key(door.services.database, "ci", KeyChange(allowed_tiers=None))
    await door.services.keys.refresh()
    assert (await door.chat("big", token=token)).status_code == 200
    soon = int(time.time() * 1000) + 300
    await change_key(door.services.database, "ci", KeyChange(expires_ms=soon))
    await door.services.keys.refresh()
    while int(time.time() * 1000) < soon:
        pass
    assert (await door.chat("big", token=token)).json()["error"]["code"] == "expired_api_key"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allowed_tiers": ["tiny"]}, "'allowed_tiers' does not know 'tiny': choose from small, medium, large, xlarge"),
        ({"allowed_routes": ["chats"]}, "'allowed_routes' does not know 'chats': choose from chat, completions"),
        ({"allowed_models": []}, "'allowed_models' is empty"),
        ({"parallel": 0}, "'parallel' must be between 1 and"),
        ({"budget_nanousd": -1}, "'budget_usd' must be between 0 and"),
        ({"expires_ms": 1}, "would have expired already"),
        ({"name": "a/b"}, "is no name for a key"),
    ],
)
async def test_scopes_that_make_no_sense(door: FrontDoor, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidKeyRequest, match=said):
        await door.key(**options)
    await door.key(name="ci", parallel=3)
    with pytest.raises(InvalidKeyRequest, match=said):
        await change_key(door.services.database, "ci", KeyChange(**options))
    (info,) = [info for info in await list_keys(door.services.database) if info.name == "ci"]
    assert (info.parallel, info.allowed_tiers, info.allowed_routes) == (3, None, None)
