"""Answers that are kept: looked up, gone on from, deleted; whose they are, and what becomes of them in an outage."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from sqlalchemy import func, select

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.ledger.schema import responses
from tests.gateway.front_door import FrontDoor, configuration, front_door
from tests.gateway.responses_types import checked_items, checked_response, events
from tests.gateway.several import kill, several

HELLO = "Name three rivers."


@pytest_asyncio.fixture
async def sdk(door: FrontDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
        yield client


async def ask(door: FrontDoor, token: str | None = None, **body: Any) -> httpx.Response:
    body = {"model": "mock", "input": HELLO, **body}
    return await door.client.post("/v1/responses", json=body, headers=door.headers(token))


async def get(door: FrontDoor, path: str, token: str | None = None, **query: Any) -> httpx.Response:
    return await door.client.get(f"/v1/responses/{path}", params=query, headers=door.headers(token))


def asked(upstream: MockUpstream) -> list[dict[str, Any]]:
    """The conversation that the model's server got last."""
    found: list[dict[str, Any]] = msgspec.json.decode(upstream.records[-1].body)["messages"]
    return found


async def kept(door: FrontDoor) -> int:
    async with door.services.database.read() as connection:
        return int(await connection.scalar(select(func.count()).select_from(responses)) or 0)


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


# Look up, list, delete.


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_found_again_as_it_was_given(door: FrontDoor, stream: bool) -> None:
    response = await ask(door, stream=stream, metadata={"a": "b"}, instructions="Be brief.")
    given = events(response)[-1]["response"] if stream else response.json()
    assert given["store"] is True
    found = await get(door, given["id"])
    assert (found.status_code, found.json()) == (200, given)
    checked_response(found.json())
    assert found.headers["x-request-id"] != response.headers["x-request-id"]


async def test_the_sdk_looks_up_lists_and_deletes(sdk: openai.AsyncOpenAI, door: FrontDoor) -> None:
    first = await sdk.responses.create(model="mock", input=HELLO)
    assert await sdk.responses.retrieve(first.id) == first
    second = await sdk.responses.create(model="mock", input="And lakes?", previous_response_id=first.id)
    listed = [item async for item in sdk.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [(item.type, getattr(item, "role", None)) for item in listed] == [
        ("message", "user"), ("message", "assistant"), ("message", "user"),
    ]  # fmt: skip
    await sdk.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(second.id)
    assert await kept(door) == 1
    raw = await door.client.delete(f"/v1/responses/{first.id}", headers=door.headers())
    assert raw.json() == {"id": first.id, "object": "response", "deleted": True}
    again = await door.client.delete(f"/v1/responses/{first.id}", headers=door.headers())
    assert error_of(again) == (404, "response_not_found", None)


async def test_input_items_are_all_that_the_model_was_given(door: FrontDoor) -> None:
    items = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?", "id": "msg_mine"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    first = (await ask(door, input=items)).json()
    second = (await ask(door, input="Really?", previous_response_id=first["id"])).json()
    page = (await get(door, f"{second['id']}/input_items", order="asc", limit=100)).json()
    listed = checked_items(page)
    assert [item["type"] for item in listed] == [
        "message", "message", "reasoning", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip
    assert listed[1]["id"] == "msg_mine"
    assert listed[5] == first["output"][0]
    assert len({item["id"] for item in listed}) == 7
    assert (page["first_id"], page["last_id"], page["has_more"]) == (listed[0]["id"], listed[-1]["id"], False)
    # Page by page, and from the other end by default.
    assert (await get(door, f"{second['id']}/input_items")).json()["data"] == listed[::-1]
    middle = (await get(door, f"{second['id']}/input_items", after=listed[5]["id"], limit=2)).json()
    assert (middle["data"], middle["has_more"]) == ([listed[4], listed[3]], True)


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", {"stream": "true"}, "stream"),
        ("", {"starting_after": "3"}, "starting_after"),
        ("", {"include_obfuscation": "true"}, "include_obfuscation"),
        ("", {"include[]": "code_interpreter_call.outputs"}, "include"),
        ("", {"fields": "id"}, "fields"),
        ("/input_items", {"limit": "0"}, "limit"),
        ("/input_items", {"limit": "101"}, "limit"),
        ("/input_items", {"limit": "ten"}, "limit"),
        ("/input_items", {"order": "up"}, "order"),
        ("/input_items", {"after": "msg_none"}, "after"),
        ("/input_items", {"before": "x"}, "before"),
    ],
)
async def test_queries_are_honoured_or_refused(door: FrontDoor, path: str, query: dict[str, str], param: str) -> None:
    id = (await ask(door)).json()["id"]
    response = await get(door, id + path, **query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    fine = {"stream": "false", "include[]": "message.output_text.logprobs"} if not path else {"limit": "1"}
    assert (await get(door, id + path, **fine)).status_code == 200


async def test_nothing_can_be_cancelled(door: FrontDoor) -> None:
    id = (await ask(door)).json()["id"]
    for known, expected in ((id, (400, "not_in_background", None)), ("resp_none", (404, "response_not_found", None))):
        response = await door.client.post(f"/v1/responses/{known}/cancel", headers=door.headers())
        assert error_of(response) == expected


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/responses", 405),
        ("PUT", "/v1/responses/resp_x", 405),
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/v1/responses/input_tokens", 404),
        ("GET", "/v1/responses/resp_x/output_items", 404),
        ("GET", "/v1/responses/", 404),
        ("PUT", "/v1/responses/x", 404),
    ],
)
async def test_what_is_not_there(door: FrontDoor, method: str, path: str, status: int) -> None:
    response = await door.client.request(method, path, headers=door.headers())
    assert response.status_code == status
    assert response.json()["error"]["code"] != "response_not_found"


