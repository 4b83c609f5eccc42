"""The memory for request bodies: who gets room, who waits, who is refused, and that all of it comes back."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.mock_upstream import MockUpstream
from gateway.bodies import Bodies
from gateway.dialects.errors import GatewayError, RateLimited, RequestTimeout, Unavailable
from tests.gateway.front_door import FrontDoor, configuration, eventually, front_door

MIB = 1024 * 1024
ROOT = Path(__file__).parents[2]


def bodies(most: int = 100) -> Bodies:
    return Bodies(most, patience_s=0)


async def taken(room: Bodies, key: str, amount: int) -> type[GatewayError] | None:
    try:
        await room.take(key, amount, None)
    except GatewayError as error:
        return type(error)
    return None


async def test_a_key_may_hold_as_much_as_it_leaves_free() -> None:
    room = bodies(100)
    assert [await taken(room, "a", 20) for _ in range(4)] == [None, None, RateLimited, RateLimited]
    assert await taken(room, "b", 55) is None, "the first one of a key finds room as long as there is any"
    assert await taken(room, "b", 1) is RateLimited
    assert await taken(room, "c", 6) is Unavailable
    assert await taken(room, "c", 5) is None
    assert room.held_bytes == 100


async def test_who_waits_is_let_in_when_there_is_room_and_in_turn() -> None:
    room = Bodies(100)
    await room.take("a", 90, None)
    order: list[str] = []

    async def wait(key: str, amount: int) -> None:
        await room.take(key, amount, None)
        order.append(key)

    waiting = [asyncio.create_task(wait(key, 60)) for key in ("b", "c")]
    await asyncio.sleep(0)
    small = asyncio.create_task(wait("d", 5))
    await small
    assert order == ["d"], "who fits does not wait for those who do not"
    room.give_back("a", 90)
    await waiting[0]
    assert not waiting[1].done()
    room.give_back("b", 60)
    await waiting[1]
    assert order == ["d", "b", "c"]
    assert room.held_bytes == 65


async def test_who_waits_and_leaves_takes_nothing() -> None:
    room = Bodies(100)
    await room.take("a", 90, None)
    for gives_back in (False, True):  # the turn may come in the moment of leaving
        leaving = asyncio.create_task(room.take("b", 60, None))
        await asyncio.sleep(0)
        if gives_back:
            room.give_back("a", 90)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert room.held_bytes == 0


async def test_the_requests_own_deadline_ends_the_wait() -> None:
    room = Bodies(100)
    await room.take("a", 90, None)
    with pytest.raises(RequestTimeout, match="x-tierline-deadline-ms"):
        await room.take("b", 60, 0.0)
    assert room.held_bytes == 90


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=60))
def test_no_order_of_requests_passes_the_bound_or_loses_room(steps: list[tuple[str, int, bool]]) -> None:
    async def run() -> None:
        room = bodies(100)
        held: list[tuple[str, int]] = []
        for key, amount, gives_back in steps:
            if gives_back and held:
                room.give_back(*held.pop(0))
            elif await taken(room, key, amount) is None:
                held.append((key, amount))
            assert room.held_bytes == sum(amount for _, amount in held) <= 100
        for one in held:
            room.give_back(*one)
        assert room.held_bytes == 0
        assert [await taken(room, key, 33) for key in "abc"] == [None] * 3

    asyncio.run(run())


# -- in a gateway ------------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def small_door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    """A gateway that holds 3 MiB of bodies, of at most 2 MiB, and lets nobody wait."""
    document = configuration({"up": upstream})
    document["server"] |= {"max_body_bytes": 2 * MIB, "max_held_body_bytes": 3 * MIB}
    document["models"]["mock"]["context_length"] = 10_000_000
    async with front_door(tmp_path, document) as door:
        door.services.bodies = Bodies(3 * MIB, patience_s=0)
        yield door


def head(token: str, framing: str, more: str = "") -> bytes:
    line = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {token}"
    return f"{line}\r\n{framing}\r\n{more}\r\n".encode()


async def opened(door: FrontDoor) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(door.url.rsplit(":", 1)[1]))


def chat(size: int, **fields: Any) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": "x" * size}], **fields}


async def metric(door: FrontDoor, name: str) -> float:
    text = (await door.client.get("/metrics")).text
    return float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0])


async def test_bodies_that_never_end_take_no_more_than_a_share(small_door: FrontDoor) -> None:
    door = small_door
    token, other = await door.key(), await door.key()
    open_bodies = []
    for _ in range(3):
        reader, writer = await opened(door)
        writer.write(head(token, f"content-length: {MIB}") + b"x" * (MIB - 1))
        open_bodies.append((reader, writer))
    status = await open_bodies[1][0].readline()
    assert status.split()[1] == b"429", "the first one holds a third, and must leave as much as it takes"
    answer = (await open_bodies[1][0].readuntil(b"\r\n\r\n")).decode().lower()
    assert "retry-after: 5" in answer
    assert await metric(door, "tierline_held_body_bytes") == MIB
    assert await metric(door, "tierline_requests_in_flight") == 1
    headers = door.headers(other)
    response = await door.client.post("/v1/chat/completions", json=chat(MIB), headers=headers)
    assert response.status_code == 200, "other keys have their own"
    assert (
        await door.client.post("/v1/chat/completions", json=chat(10), headers=door.headers(token))
    ).status_code == 200
    for _, writer in open_bodies:
        writer.close()
    await eventually(lambda: door.services.bodies.held_bytes == 0)


async def test_nothing_is_read_of_a_body_without_room(small_door: FrontDoor) -> None:
    door = small_door
    await door.services.bodies.take("somebody", 3 * MIB, None)
    reader, writer = await opened(door)
    writer.write(head(door.token, f"content-length: {MIB}", "expect: 100-continue\r\n"))
    assert (await reader.readline()).split()[1] == b"503", "and not 100"
    rest = await reader.read()
    assert json.loads(rest.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "gateway_overloaded"
    small = await door.chat()
    assert small.status_code == 200, "small bodies need no room"
    writer.close()


async def test_a_body_of_unknown_length_takes_room_as_it_grows(small_door: FrontDoor) -> None:
    door = small_door
    reader, writer = await opened(door)
    writer.write(head(door.token, "transfer-encoding: chunked"))
    for _ in range(8):
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    await eventually(lambda: door.services.bodies.held_bytes >= 8 * 65536)
    assert door.services.bodies.held_bytes <= 2 * 8 * 65536
    for _ in range(30):
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    assert (await reader.readline()).split()[1] in (b"413", b"429")
    await eventually(lambda: door.services.bodies.held_bytes == 0)
    writer.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
async def test_room_is_held_as_long_as_the_request_and_no_longer(
    small_door: FrontDoor, upstream: MockUpstream, path: str
) -> None:
    door = small_door
    headers = door.headers() | {"anthropic-version": "2023-06-01"}
    for body in (chat(MIB), chat(MIB, model="unknown"), {**chat(MIB), "temperature": 9}):
        await door.client.post(path, json=body, headers=headers)
        assert door.services.bodies.held_bytes == 0
    upstream.override, before = "hang", upstream.requests
    asking = asyncio.create_task(door.client.post("/v1/chat/completions", json=chat(MIB), headers=headers))
    await eventually(lambda: upstream.requests > before)
    assert door.services.bodies.held_bytes > MIB
    asking.cancel()
    await eventually(lambda: door.services.bodies.held_bytes == 0)


async def test_earlier_turns_take_room_as_well(small_door: FrontDoor) -> None:
    door = small_door
    first = {"model": "mock", "input": "x" * MIB}
    response = await door.client.post("/v1/responses", json=first, headers=door.headers())
    assert response.status_code == 200, response.text
    again = {"model": "mock", "input": "And then?", "previous_response_id": response.json()["id"]}
    assert (await door.client.post("/v1/responses", json=again, headers=door.headers())).status_code == 200
    await door.services.bodies.take("somebody", 3 * MIB, None)
    refused = await door.client.post("/v1/responses", json=again, headers=door.headers())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_overloaded")


async def test_kept_answers_are_read_where_there_is_room(small_door: FrontDoor) -> None:
    door = small_door
    made = await door.client.post("/v1/responses", json={"model": "mock", "input": "x" * MIB}, headers=door.headers())
    path = f"/v1/responses/{made.json()['id']}"
    assert (await door.client.get(f"{path}/input_items", headers=door.headers())).status_code == 200
    await door.services.bodies.take("somebody", 3 * MIB, None)
    for below in ("", "/input_items"):
        refused = await door.client.get(path + below, headers=door.headers())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_overloaded"), below
    door.services.bodies.give_back("somebody", 3 * MIB)
    assert (await door.client.get(path, headers=door.headers())).status_code == 200
    assert door.services.bodies.held_bytes == 0


def test_memory_of_large_bodies_goes_back_to_the_system() -> None:
    """Of many at once, in pieces as they come from a socket, with small things that stay in between. As glibc is by
    itself, 180 MB stay."""
    script = """
import gc
from gateway.bodies import give_memory_back
give_memory_back()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def load():
    stays, bodies = [], [bytearray() for _ in range(20)]
    for _ in range(160):
        for body in bodies:
            body += bytes(65536)
            stays.append(bytes(600))
    whole = [bytes(body) for body in bodies]
    del bodies, whole
    gc.collect()
    return stays
before = resident()
stays = [load() for _ in range(3)]
print(resident() - before)
"""
    command = [sys.executable, "-c", script]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert grown < 64 * MIB
