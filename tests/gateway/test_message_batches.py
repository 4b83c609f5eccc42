"""`/v1/messages/batches` by the official Anthropic SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic.types.messages import MessageBatch

from bench.mock_upstream import MockUpstream
from tests.gateway.batching import begin, document, ended, line, lines_in, sdk_of
from tests.gateway.front_door import FrontDoor, front_door


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, document(upstream)) as running:
        yield running


@pytest_asyncio.fixture
async def sdk(door: FrontDoor) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.token, max_retries=0) as client:
        yield client


def asking(custom_id: str, model: str = "mock", **more: Any) -> Any:
    messages = [{"role": "user", "content": f"Say {custom_id}"}]
    return {"custom_id": custom_id, "params": {"model": model, "max_tokens": 20, "messages": messages, **more}}


async def finished(sdk: anthropic.AsyncAnthropic, batch: MessageBatch) -> MessageBatch:
    async with asyncio.timeout(30):
        while batch.processing_status != "ended":
            await asyncio.sleep(0.02)
            batch = await sdk.messages.batches.retrieve(batch.id)
    return batch


def counts(batch: MessageBatch) -> dict[str, int]:
    return {name: count for name, count in batch.request_counts.model_dump().items() if count}


async def test_a_batch_from_its_requests_to_its_results(door: FrontDoor, sdk: anthropic.AsyncAnthropic) -> None:
    made = await sdk.messages.batches.create(requests=[asking("a"), asking("b"), asking("c", "refusing")])
    assert made.id.startswith("msgbatch_")
    assert (made.type, made.processing_status, made.ended_at, made.results_url) == (
        "message_batch", "in_progress", None, None,
    )  # fmt: skip
    assert counts(made) == {"processing": 3}
    assert (made.expires_at - made.created_at).total_seconds() == 86_400
    batch = await finished(sdk, made)
    assert counts(batch) == {"succeeded": 2, "errored": 1}
    assert batch.ended_at is not None
    found = {item.custom_id: item.result async for item in await sdk.messages.batches.results(batch.id)}
    assert set(found) == {"a", "b", "c"}
    for name in "ab":
        result = found[name]
        assert result.type == "succeeded"
        assert (result.message.role, result.message.content[0].type) == ("assistant", "text")
        assert result.message.usage.output_tokens > 0
    refused = found["c"]
    assert refused.type == "errored"
    assert refused.error.error.type == "invalid_request_error"
    rows = [row for row in await door.rows() if row["outcome"] == "success"]
    assert len(rows) == 2
    assert all("tierline-batch" in row["tags"] for row in rows)


async def test_cancel(sdk: anthropic.AsyncAnthropic) -> None:
    made = await sdk.messages.batches.create(requests=[asking("quick"), asking("stuck", "hanging")])
    with pytest.raises(anthropic.AnthropicError):
        await sdk.messages.batches.results(made.id)  # there are none yet
    async with asyncio.timeout(30):
        while (await sdk.messages.batches.retrieve(made.id)).request_counts.succeeded < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    told = await sdk.messages.batches.cancel(made.id)
    assert told.cancel_initiated_at is not None
    assert told.processing_status in ("canceling", "ended")
    batch = await finished(sdk, told)
    assert counts(batch) == {"succeeded": 1, "canceled": 1}
    found = {item.custom_id: item.result.type async for item in await sdk.messages.batches.results(batch.id)}
    assert found == {"quick": "succeeded", "stuck": "canceled"}
    again = await sdk.messages.batches.cancel(batch.id)
    assert again.processing_status == "ended"


async def test_pages_show_batches_of_messages_only(door: FrontDoor, sdk: anthropic.AsyncAnthropic) -> None:
    made = [await sdk.messages.batches.create(requests=[asking(str(number))]) for number in range(3)]
    async with sdk_of(door) as other:
        chat = await begin(other, [line("a")])
        assert [batch.id async for batch in sdk.messages.batches.list(limit=2)] == [one.id for one in made[::-1]]
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.batches.retrieve(chat.id.replace("batch_", "msgbatch_"))


async def test_a_file_may_ask_messages_as_well(door: FrontDoor) -> None:
    async with sdk_of(door) as sdk:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        batch = await ended(sdk, await begin(sdk, [line("a", url="/v1/messages", **asked)], "/v1/messages"))
        (found,) = await lines_in(sdk, batch.output_file_id)
    assert found["response"]["body"]["type"] == "message"


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "1 to 50000 requests"),
        ([asking("a"), asking("a")], "in an earlier request"),
        ([asking("")], "1 to 256 characters"),
        ([asking("a", stream=True)], "'stream' has no meaning"),
        ([{"custom_id": "a"}], "params"),
    ],
)
async def test_what_is_no_batch_is_refused(sdk: anthropic.AsyncAnthropic, requests: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        await sdk.messages.batches.create(requests=requests)
    assert refused.value.body["type"] == "error"  # type: ignore[index,call-overload]


async def test_who_may(door: FrontDoor, sdk: anthropic.AsyncAnthropic) -> None:
    made = await sdk.messages.batches.create(requests=[asking("a")])
    stranger = await door.key(name="stranger", team="others")
    async with anthropic.AsyncAnthropic(base_url=door.url, api_key=stranger, max_retries=0) as other:
        with pytest.raises(anthropic.NotFoundError):
            await other.messages.batches.retrieve(made.id)
    with pytest.raises(anthropic.NotFoundError):
        await sdk.messages.batches.retrieve("msgbatch_none")
