"""LangChain's OpenAI classes against the gateway, before servers of either dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from bench.mock_agent import TEXT
from bench.mock_peculiar import TEXT as PECULIAR_TEXT
from bench.mock_peculiar import PeculiarWire
from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, configuration, front_door
from tests.gateway.sdk_doors import BOTH, Doors, doors

QUESTION = "Name three rivers."


class Rivers(pydantic.BaseModel):
    """How many rivers."""

    rivers: int


@tool
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"rain in {city} for {days} days"


@tool
def now() -> str:
    """The time."""
    return "noon"


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Doors]:
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    async with doors(tmp_path) as running:
        yield running


def chat(gateway: Doors, model: str, **options: Any) -> ChatOpenAI:
    options.setdefault("max_retries", 0)
    return ChatOpenAI(
        model=model,
        base_url=f"{gateway.door.url}/v1",
        api_key=pydantic.SecretStr(gateway.door.token),
        stream_usage=True,
        **options,
    )


@pytest.mark.parametrize("model", BOTH)
async def test_invoke_and_stream(gateway: Doors, model: str) -> None:
    llm = chat(gateway, model)
    whole = await llm.ainvoke(QUESTION)
    assert "Rhine" in str(whole.content)
    assert whole.response_metadata["finish_reason"] == "stop"
    total: Any = None
    async for chunk in llm.astream(QUESTION):
        total = chunk if total is None else total + chunk
    assert total.content
    assert total.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[name] == whole.usage_metadata[name] > 0


@pytest.mark.parametrize("model", BOTH)
async def test_batch(gateway: Doors, model: str) -> None:
    answers = await chat(gateway, model).abatch([QUESTION, "And three lakes?", "And one sea?"])
    assert all("Rhine" in str(answer.content) for answer in answers)
    assert gateway.behind(model).requests == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BOTH)
async def test_tools(gateway: Doors, model: str, stream: bool) -> None:
    llm = chat(gateway, model).bind_tools([weather, now])
    asked = HumanMessage(QUESTION)
    said: Any = None
    if stream:
        async for chunk in llm.astream([asked]):
            said = chunk if said is None else said + chunk
    else:
        said = await llm.ainvoke([asked])
    assert [call["name"] for call in said.tool_calls] == ["weather", "now"]
    assert said.tool_calls[0]["args"]["days"] == 3
    assert said.invalid_tool_calls == []
    results = [await {"weather": weather, "now": now}[call["name"]].ainvoke(call) for call in said.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    answer = await llm.ainvoke([asked, said, *results])
    assert answer.response_metadata["finish_reason"] == "stop"
    assert b"rain in" in gateway.behind(model).records[-1].body


@pytest.mark.parametrize("model", BOTH)
async def test_structured_output(gateway: Doors, model: str) -> None:
    by_schema = chat(gateway, model).with_structured_output(Rivers, method="json_schema")
    assert await by_schema.ainvoke(QUESTION) == Rivers(rivers=3)
    asked = json.loads(gateway.behind(model).records[-1].body)
    assert asked["output_config" if model == "claude" else "response_format"]


async def test_images(gateway: Doors) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    answer = await chat(gateway, "claude").ainvoke([HumanMessage([{"type": "text", "text": "What?"}, image])])
    assert answer.content


async def test_embeddings(gateway: Doors) -> None:
    embeddings = OpenAIEmbeddings(
        model="vectors",
        base_url=f"{gateway.door.url}/v1",
        api_key=pydantic.SecretStr(gateway.door.token),
        check_embedding_ctx_length=False,  # else it sends token ids of a tokenizer that it fetches
    )
    assert len(await embeddings.aembed_query("a")) == 16
    assert json.loads(gateway.agent.records[-1].body)["input"] == ["a"]


async def test_errors_and_broken_streams(gateway: Doors) -> None:
    with pytest.raises(openai.NotFoundError):
        await chat(gateway, "nobody").ainvoke(QUESTION)
    with pytest.raises(openai.APIError, match="broke off"):
        await chat(gateway, "agent-cut", streaming=True).ainvoke(QUESTION)
    assert TEXT in str((await chat(gateway, "agent").ainvoke(QUESTION)).content)


async def test_usage_of_a_server_that_repeats_it_is_not_added_up(tmp_path: Path) -> None:
    upstream = MockUpstream(PeculiarWire())
    await upstream.start()
    models = {"gemini": {"tier": "small", "backend": "up", "price": PRICE}}
    async with front_door(tmp_path, configuration({"up": upstream}, models)) as door:
        llm = ChatOpenAI(
            model="gemini", base_url=f"{door.url}/v1", api_key=pydantic.SecretStr(door.token), stream_usage=True
        )
        total: Any = None
        async for chunk in llm.astream(QUESTION):
            total = chunk if total is None else total + chunk
    await upstream.stop()
    assert total.content == PECULIAR_TEXT
    assert total.usage_metadata["total_tokens"] == 29