@pytest.mark.parametrize("id", ["resp_x", "x", "chatcmpl-1", "%F0%9F%90%8D", "a%2Fb", "x" * 2000])
async def test_an_id_that_nobody_has(door: FrontDoor, id: str) -> None:
    for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        response = await door.client.request(method, f"/v1/responses/{id}{below}", headers=door.headers())
        expected = (404, "response_not_found", None)
        assert error_of(response) == (expected if "%2F" not in id else (response.status_code, "unknown_url", None))
    assert (await door.client.get(f"/v1/responses/{id}")).status_code in (401, 404)


# Going on.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on(door: FrontDoor, upstream: MockUpstream, stream: bool) -> None:
    first = (await ask(door, instructions="Speak German.")).json()
    said = first["output"][0]["content"][0]["text"]
    body = {"input": "And lakes?", "previous_response_id": first["id"], "instructions": "Speak French."}
    second = await ask(door, stream=stream, **body)
    second_id = (events(second)[-1]["response"] if stream else second.json())["id"]
    earlier = [{"role": "user", "content": HELLO}, {"role": "assistant", "content": said}]
    assert asked(upstream) == [
        {"role": "system", "content": "Speak French."}, *earlier, {"role": "user", "content": "And lakes?"},
    ]  # fmt: skip
    third = (await ask(door, input="And seas?", previous_response_id=second_id)).json()
    assert third["previous_response_id"] == second_id
    conversation = asked(upstream)
    assert [turn["role"] for turn in conversation] == ["user", "assistant", "user", "assistant", "user"]
    assert conversation[:2] == earlier
    # From one answer, two conversations can go on.
    await ask(door, input="Or hills?", previous_response_id=first["id"])
    assert asked(upstream) == [*earlier, {"role": "user", "content": "Or hills?"}]
    assert {row["outcome"] for row in await door.rows()} == {"success"}


async def test_tools_go_on_without_sending_the_call_again(door: FrontDoor, upstream: MockUpstream) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    first = (await ask(door, input=[{"role": "user", "content": "Weather?"}, call], store=True)).json()
    output = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    await ask(door, input=[output], previous_response_id=first["id"])
    # What was said after the call is part of the turn of the call.
    assert [turn["role"] for turn in asked(upstream)] == ["user", "assistant", "tool"]


async def test_only_what_is_stored_can_be_gone_on_from(door: FrontDoor, upstream: MockUpstream) -> None:
    first = (await ask(door, store=False)).json()
    assert first["store"] is False
    assert await kept(door) == 0
    asked_before = upstream.requests
    refused = await ask(door, previous_response_id=first["id"])
    assert error_of(refused) == (404, "previous_response_not_found", "previous_response_id")
    assert first["id"] in refused.json()["error"]["message"]
    assert error_of(await get(door, first["id"])) == (404, "response_not_found", None)
    assert upstream.requests == asked_before
    assert door.services.limiter.open_holds == 0


