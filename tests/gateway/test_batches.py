"""`/v1/batches` by the official OpenAI SDK: what goes in, what comes out, and what each line costs."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.access.ceilings import KeyChange
from gateway.access.keys import change_key, find_key, revoke_key
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import batches
from tests.gateway.batching import CHAT, begin, document, ended, jsonl, line, lines_in, sdk_at, sdk_of, upload
from tests.gateway.front_door import FrontDoor, eventually, front_door


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, document(upstream)) as running:
        yield running


@pytest_asyncio.fixture
async def sdk(door: FrontDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk_at(door) as client:
        yield client


async def test_every_line_is_answered_once_under_its_name(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    wanted = [f"line {i}" for i in range(40)]
    made = await begin(sdk, (line(name) for name in wanted), metadata={"run": "nightly"})
    assert (made.status, made.endpoint, made.completion_window) == ("validating", CHAT, "24h")
    assert made.expires_at == made.created_at + 86_400
    batch = await ended(sdk, made)
    assert (batch.status, batch.metadata, batch.error_file_id, batch.errors) == (
        "completed", {"run": "nightly"}, None, None,
    )  # fmt: skip
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (40, 40, 0)
    assert batch.in_progress_at
    assert batch.finalizing_at
    assert batch.completed_at
    assert not (batch.failed_at)
    assert not (batch.expired_at)
    assert not (batch.cancelled_at)
    assert not (batch.cancelling_at)
    lines = await lines_in(sdk, batch.output_file_id)
    assert [one["custom_id"] for one in lines] == wanted  # in the order of the input
    assert len({one["id"] for one in lines}) == 40
    assert all(one["error"] is None and one["response"]["status_code"] == 200 for one in lines)
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] for one in lines)

    rows = await door.rows()
    assert sorted(row["request_id"] for row in rows) == sorted(one["response"]["request_id"] for one in lines)
    assert {row["outcome"] for row in rows} == {"success"}
    assert all(f'"tierline-batch":"{batch.id}"' in row["tags"] for row in rows)
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(row["input_tokens"] for row in rows) > 0
    assert batch.usage.output_tokens == sum(row["output_tokens"] for row in rows) > 0


async def test_a_batch_costs_what_the_factor_says(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    answer = await door.chat("mock", messages=line("one")["body"]["messages"])
    assert answer.status_code == 200
    await ended(sdk, await begin(sdk, [line("one")]))
    usual, reduced = await door.rows()
    assert usual["input_tokens"] == reduced["input_tokens"]
    assert usual["cost_nanousd"] == 2 * reduced["cost_nanousd"] > 0
    assert usual["price_version"].startswith("test-1@")
    assert reduced["price_version"].startswith("test-1*0.5@")


async def test_other_endpoints(sdk: openai.AsyncOpenAI) -> None:
    for endpoint, body, key in (
        ("/v1/embeddings", {"model": "vectors", "input": "some text"}, "data"),
        ("/v1/completions", {"model": "mock", "prompt": "Once"}, "choices"),
        ("/v1/responses", {"model": "mock", "input": "Once"}, "output"),
    ):
        made = await begin(sdk, [{"custom_id": "a", "method": "POST", "url": endpoint, "body": body}], endpoint)
        batch = await ended(sdk, made)
        assert (batch.status, batch.endpoint) == ("completed", endpoint)
        (said,) = await lines_in(sdk, batch.output_file_id)
        assert said["response"]["body"][key], endpoint


async def test_lines_that_fail_are_in_the_error_file(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    lines = [line("good"), line("unknown", "nobody"), line("refused", "refusing"), line("wrong", temperature="hot")]
    batch = await ended(sdk, await begin(sdk, lines))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 3)
    assert [one["custom_id"] for one in await lines_in(sdk, batch.output_file_id)] == ["good"]
    failed = {one["custom_id"]: one["response"] for one in await lines_in(sdk, batch.error_file_id)}
    assert {name: said["status_code"] for name, said in failed.items()} == {
        "unknown": 404,
        "refused": 422,
        "wrong": 400,
    }
    assert failed["unknown"]["body"]["error"]["code"] == "model_not_found"
    assert failed["wrong"]["body"]["error"]["param"] == "temperature"


async def test_a_server_that_fails_once_is_asked_again(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    batch = await ended(sdk, await begin(sdk, [line("one", "failing-once")]))
    assert len(await lines_in(sdk, batch.output_file_id)) == 1
    assert sorted(row["outcome"] for row in await door.rows()) == ["error", "success"]


async def test_a_server_that_is_away_is_waited_for(
    door: FrontDoor, upstream: MockUpstream, sdk: openai.AsyncOpenAI
) -> None:
    port = upstream.port
    await upstream.stop()
    made = await begin(sdk, [line("one"), line("two")])
    again = door.services.metrics.batch_lines.labels("asked_again")
    await eventually(lambda: again.value >= 2)
    assert (await sdk.batches.retrieve(made.id)).status == "in_progress"
    await upstream.start(port)
    batch = await ended(sdk, made)
    assert len(await lines_in(sdk, batch.output_file_id)) == 2


async def test_wrong_lines_fail_the_batch_before_anything_is_asked(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    lines = [
        line("fine"), b"not json", {**line("a"), "method": "GET"}, line("a", url="/v1/embeddings"), line("fine"), b"",
        {"custom_id": "b"}, line("c", stream=True), {**line("d"), "body": []}, {**line("e"), "extra": 1}, line(""),
        {**line("f"), "custom_id": 1},
    ]  # fmt: skip
    batch = await ended(sdk, await begin(sdk, lines))
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(fault.line, fault.code) for fault in batch.errors.data] == [
        (2, "invalid_json_line"), (3, "invalid_method"), (4, "mismatched_endpoint"), (5, "duplicate_custom_id"),
        (7, "missing_required_parameter"), (8, "unsupported_parameter"), (9, "invalid_body"), (10, "unknown_parameter"),
        (11, "invalid_custom_id"), (12, "invalid_type"),
    ]  # fmt: skip
    assert await door.rows() == []


async def test_an_empty_file_fails_the_batch(sdk: openai.AsyncOpenAI) -> None:
    batch = await ended(sdk, await begin(sdk, [b"", b"  "]))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [fault.code for fault in batch.errors.data] == ["empty_file"]


async def test_cancel_stops_what_runs_and_keeps_what_is_done(
    door: FrontDoor, upstream: MockUpstream, sdk: openai.AsyncOpenAI
) -> None:
    made = await begin(sdk, [line("done"), *(line(f"never {i}", "hanging") for i in range(30))])
    done = door.services.metrics.batch_lines.labels("completed")
    await eventually(lambda: done.value == 1 and door.services.pools["up"].replicas[0].outstanding > 0)
    batch = await sdk.batches.cancel(made.id)
    assert (batch.status, batch.cancelling_at is not None) == ("cancelling", True)
    batch = await ended(sdk, batch)
    assert (batch.status, batch.cancelled_at is not None) == ("cancelled", True)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (31, 1, 30)
    assert [one["custom_id"] for one in await lines_in(sdk, batch.output_file_id)] == ["done"]
    failed = await lines_in(sdk, batch.error_file_id)
    assert {one["error"]["code"] for one in failed} == {"batch_cancelled"}
    assert {one["custom_id"] for one in failed} == {f"never {i}" for i in range(30)}
    await eventually(lambda: door.services.pools["up"].replicas[0].outstanding == 0)
    assert {row["outcome"] for row in await door.rows()} <= {"success", "cancelled"}
    with pytest.raises(openai.ConflictError, match="nothing left to cancel"):
        await sdk.batches.cancel(made.id)


async def test_a_revoked_key_stops_its_batches(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    token = await door.key(name="temporary")
    async with sdk_of(door, token) as other:
        made = await begin(other, [line("done"), line("never", "hanging")])
    done = door.services.metrics.batch_lines.labels("completed")
    await eventually(lambda: done.value == 1)
    await revoke_key(door.services.database, "temporary")
    batch = await ended(sdk, made)  # another key of the project still sees it
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].code == "key_not_in_force"
    assert [one["custom_id"] for one in await lines_in(sdk, batch.output_file_id)] == ["done"]
    assert [one["custom_id"] for one in await lines_in(sdk, batch.error_file_id)] == ["never"]


async def test_out_of_time(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    made = await begin(sdk, [line("done"), line("never", "hanging")])
    done = door.services.metrics.batch_lines.labels("completed")
    await eventually(lambda: done.value == 1)
    ((run, _),) = door.services.batches._runs.values()
    async with door.services.database.write() as connection:
        await connection.execute(batches.update().values(expires_ms=now_ms()))
    run.batch = type(run.batch)(**{**{n: getattr(run.batch, n) for n in run.batch.__struct_fields__}, "expires_ms": 0})
    batch = await ended(sdk, made)
    assert (batch.status, batch.expired_at is not None) == ("expired", True)
    (missing,) = await lines_in(sdk, batch.error_file_id)
    assert (missing["custom_id"], missing["error"]["code"]) == ("never", "batch_expired")
    assert len(await lines_in(sdk, batch.output_file_id)) == 1


async def test_limits_are_waited_out_and_no_line_fails(door: FrontDoor) -> None:
    token = await door.key(requests_per_minute=1200, parallel=2, name="slow")
    async with sdk_of(door, token) as sdk:
        batch = await ended(sdk, await begin(sdk, (line(str(i)) for i in range(30))))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (30, 0)
    assert len(await door.rows()) == 30


async def test_a_spent_budget_fails_the_lines_it_does_not_cover(door: FrontDoor) -> None:
    token = await door.key(budget_nanousd=200_000, name="poor")
    async with sdk_of(door, token) as sdk:
        lines = [line(str(i), max_tokens=20) for i in range(20)]
        batch = await ended(sdk, await begin(sdk, lines))
        failed = await lines_in(sdk, batch.error_file_id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed + batch.request_counts.failed == 20
    assert 0 < batch.request_counts.completed < 20
    assert {one["response"]["body"]["error"]["code"] for one in failed} == {"budget_exhausted"}
    assert sum(row["cost_nanousd"] for row in await door.rows()) <= 200_000


async def test_a_policy_that_lets_requests_wait_for_money_lets_lines_wait(door: FrontDoor) -> None:
    policy = """
