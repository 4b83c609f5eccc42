"""`POST /v1/embeddings` and `/v1/rerank`: relayed unchanged, limited and billed by their input alone."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.access.input_bound import PER_MESSAGE, PER_REQUEST, input_bound
from gateway.dialects.openai_embeddings import EMBEDDINGS
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tiers.features import estimate_prompt_tokens


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


@pytest.mark.parametrize("tier", ["bogus", "small"])
async def test_there_is_no_tier_to_ask_for(door: FrontDoor, upstream: MockUpstream, tier: str) -> None:
    body = {"model": "vectors", "input": "a"}
    headers = {**door.headers(), "x-tierline-tier": tier}
    response = await door.client.post("/v1/embeddings", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_tier")
    assert upstream.requests == 0


@pytest.mark.parametrize(
    ("model", "listed"), [("vectors", ["auto", "vectors"]), ("mock", ["auto", "mock"]), ("no", [])]
)
async def test_auto_is_listed_where_it_can_lead_to_a_model(door: FrontDoor, model: str, listed: list[str]) -> None:
    headers = door.headers(await door.key(allowed_models=[model]))
    page = (await door.client.get("/v1/models", headers=headers)).json()
    assert [described["id"] for described in page["data"]] == listed
    alone = await door.client.get("/v1/models/auto", headers=headers)
    assert alone.status_code == (200 if listed else 403)


LONG = "一段很长的文字" * 200  # far more tokens than 256, though fewer characters than the texts below


@pytest_asyncio.fixture
async def narrow(tmp_path, upstream):
    """A gateway whose models read 256 tokens at once."""
    models = {
        name: {"kind": kind, "backend": "main", "upstream_model": "mock", "context_length": 256, "price": PRICE}
        for name, kind in (("narrow", "embedding"), ("judge", "rerank"))
    }
    async with front_door(tmp_path, configuration({"main": upstream}, models)) as door:
        yield door


async def test_only_each_text_by_itself_must_fit_the_context(narrow: FrontDoor, upstream: MockUpstream) -> None:
    texts = [f"The text number {i} of this batch is short." for i in range(2048)]
    response = await narrow.client.post(
        "/v1/embeddings", json={"model": "narrow", "input": texts}, headers=narrow.headers()
    )
    assert response.status_code == 200, response.text
    assert msgspec.json.decode(upstream.records[-1].body)["input"] == texts
    poor = await narrow.key(budget_nanousd=2_048_000)  # a token for each: what is held is the sum of all
    response = await narrow.client.post(
        "/v1/embeddings", json={"model": "narrow", "input": texts}, headers=narrow.headers(poor)
    )
    assert (response.status_code, response.json()["error"]["code"]) == (429, "budget_exhausted")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"model": "narrow", "input": ["a longer one " * 120, LONG]}, "input"),
        ("/v1/embeddings", {"model": "narrow", "input": [7] * 600}, "input"),
        ("/v1/embeddings", {"model": "narrow", "input": [[7], [7] * 600]}, "input"),
        ("/v1/rerank", {"model": "judge", "query": "a", "documents": ["b", LONG]}, "documents"),
        ("/v1/rerank", {"model": "judge", "query": LONG, "documents": ["a", "b"]}, "documents"),
    ],
)
async def test_a_text_that_is_too_long_is_refused_by_its_field(
    narrow: FrontDoor, path: str, body: dict[str, Any], param: str
) -> None:
    response = await narrow.client.post(path, json=body, headers=narrow.headers())
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)


@pytest.mark.parametrize("given", [[7] * 200, [[7] * 100] * 2])
def test_a_token_id_counts_as_one_token(given: list[Any]) -> None:
    asked = EMBEDDINGS.parse(msgspec.json.encode({"model": "narrow", "input": given}))
    assert input_bound(asked.chat()) == PER_REQUEST + PER_MESSAGE * len(asked.messages) + 200
    assert estimate_prompt_tokens(asked.messages) == 4 * len(asked.messages) + 200


async def test_documents_fit_one_by_one(narrow: FrontDoor, upstream: MockUpstream) -> None:
    documents = ["a document of some words"] * 300
    body = {"model": "judge", "query": "words", "documents": documents}
    await narrow.client.post("/v1/rerank", json=body, headers=narrow.headers())
    assert msgspec.json.decode(upstream.records[-1].body)["documents"] == documents