async def test_a_conversation_with_a_hole_is_refused(door: FrontDoor) -> None:
    first = (await ask(door)).json()["id"]
    second = (await ask(door, previous_response_id=first)).json()["id"]
    third = (await ask(door, previous_response_id=second)).json()["id"]
    await door.client.delete(f"/v1/responses/{first}", headers=door.headers())
    refused = await ask(door, previous_response_id=third)
    assert error_of(refused) == (404, "previous_response_not_found", "previous_response_id")
    assert first in refused.json()["error"]["message"]
    assert (await get(door, third)).status_code == 200


async def test_a_conversation_that_grows_too_long_is_refused(tmp_path: Path, upstream: MockUpstream) -> None:
    document = configuration({"up": upstream})
    document["server"]["max_body_bytes"] = 8192
    async with front_door(tmp_path, document) as door:
        last: str | None = None
        for _ in range(2):
            last = (await ask(door, input="x" * 3000, previous_response_id=last)).json()["id"]
        refused = await ask(door, previous_response_id=last)
        assert error_of(refused) == (400, "conversation_too_long", "previous_response_id")
        assert "8192" in refused.json()["error"]["message"]


async def test_images_of_earlier_turns_need_a_model_that_sees(tmp_path: Path, upstream: MockUpstream) -> None:
    document = configuration({"up": upstream})
    document["models"]["eyes"] = {**document["models"]["mock"], "capabilities": ["vision"]}
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]}]
    async with front_door(tmp_path, document) as door:
        first = (await ask(door, model="eyes", input=picture)).json()
        refused = await ask(door, previous_response_id=first["id"])
        assert error_of(refused) == (400, "unsupported_parameter", "previous_response_id")
        assert (await ask(door, model="eyes", previous_response_id=first["id"])).status_code == 200
        assert asked(upstream)[0]["content"][0]["image_url"]["url"] == "https://example.org/a.png"
        items = (await get(door, f"{first['id']}/input_items")).json()
        assert checked_items(items)[0]["content"][0]["image_url"] == "https://example.org/a.png"


# Whose it is.


async def test_only_the_project_knows_of_it(door: FrontDoor, upstream: MockUpstream) -> None:
    own = await door.key(team="support", project="chat")
    same = await door.key(team="support", project="chat")
    others = [await door.key(team="support", project="other"), await door.key(team="sales", project="chat")]
    id = (await ask(door, own)).json()["id"]
    assert (await get(door, id, same)).status_code == 200
    assert (await ask(door, same, previous_response_id=id)).status_code == 200
    asked_before = upstream.requests
    for token in others:
        assert error_of(await get(door, id, token)) == (404, "response_not_found", None)
        assert error_of(await get(door, f"{id}/input_items", token))[:2] == (404, "response_not_found")
        refused = await ask(door, token, previous_response_id=id)
        assert error_of(refused) == (404, "previous_response_not_found", "previous_response_id")
        nothing = await door.client.delete(f"/v1/responses/{id}", headers=door.headers(token))
        assert nothing.status_code == 404
    assert upstream.requests == asked_before
    assert (await get(door, id, own)).status_code == 200


async def test_a_key_without_the_route_reads_nothing(door: FrontDoor) -> None:
    id = (await ask(door)).json()["id"]
    token = await door.key(allowed_routes=["chat"])
    for path in (id, f"{id}/input_items"):
        assert error_of(await get(door, path, token)) == (403, "route_not_allowed", None)
    for body in ({}, {"previous_response_id": id}, {"previous_response_id": "resp_none"}):
        assert error_of(await ask(door, token, **body)) == (403, "route_not_allowed", None)


# Nothing is kept, or nothing can be.


async def test_a_gateway_that_keeps_nothing_says_so(tmp_path: Path, upstream: MockUpstream) -> None:
    document = configuration({"up": upstream})
    async with front_door(tmp_path, document) as door:
        old = (await ask(door)).json()["id"]
    async with front_door(tmp_path, {**document, "responses": {"keep_days": 0}}) as door:
        answer = (await ask(door)).json()
        assert answer["store"] is False
        for name, value in (("store", True), ("previous_response_id", old)):
            refused = await ask(door, **{name: value})
            assert error_of(refused) == (400, "unsupported_parameter", name)
        missing = await get(door, answer["id"])
        assert error_of(missing) == (404, "response_not_found", None)
        assert "keep_days" in missing.json()["error"]["message"]
        await door.services.responses.purge()
        assert await kept(door) == 0, "what was kept before is deleted"