version: 1
name: default
owner: us
routes: [{tier: small}]
budget: {monthly_usd: %s, when_exhausted: queue}
"""
    door.write_policy(policy % "0.0002")
    await eventually(lambda: door.services.policies.current.named("default").document.budget is not None)
    async with sdk_of(door) as sdk:
        batch = await begin(sdk, [line(str(i), max_tokens=20) for i in range(20)])
        await asyncio.sleep(1.5)  # longer than the first look for money
        batch = await sdk.batches.retrieve(batch.id)
        # Those that the budget covers are answered; the others wait, and none has failed.
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.failed) == ("in_progress", 0)
        assert 0 < batch.request_counts.completed < 20
        door.write_policy(policy % "50")
        batch = await ended(sdk, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 0)


async def test_lines_that_wait_for_money_fail_once_nobody_may_wait(door: FrontDoor) -> None:
    policy = """
version: 1
name: default
owner: us
routes: [{tier: small}]
budget: {monthly_usd: 0.0000001, when_exhausted: %s}
"""
    door.write_policy(policy % "queue")
    await eventually(lambda: door.services.policies.current.named("default").document.budget is not None)
    async with sdk_of(door) as sdk:
        batch = await begin(sdk, [line("a", max_tokens=20)])
        await asyncio.sleep(0.3)
        assert (await sdk.batches.retrieve(batch.id)).status == "in_progress"
        door.write_policy(policy % "reject")
        batch = await ended(sdk, batch)
        (failed,) = await lines_in(sdk, batch.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "budget_exhausted"


async def test_a_byte_order_mark_before_the_first_line_is_no_fault(sdk: openai.AsyncOpenAI) -> None:
    file = await sdk.files.create(file=("a.jsonl", codecs.BOM_UTF8 + jsonl([line("a")])), purpose="batch")
    made = await sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = await ended(sdk, made)
    assert batch.status == "completed"
    assert [one["custom_id"] for one in await lines_in(sdk, batch.output_file_id)] == ["a"]


async def test_headers_of_the_batch_are_those_of_its_lines(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    headers = {"x-tierline-tags": "feature=labels", "x-tierline-tier": "small"}
    batch = await ended(sdk, await begin(sdk, [line("a", "auto")], extra_headers=headers))
    assert batch.status == "completed"
    (row,) = await door.rows()
    assert json.loads(row["tags"]) == {"feature": "labels", "tierline-batch": batch.id}
    with pytest.raises(openai.BadRequestError, match="x-tierline-tier"):
        await begin(sdk, [line("a")], extra_headers={"x-tierline-tier": "huge"})


async def test_the_tags_of_a_batch_leave_room_for_its_own(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    tags = [f"t{index}=1" for index in range(15)]
    batch = await ended(sdk, await begin(sdk, [line("a")], extra_headers={"x-tierline-tags": ",".join(tags)}))
    assert batch.status == "completed"
    (row,) = await door.rows()
    assert len(json.loads(row["tags"])) == 16
    for bad in (",".join([*tags, "t15=1"]), "tierline-batch=batch_other"):
        with pytest.raises(openai.BadRequestError, match="x-tierline-tags") as refused:
            await begin(sdk, [line("a")], extra_headers={"x-tierline-tags": bad})
        assert refused.value.code == "invalid_tags"


async def test_what_cannot_be_a_batch_is_refused(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    file_id = await upload(sdk, [line("a")])

    async def refused(**fields: object) -> str:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
        answer = await door.client.post("/v1/batches", json=body, headers=door.headers())
        assert 400 <= answer.status_code < 500
        return str(answer.json()["error"]["code"])

    assert await refused(endpoint="/v1/moderations") == "invalid_value"
    assert await refused(completion_window="1h") == "invalid_value"
    assert await refused(input_file_id="file-nobody") == "file_not_found"
    assert await refused(metadata={"a": "b" * 600}) == "invalid_value"
    assert await refused(metadata={"a": 1}) == "invalid_type"
    assert await refused(output_expires_after={"anchor": "created_at", "seconds": 5}) == "invalid_value"
    assert await refused(window="24h") == "unknown_parameter"


async def test_pages_and_other_projects(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    file_id = await upload(sdk, [line("a")])
    made = [await sdk.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h") for _ in range(3)]
    newest_first = [batch.id for batch in reversed(made)]
    assert [batch.id async for batch in sdk.batches.list(limit=1)] == newest_first
    token = await door.key(project="other")
    async with sdk_of(door, token) as other:
        assert [batch async for batch in other.batches.list()] == []
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="no batch"):
                await call(made[0].id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")


async def test_a_key_kept_to_other_routes(door: FrontDoor) -> None:
    token = await door.key(allowed_routes=["chat"])
    async with sdk_of(door, token) as sdk:
        with pytest.raises(openai.PermissionDeniedError, match="'batches'"):
            await sdk.batches.list()
        with pytest.raises(openai.PermissionDeniedError, match="'batches'"):
            await upload(sdk, [line("a")])
    token = await door.key(allowed_routes=["batches", "embeddings"])
    async with sdk_of(door, token) as sdk:
        with pytest.raises(openai.PermissionDeniedError, match="'chat'"):
            await begin(sdk, [line("a")])


async def test_the_key_may_change_while_the_batch_runs(door: FrontDoor) -> None:
    token = await door.key(name="changing")
    async with sdk_of(door, token) as sdk:
        made = await begin(sdk, (line(str(i), "slow") for i in range(400)))
        done = door.services.metrics.batch_lines.labels("completed")
        await eventually(lambda: done.value >= 1)
        info = await find_key(door.services.database, "changing")
        await change_key(door.services.database, info.key_id, KeyChange(allowed_models=["mock"]))
        batch = await ended(sdk, made)
        failed = await lines_in(sdk, batch.error_file_id)
    assert {one["response"]["status_code"] for one in failed} == {403}
    assert batch.request_counts is not None
    assert batch.request_counts.completed + len(failed) == 400


async def test_requests_go_before_lines(tmp_path: Path, upstream: MockUpstream) -> None:
    made = document(upstream, concurrency=4)
    made["limits"] = {"max_concurrency": 4, "max_queued": 64}
    async with front_door(tmp_path, made) as door, sdk_at(door) as sdk:
        batch = await begin(sdk, (line(str(i), "slow") for i in range(60)))
        await eventually(lambda: door.services.pools["up"].replicas[0].outstanding > 0)
        most = 0
        answers = [asyncio.create_task(door.chat("slow")) for _ in range(12)]
        while not all(task.done() for task in answers):
            most = max(most, door.services.batches._rooms.running)
            await asyncio.sleep(0.01)
        assert most <= 3  # a quarter of the places stays free
        assert {task.result().status_code for task in answers} == {200}
        assert (await sdk.batches.retrieve(batch.id)).status == "in_progress"
        await sdk.batches.cancel(batch.id)
        await ended(sdk, batch)
