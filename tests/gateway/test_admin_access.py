"""Who gets into the admin API, and who into nothing at all: every route of the gateway is tried without a key."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from bench.mock_upstream import MockUpstream
from gateway.access.admin_keys import create_admin_key, revoke_admin_key, rotate_admin_key
from gateway.access.secret import load_secret, new_token
from gateway.admin import offloop, service
from gateway.admin.routes import ADMIN_ROUTES
from gateway.app import ROUTES
from gateway.dialects.errors import Unavailable
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.settings import Settings
from tests.conftest import unused_port
from tests.gateway.admin_door import Admin, admin, refused
from tests.gateway.front_door import FrontDoor, configuration, front_door

OPEN = {("GET", "/health/live"), ("GET", "/health/ready"), ("GET", "/metrics"), ("GET", "/openapi.json")}
EVERYTHING = [*ROUTES, *((route.method, route.path) for route in ADMIN_ROUTES)]


def concrete(path: str) -> str:
    """A path that such a route answers."""
    return re.sub(r"{\w+}", "resp_0", path)


@pytest.mark.parametrize("secret", [None, "Bearer tl-" + "0" * 43, "Bearer tla-" + "0" * 43, "Bearer", "Basic abc"])
async def test_nothing_but_what_is_listed_answers_without_a_key(
    door: FrontDoor, secret: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FAILURES", 10_000)
    headers = {} if secret is None else {"authorization": secret}
    for method, path in EVERYTHING:
        response = await door.client.request(method, concrete(path), headers=headers)
        assert response.status_code == (200 if (method, path) in OPEN else 401), (method, path, response.text)


async def test_a_key_opens_only_what_it_is_for(door: FrontDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FAILURES", 10_000)
    someone = await admin(door)
    for route in ADMIN_ROUTES:
        response = await door.client.request(route.method, concrete(route.path), headers=door.headers())
        assert refused(response) == (401, "invalid_admin_key"), route.path
        response = await door.client.request(route.method, concrete(route.path), headers={"x-api-key": someone.token})
        assert refused(response) == (401, "missing_admin_key"), route.path
    for method, path in ROUTES:
        if (method, path) not in OPEN:
            response = await door.client.request(method, concrete(path), headers=door.headers(someone.token))
            assert response.status_code == 401, path
            assert "those start with 'tl-'" in response.text


async def test_every_admin_route_asks_for_its_role(door: FrontDoor) -> None:
    reader, bound = await admin(door, "read"), await admin(door, organisation="default")
    for route in ADMIN_ROUTES:
        path = concrete(route.path).removeprefix("/admin/v1/")
        response = await reader.ask(route.method, path)
        if route.role == "write":
            assert refused(response) == (403, "read_only_key"), route.path
        else:
            assert response.status_code != 403, route.path
        if route.gateway_wide:
            assert refused(await bound.ask(route.method, path)) == (403, "organisation_key"), route.path
    assert {route.method for route in ADMIN_ROUTES if route.role == "read"} == {"GET", "POST"}
    assert [route.path for route in ADMIN_ROUTES if route.role == "read" and route.method == "POST"] == [
        "/admin/v1/policies/check"
    ]


async def test_an_admin_key_ends(door: FrontDoor) -> None:
    database, secret = door.services.database, load_secret(door.root / "var/secret")
    brief = await admin(door, expires_ms=now_ms() + 700)
    assert (await brief.get("self"))["role"] == "write"
    await asyncio.sleep(0.7)  # what passes here is the time itself
    assert refused(await brief.ask("GET", "self")) == (401, "expired_api_key")

    someone = await admin(door)
    rotated = await rotate_admin_key(database, secret, someone.key_id, overlap_ms=60_000)
    new = Admin(door, rotated.token, someone.key_id)
    assert (await someone.get("self"))["id"] == (await new.get("self"))["id"] == someone.key_id
    again = await rotate_admin_key(database, secret, someone.key_id, overlap_ms=0)
    for former in (someone, new):
        assert refused(await former.ask("GET", "self")) == (401, "expired_api_key")
    newest = Admin(door, again.token, someone.key_id)
    await newest.get("self")
    await revoke_admin_key(database, someone.key_id)
    for one in (someone, new, newest):
        assert refused(await one.ask("GET", "self")) == (401, "revoked_api_key")


async def test_wrong_keys_are_counted_by_address_and_logged_without_the_secret(
    door: FrontDoor, caplog: pytest.LogCaptureFixture
) -> None:
    someone, newcomer = await admin(door), await admin(door)
    await someone.get("self")
    wrong = [new_token("tla-") for _ in range(service.FAILURES)]
    for token in wrong:
        assert refused(await Admin(door, token, "").ask("GET", "self")) == (401, "invalid_admin_key")
    response = await Admin(door, new_token("tla-"), "").ask("GET", "self")
    assert refused(response) == (429, "too_many_failures")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    # Who was in before is not kept out by others at the same address; who was not has to wait.
    await someone.get("self")
    assert refused(await newcomer.ask("GET", "self")) == (429, "too_many_failures")
    text = "\n".join(f"{record.getMessage()} {getattr(record, 'fields', '')}" for record in caplog.records)
    assert text.count("admin key refused") == service.FAILURES
    assert "127.0.0.1" in text
    assert not any(token[4:12] in text for token in wrong)


def test_failures_drain_with_time() -> None:
    failures = service.Failures()
    for _ in range(service.FAILURES):
        assert failures.wait_s("a", 0.0) == 0
        failures.add("a", 0.0)
    assert failures.wait_s("a", 0.0) == pytest.approx(60 / service.FAILURES_PER_MINUTE)
    assert failures.wait_s("b", 0.0) == 0
    assert failures.wait_s("a", 6.01) == 0


async def test_the_admin_api_is_off_where_others_can_reach_it() -> None:
    def enabled(host: str, **admin: object) -> bool:
        return Settings.model_validate({"server": {"host": host}, "admin": admin}).admin_enabled()

    assert enabled("127.0.0.1")
    assert enabled("::1")
    assert enabled("localhost")
    assert not enabled("0.0.0.0")
    assert not enabled("10.0.0.7")
    assert enabled("0.0.0.0", listen="127.0.0.1:9000")
    assert enabled("0.0.0.0", enabled=True)
    assert not enabled("127.0.0.1", enabled=False)
    assert not enabled("127.0.0.1", listen="0.0.0.0:9000")


async def test_where_it_is_off_there_is_nothing(tmp_path: Path, upstream: MockUpstream) -> None:
    async with front_door(tmp_path, configuration({"up": upstream}) | {"admin": {"enabled": False}}) as door:
        someone = await admin(door)
        for route in ADMIN_ROUTES:
            path = concrete(route.path).removeprefix("/admin/v1/")
            assert refused(await someone.ask(route.method, path)) == (404, "unknown_url")


async def test_an_address_of_its_own(tmp_path: Path, upstream: MockUpstream) -> None:
    """A real process: the models' port knows no admin API, and the admin's no models."""
    port, admin_port = unused_port(), unused_port()
    document = configuration({"up": upstream}) | {"admin": {"listen": f"127.0.0.1:{admin_port}"}}
    document["server"]["port"] = port
    (tmp_path / "policies").mkdir()
    policy = "version: 1\nname: default\nowner: me\nroutes: [{tier: small}]\n"
    (tmp_path / "policies/default.yaml").write_text(policy)
    config = tmp_path / "tierline.yaml"
    config.write_text(yaml.safe_dump(document))
    database = await Database.open(f"sqlite:///{tmp_path}/var/tierline.db")
    made = await create_admin_key(database, load_secret(tmp_path / "var/secret"), name="a", role="write")
    await database.close()
    process = _started(config)
    try:
        headers = {"authorization": f"Bearer {made.token}"}
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            await _answers(client, f"http://127.0.0.1:{admin_port}/admin/v1/self", process)
            await _answers(client, f"http://127.0.0.1:{port}/health/ready", process)
            assert (await client.get(f"http://127.0.0.1:{admin_port}/admin/v1/self")).json()["name"] == "a"
            elsewhere = await client.get(f"http://127.0.0.1:{port}/admin/v1/self")
            assert refused(elsewhere) == (404, "unknown_url")
            assert "not at this address" in elsewhere.text
            for path in ("/v1/models", "/metrics", "/health/live"):
                assert (await client.get(f"http://127.0.0.1:{admin_port}{path}")).status_code == 404
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.communicate()


def _started(config: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "gateway", "--config", str(config)], stdout=subprocess.PIPE)


async def _answers(client: httpx.AsyncClient, url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            await client.get(url)
            return
        except httpx.TransportError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_without_a_database_it_says_so_and_models_answer_on(door: FrontDoor, tmp_path: Path) -> None:
    someone = await admin(door)
    await door.chat()
    for path in (tmp_path / "var").glob("tierline.db*"):
        path.rename(path.with_name(f"{path.name}.gone"))
    (tmp_path / "var" / "tierline.db").mkdir()
    response = await someone.ask("GET", "keys")
    assert refused(response) == (503, "database_unavailable")
    assert response.headers["retry-after"] == "5"
    assert (await door.chat()).status_code == 200


async def test_database_work_holds_up_no_answer(door: FrontDoor) -> None:
    """A report that computes for long does so beside the event loop, and a few of them at a time."""
    someone = await admin(door)
    await someone.get("self")
    assert door.services.admin is not None
    database = door.services.admin.database
    begun, go_on = asyncio.Event(), False
    loop = asyncio.get_running_loop()

    async def compute(_: Database) -> str:
        loop.call_soon_threadsafe(begun.set)
        while not go_on:  # never awaits: on the gateway's own loop, nothing else would run until the test's end
            time.sleep(0.001)  # noqa: ASYNC251
        return "done"

    task = asyncio.create_task(database.run(compute))
    await begun.wait()
    assert (await door.chat()).status_code == 200
    assert not task.done()
    go_on = True
    assert await task == "done"


async def test_too_many_at_once_are_told_to_come_back(door: FrontDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloop, "WAIT_S", 0.05)
    assert door.services.admin is not None
    database, go_on = door.services.admin.database, asyncio.Event()
    loop = asyncio.get_running_loop()
    running = asyncio.Semaphore(0)

    async def wait(_: Database) -> None:
        loop.call_soon_threadsafe(running.release)
        while not go_on.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(database.run(wait)) for _ in range(offloop.AT_ONCE)]
    for _ in tasks:
        await running.acquire()
    with pytest.raises(Unavailable) as busy:
        await database.run(wait)
    assert busy.value.code == "admin_busy"
    go_on.set()
    await asyncio.gather(*tasks)
    await database.run(wait)


async def test_changes_are_logged_and_reads_are_not(door: FrontDoor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    someone = await admin(door)
    await someone.get("keys")
    made = await someone.do("POST", "keys", {"name": "ci"})
    lines = [f"{record.getMessage()} {getattr(record, 'fields', '')}" for record in caplog.records]
    changes = [line for line in lines if line.startswith("admin change")]
    assert len(changes) == 1
    assert "POST /admin/v1/keys" in changes[0]
    assert made["key"][3:12] not in "\n".join(lines)