def change(door: FrontDoor, statement: str) -> sqlite3.Connection:
    """Run a statement from outside. In a thread, because the gateway's loop must go on to release its own locks."""
    other = sqlite3.connect(door.root / "var/tierline.db", timeout=30, isolation_level=None, check_same_thread=False)
    other.execute(statement)
    return other


@asynccontextmanager
async def without_table(door: FrontDoor) -> AsyncIterator[None]:
    """The database fails on every statement about kept answers, while the ledger goes on."""
    (await asyncio.to_thread(change, door, "ALTER TABLE responses RENAME TO away")).close()
    yield
    (await asyncio.to_thread(change, door, "ALTER TABLE away RENAME TO responses")).close()


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_database_the_answer_still_comes(door: FrontDoor, stream: bool) -> None:
    earlier = (await ask(door)).json()
    async with without_table(door):
        response = await ask(door, stream=stream)
        answer = events(response)[-1]["response"] if stream else response.json()
        assert (answer["status"], answer["store"]) == ("completed", False)
        refused = await ask(door, previous_response_id=earlier["id"])
        assert error_of(refused) == (503, "responses_unavailable", None)
        for path in (earlier["id"], f"{earlier['id']}/input_items"):
            assert error_of(await get(door, path)) == (503, "responses_unavailable", None)
        removed = await door.client.delete(f"/v1/responses/{earlier['id']}", headers=door.headers())
        assert error_of(removed) == (503, "responses_unavailable", None)
    assert error_of(await get(door, answer["id"])) == (404, "response_not_found", None)
    assert (await get(door, earlier["id"])).status_code == 200
    assert (await ask(door, previous_response_id=earlier["id"])).json()["store"] is True
    page = (await door.client.get("/metrics")).text
    assert 'tierline_responses_kept_total{outcome="failed"} 1.0' in page
    assert 'tierline_responses_kept_total{outcome="kept"} 2.0' in page
    assert [row["outcome"] for row in await door.rows()] == ["success"] * 3


async def test_a_database_that_does_not_answer_is_not_waited_for(
    door: FrontDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.responses.store.PATIENCE_S", 0.2)
    other = await asyncio.to_thread(change, door, "BEGIN IMMEDIATE")
    answer = (await ask(door)).json()
    other.execute("ROLLBACK")
    other.close()
    assert answer["store"] is False


async def test_what_is_kept_is_closed_to_other_users(door: FrontDoor) -> None:
    await ask(door, input="A secret.")
    files = [path for path in (door.root / "var").glob("tierline.db*") if b"A secret." in path.read_bytes()]
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


# Processes.


@pytest.mark.redis
async def test_whoever_saw_the_end_can_go_on_elsewhere_though_the_process_was_killed(
    tmp_path: Path, upstream: MockUpstream, redis_server: RedisServer
) -> None:
    async with several(tmp_path, redis_server.url, upstream, workers=2) as running:
        key = await running.key("k")

        def worker(number: int) -> httpx.AsyncClient:
            transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / f"var/run/gateway-{number}.sock"))
            headers = {"authorization": f"Bearer {key.token}"}
            return httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=60, headers=headers)

        last: dict[str, Any] = {}
        body = {"model": "mock", "input": HELLO, "stream": True}
        async with worker(1) as client, client.stream("POST", "/v1/responses", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:") and '"response.completed"' in line:
                    kill(running.pid(1))
                    last = json.loads(line.removeprefix("data:"))["response"]
                    break
        async with worker(2) as client:
            found = await client.get(f"/v1/responses/{last['id']}")
            assert (found.status_code, found.json()) == (200, last)
            body = {"model": "mock", "input": "And lakes?", "previous_response_id": last["id"]}
            assert (await client.post("/v1/responses", json=body)).status_code == 200
        assert [turn["role"] for turn in asked(upstream)] == ["user", "assistant", "user"]
