"""What the admin API shows, from costs to the state of the cache, and that all of it is as its description says."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.admin.routes import ADMIN_ROUTES
from gateway.ledger.database import Database
from gateway.ledger.reports import cost_report, explain
from tests.gateway.admin_door import Admin, admin, refused
from tests.gateway.front_door import FrontDoor, configuration, front_door


async def test_costs_are_those_of_the_command(door: FrontDoor) -> None:
    someone = await admin(door)
    other = await door.key(organisation="acme", team="support")
    for token in (None, None, other):
        await door.chat(token=token)
    await door.rows()
    for by in ("team,model", "organisation", "", "day,outcome"):
        dimensions = [name for name in by.split(",") if name]
        report = await cost_report(door.services.database, dimensions)
        assert await someone.get("costs", by=by) == json.loads(report.to_json())
    answer = await someone.ask("GET", "costs", by="team", format="csv", since="1h")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    lines = list(csv.DictReader(io.StringIO(answer.text)))
    assert {line["team"]: line["cost_nanousd"] for line in lines} == {"default": "160000", "support": "80000"}
    assert (await someone.get("costs", until="2020-01-01"))["rows"] == []
    bound = await admin(door, organisation="acme")
    theirs = await bound.get("costs", by="organisation")
    assert [row["organisation"] for row in theirs["rows"]] == ["acme"]
    assert theirs["total"]["cost_nanousd"] == 80_000


async def test_a_request_is_explained(door: FrontDoor) -> None:
    someone = await admin(door)
    other = await door.key(organisation="acme")
    request_ids = [(await door.chat(token=token)).headers["x-request-id"] for token in (None, other)]
    await door.rows()
    for request_id in request_ids:
        found = await explain(door.services.database, request_id)
        assert found is not None
        assert await someone.get(f"requests/{request_id}") == {
            "request_id": request_id, "decision": found.decision, "tiers": found.tiers, "attempts": found.rows,
            "notes": found.notes,
        }  # fmt: skip
    assert refused(await someone.ask("GET", "requests/req-none")) == (404, "not_found")
    bound = await admin(door, organisation="acme")
    assert refused(await bound.ask("GET", f"requests/{request_ids[0]}")) == (404, "not_found")
    assert (await bound.get(f"requests/{request_ids[1]}"))["attempts"][0]["cost_nanousd"] == 80_000


async def test_usage_of_a_month(door: FrontDoor) -> None:
    someone = await admin(door)
    await door.chat()
    await door.rows()
    team = (await someone.get("teams"))["data"][0]
    await someone.do("PATCH", f"teams/{team['id']}", {"budget_usd": "0.00016"})
    used = await someone.get(f"teams/{team['id']}/usage")
    assert (used["requests"], used["input_tokens"], used["output_tokens"]) == (1, 12, 34)
    assert (used["cost_nanousd"], used["cost_usd"], used["budget_used"]) == (80_000, "0.00008", 0.5)
    earlier = await someone.get(f"teams/{team['id']}/usage", month="2020-02")
    assert (earlier["month"], earlier["requests"]) == ("2020-02", 0)
    for month in ("2020-13", "0000-01", "now"):
        assert refused(await someone.ask("GET", f"teams/{team['id']}/usage", month=month)) == (400, "invalid_value")


async def stands(door: FrontDoor, upstream: MockUpstream) -> None:
    """A key with limits at several levels, before, in and after a request."""
    someone = await admin(door)
    made = await someone.do("POST", "keys", {"name": "ci", "requests_per_minute": 10, "budget_usd": "1"})
    await someone.do("PATCH", f"teams/{made['team_id']}", {"tokens_per_minute": 1000, "parallel": 3})
    await door.services.keys.refresh()
    path = f"keys/{made['id']}/standing"
    fresh = await someone.get(path)
    assert [level["scope"].partition(":")[0] for level in fresh["levels"]] == ["key", "project", "team", "organisation"]
    key, project, team, _ = fresh["levels"]
    assert (key["requests_per_minute"], key["remaining_requests"]) == (10, 10)
    assert (key["budget_usd"], key["spent_usd"], key["held_usd"]) == ("1.00", "0.00", "0.00")
    assert (team["tokens_per_minute"], team["remaining_tokens"], team["parallel"]) == (1000, 1000, 3)
    assert (project["requests_per_minute"], project["remaining_requests"], project["budget_usd"]) == (None, None, None)

    upstream.override = "hang"
    running = asyncio.create_task(door.chat(token=made["key"]))
    while not (in_it := await someone.get(path))["levels"][2]["running"]:
        assert not running.done()
    assert [level["running"] for level in in_it["levels"]][::2] == [1, 1]
    assert in_it["levels"][0]["held_usd"] != "0.00"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    upstream.override = None
    await door.chat(token=made["key"])
    after = await someone.get(path)
    key, _, team, _ = after["levels"]
    assert key["remaining_requests"] == 8
    assert team["remaining_tokens"] < 1000
    assert (await someone.get(path))["levels"][0]["remaining_requests"] == 8  # looking takes nothing
    assert not after["degraded"]

    await someone.do("POST", f"keys/{made['id']}/revoke")
    await door.services.keys.refresh()
    assert refused(await someone.ask("GET", path)) == (404, "key_not_in_force")


async def test_where_a_key_stands(door: FrontDoor, upstream: MockUpstream) -> None:
    await stands(door, upstream)


@pytest.mark.redis
async def test_where_a_key_stands_by_redis(tmp_path: Path, upstream: MockUpstream, redis_binary: str) -> None:
    server = RedisServer(redis_binary).start()
    try:
        document = configuration({"up": upstream}) | {"storage": {"redis_url": server.url}}
        async with front_door(tmp_path, document) as door:
            await stands(door, upstream)
            server.close()
            someone = await admin(door)
            key = next(key for key in (await someone.get("keys"))["data"] if key["name"] == "first")
            # Asked while Redis is away, it says what this process goes by.
            assert (await someone.get(f"keys/{key['id']}/standing"))["degraded"]
    finally:
        server.close()


async def test_models_backends_and_policies(door: FrontDoor, upstream: MockUpstream) -> None:
    someone = await admin(door)
    await door.chat()
    (model,) = (await someone.get("models"))["data"]
    assert (model["name"], model["tier"], model["price"]["output_usd_per_million"]) == ("mock", "small", "2")
    (backend,) = (await someone.get("backends"))["data"]
    assert backend["models"] == ["mock"]
    assert backend["replicas"][0] | {"outstanding": 0} == {
        "base_url": upstream.base_url, "state": "healthy", "outstanding": 0, "failures": 0, "requests_total": 1,
        "failures_total": 0, "back_in_s": 0.0, "last_error": None, "work_tokens": 0,
    }  # fmt: skip
    in_force = await someone.get("policies")
    assert in_force["version"] == door.services.policies.version
    (line,) = in_force["data"]
    assert (line["name"], line["file"], line["rules"]) == ("default", "default.yaml", ["everything"])
    whole = await someone.get("policies/default")
    assert whole["document"]["cache"]["mode"] == "off"
    assert refused(await someone.ask("GET", "policies/none")) == (404, "not_found")


async def test_a_broken_policy_file_is_told_of(door: FrontDoor) -> None:
    someone = await admin(door)
    door.write_policy("version: 1\nname: default\n")
    async with asyncio.timeout(20):
        while not (await someone.get("policies"))["problems"]:
            pass
    found = await someone.get("policies")
    assert {problem["file"] for problem in found["problems"]} == {"default.yaml"}
    assert [line["name"] for line in found["data"]] == ["default"]


async def test_a_policy_is_checked_and_not_kept(door: FrontDoor) -> None:
    someone = await admin(door, "read")
    text = "version: 1\nname: mine\nowner: me\nroutes:\n  - {tier: smal}\n"
    report = (await someone.ask("POST", "policies/check", {"text": text, "file": "mine.yaml"})).json()
    assert not report["ok"]
    (error,) = report["errors"]
    assert (error["file"], error["line"], error["suggestion"]) == ("mine.yaml", 5, "small")
    fine = (await someone.ask("POST", "policies/check", {"text": text.replace("smal", "small")})).json()
    assert (fine["ok"], fine["policies"]) == (True, ["mine"])
    for file in ("../x.yaml", "x.txt", ""):
        response = await someone.ask("POST", "policies/check", {"text": text, "file": file})
        assert refused(response)[0] == 400
    assert [path.name for path in (door.root / "policies").iterdir()] == ["default.yaml"]


async def test_the_cache_where_it_is_off_or_away(tmp_path: Path, door: FrontDoor, upstream: MockUpstream) -> None:
    someone = await admin(door)
    for method, path, body in (("GET", "cache", None), ("POST", "cache/purge", {"everything": True})):
        assert refused(await someone.ask(method, path, body)) == (404, "cache_off")
    (tmp_path / "other").mkdir()
    async with front_door(tmp_path / "other", configuration({"up": upstream}) | {"cache": {"enabled": True}}) as other:
        someone = await admin(other)
        for method, path, body in (("GET", "cache", None), ("POST", "cache/purge", {"everything": True})):
            assert refused(await someone.ask(method, path, body)) == (503, "cache_unavailable")
        for body in ({}, {"everything": True, "model": "mock"}, {"older_than": "1x"}, {"model": "mokc"}):
            assert refused(await someone.ask("POST", "cache/purge", body)) == (400, "invalid_value"), body
        assert refused(await someone.ask("POST", "cache/purge", {"scope": "team:nobody"})) == (400, "invalid_value")
        await other.key(organisation="acme")
        bound = await admin(other, organisation="acme")
        response = await bound.ask("POST", "cache/purge", {"scope": "organisation:default"})
        assert refused(response) == (400, "invalid_value")
        assert "not in this organisation" in response.text


# --- the description ---


async def described(someone: Admin) -> dict[str, Any]:
    document: dict[str, Any] = await someone.get("openapi.json")
    return document


async def test_the_description_names_every_route(door: FrontDoor) -> None:
    document = await described(await admin(door))
    named = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert named == {(route.method, route.path) for route in ADMIN_ROUTES}
    operations = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(operations) == len(set(operations))
    pointers = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert pointers <= set(document["components"]["schemas"])
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_answers_are_as_described(door: FrontDoor) -> None:
    someone = await admin(door)
    document = await described(someone)
    request_id = (await door.chat()).headers["x-request-id"]
    await door.rows()
    made = await someone.do("POST", "keys", {"name": "ci", "parallel": 3})
    await someone.do("POST", f"keys/{made['id']}/rotate", {})
    await door.services.keys.refresh()
    parts = {
        "organisation": made["organisation_id"], "team": made["team_id"], "project": made["project_id"],
        "key": made["id"], "request": request_id, "policy": "default",
        "version": door.services.policies.current.named("default").version, "batch": await _batch(door),
    }  # fmt: skip
    refusals: set[str] = set()
    for route in sorted(ADMIN_ROUTES, key=lambda route: route.path.endswith("/revoke")):  # that last
        path = route.path.format(**parts).removeprefix("/admin/v1/")
        operation = document["paths"][route.path][route.method.lower()]
        bodies = {"organisations": {"name": "n"}, "teams": {"organisation": "n", "name": "n"},
                  "projects": {"organisation": "n", "team": "n", "name": "n"},
                  "policies/check": {"text": "x"}}  # fmt: skip
        body = None if route.body is None else bodies.get(path, {})
        response = await someone.ask(route.method, path, body)
        answer = operation["responses"][str(response.status_code)]
        schema = {**answer["content"]["application/json"]["schema"], "components": document["components"]}
        jsonschema.validate(response.json(), schema, jsonschema.Draft202012Validator)
        if response.status_code >= 300:
            refusals.add(route.path)
    # The cache is off here, and nothing is being rolled out.
    assert refusals == {"/admin/v1/cache", "/admin/v1/cache/purge", "/admin/v1/rollouts/{policy}"}


async def _batch(door: FrontDoor) -> str:
    body = {"model": "mock", "messages": [{"role": "user", "content": "a"}]}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
    upload = {"file": ("lines.jsonl", line.encode())}
    file = await door.client.post("/v1/files", data={"purpose": "batch"}, files=upload, headers=door.headers())
    wanted = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str((await door.client.post("/v1/batches", json=wanted, headers=door.headers())).json()["id"])


async def test_the_database_of_reports_is_read_only_once_open(door: FrontDoor) -> None:
    """A second gateway process, and every command, go on beside the admin API's connection."""
    someone = await admin(door)
    await someone.get("costs")
    other = await Database.open(door.services.settings.database_url())
    await other.close()
    assert (await someone.get("self"))["name"] == "tester"
