"""`POST /v1/embeddings` and `/v1/rerank`: relayed unchanged, limited and billed by their input alone."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door


@pytest_asyncio.fixture
async def upstream():
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path, upstream):
    models = {
        "mock": {"tier": "small", "backend": "main", "price": PRICE},
        "vectors": {"kind": "embedding", "backend": "main", "upstream_model": "mock", "price": PRICE},
        "x-broken": {"kind": "embedding", "backend": "main", "upstream_model": "status,status=500", "price": PRICE},
    }
    async with front_door(tmp_path, configuration({"main": upstream}, models)) as door:
        yield door


@pytest_asyncio.fixture
async def sdk(door: FrontDoor):
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", ["vectors", "auto"])
async def test_vectors(door: FrontDoor, sdk: openai.AsyncOpenAI, upstream: MockUpstream, model: str) -> None:
    answer = await sdk.embeddings.create(model=model, input=["a", "b"], dimensions=16)
    assert answer.data[0].embedding == [0.125] * 16
    asked = msgspec.json.decode(upstream.records[-1].body)
    assert (asked["model"], asked["input"], asked["dimensions"]) == ("mock", ["a", "b"], 16)
    (row,) = await door.rows()
    assert (row["model"], row["tier"], row["input_tokens"], row["output_tokens"]) == ("vectors", "embedding", 5, 0)
    assert (row["cost_nanousd"], row["usage_source"], row["outcome"]) == (5_000, "reported", "success")


async def test_the_kinds_of_models_are_kept_apart(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="for chat, not for embedding"):
        await sdk.embeddings.create(model="mock", input="a")
    with pytest.raises(openai.BadRequestError, match="for embedding, not for chat"):
        await sdk.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.NotFoundError, match="No model for rerank"):
        await sdk.post("/rerank", body={"model": "auto", "query": "a", "documents": ["b"]}, cast_to=object)
    assert await door.rows() == []
    answer = await sdk.chat.completions.create(model="auto", messages=[{"role": "user", "content": "a"}])
    assert answer.model == "mock"  # `auto` never takes a model of another kind


async def test_failures_limits_and_budgets_are_those_of_every_route(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError):
        await sdk.embeddings.create(model="x-broken", input="a")
    poor = await door.key(budget_nanousd=1)
    with pytest.raises(openai.RateLimitError) as refused:
        await sdk.with_options(api_key=poor).embeddings.create(model="vectors", input="a long text" * 50)
    assert refused.value.code == "budget_exhausted"
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="tl-no").embeddings.create(model="vectors", input="a")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": 7}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"model": None}, "model"),
    ],
)
async def test_bad_input_names_the_field(door: FrontDoor, changes: dict[str, Any], param: str) -> None:
    body = {"model": "vectors", "input": "a", **changes}
    response = await door.client.post("/v1/embeddings", json=body, headers=door.headers())
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
