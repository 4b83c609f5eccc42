"""What the admin API changes: organisations, teams, projects and keys, each change in the audit log, none half done."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.access.keys import find_key
from tests.gateway.admin_door import Admin, admin, refused
from tests.gateway.front_door import FrontDoor

NOBODY = "01a00000-0000-7000-8000-000000000000"


async def everything(someone: Admin, path: str, limit: int, **query: Any) -> list[Any]:
    """All items of a list, read in pages of `limit`."""
    found: list[Any] = []
    cursor: dict[str, str] = {}
    while True:
        part = await someone.get(path, limit=limit, **query, **cursor)
        assert len(part["data"]) <= limit
        found += part["data"]
        if part["next_cursor"] is None:
            return found
        cursor = {"cursor": part["next_cursor"]}


async def test_from_an_organisation_to_a_key_that_works(door: FrontDoor) -> None:
    someone = await admin(door)
    organisation = await someone.do("POST", "organisations", {"name": "acme", "budget_usd": "100.50"})
    team = await someone.do("POST", "teams", {"organisation": "acme", "name": "support", "parallel": 7})
    project = await someone.do("POST", "projects", {"organisation": "acme", "team": "support", "name": "bot"})
    assert (organisation["budget_usd"], team["parallel"], project["parallel"]) == ("100.50", 7, None)
    assert project["organisation_id"] == team["organisation_id"] == organisation["id"]
    made = await someone.do(
        "POST", "keys",
        {"organisation": "acme", "team": "support", "project": "bot", "name": "ci", "expires": "30d",
         "requests_per_minute": 60, "budget_usd": 5, "allowed_models": ["mock", "auto"], "allowed_routes": ["chat"]},
    )  # fmt: skip
    assert (made["team_id"], made["project_id"]) == (team["id"], project["id"])
    assert datetime.fromisoformat(made["expires"]) - datetime.now(UTC) > timedelta(days=29)
    assert (await door.chat(token=made["key"])).status_code == 200
    shown = await someone.get(f"keys/{made['id']}")
    assert shown == {name: value for name, value in made.items() if name != "key"}
    assert made["key"] not in json.dumps(await everything(someone, "keys", 100))
    assert (await someone.get(f"teams/{team['id']}"))["keys"] == 1
    # The limits are those that requests meet.
    await someone.do("PATCH", f"projects/{project['id']}", {"requests_per_minute": 1})
    await door.services.keys.refresh()
    answers = [await door.chat(token=made["key"]) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    await someone.do("POST", f"keys/{made['id']}/revoke")
    await door.services.keys.refresh()
    assert refused(await door.chat(token=made["key"])) == (401, "revoked_api_key")


async def test_a_patch_changes_what_it_names(door: FrontDoor) -> None:
    someone = await admin(door)
    made = await someone.do("POST", "keys", {"name": "ci", "tokens_per_minute": 9, "budget_usd": "2"})
    path = f"keys/{made['id']}"
    changed = await someone.do(
        "PATCH", path, {"name": "cd", "parallel": 3, "budget_usd": None, "expires": "2099-01-31"}
    )
    assert (changed["name"], changed["parallel"], changed["budget_usd"]) == ("cd", 3, None)
    assert (changed["tokens_per_minute"], changed["expires"]) == (9, "2099-01-31T00:00:00.000Z")
    # Once more is as once, in the log too.
    before = await someone.get("audit")
    assert await someone.do("PATCH", path, {"name": "cd", "parallel": 3}) == changed
    assert await someone.do("PATCH", path, {}) == changed
    assert await someone.get("audit") == before
    log = before["data"][0]
    assert (log["action"], log["object"], log["actor"]) == (
        "key.change",
        f"key:{made['id']}",
        f"admin:{someone.key_id}",
    )
    assert log["before"] == {"budget_nanousd": 2_000_000_000, "expires_ms": None, "name": "ci", "parallel": None}
    assert log["after"] | {"expires_ms": 0} == {"budget_nanousd": None, "expires_ms": 0, "name": "cd", "parallel": 3}
    assert log["address"] == "127.0.0.1"
    assert log["request_id"].startswith("req-")
    assert log["organisation_id"] == made["organisation_id"]


async def test_who_saw_an_older_state_changes_nothing(door: FrontDoor) -> None:
    someone = await admin(door)
    made = await someone.do("POST", "keys", {"name": "ci"})
    team = (await someone.get("teams"))["data"][0]
    for path in (f"keys/{made['id']}", f"teams/{team['id']}"):
        seen = (await someone.ask("GET", path)).headers["etag"]
        first = await someone.ask("PATCH", path, {"parallel": 2}, headers={"if-match": seen})
        assert first.status_code == 200
        assert first.headers["etag"] != seen
        late = await someone.ask("PATCH", path, {"parallel": 9}, headers={"if-match": seen})
        assert refused(late) == (412, "changed_meanwhile")
        assert (await someone.get(path))["parallel"] == 2
        await someone.do("PATCH", path, {"parallel": 4}, **{"if-match": first.headers["etag"]})
        await someone.do("PATCH", path, {"parallel": 5}, **{"if-match": "*"})


async def test_of_many_who_saw_the_same_state_one_changes_it(door: FrontDoor) -> None:
    someone = await admin(door)
    made = await someone.do("POST", "keys", {"name": "ci"})
    team = (await someone.get("teams"))["data"][0]
    for path in (f"keys/{made['id']}", f"teams/{team['id']}"):
        seen = (await someone.ask("GET", path)).headers["etag"]
        bodies = [{"parallel": number} for number in range(1, 9)]
        asked = [someone.ask("PATCH", path, body, headers={"if-match": seen}) for body in bodies]
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200] + [412] * 7


async def test_a_rotated_key_has_two_secrets_for_a_while(door: FrontDoor) -> None:
    someone = await admin(door)
    made = await someone.do("POST", "keys", {"name": "ci"})
    rotated = await someone.do("POST", f"keys/{made['id']}/rotate", {"overlap": "1h"})
    assert rotated["id"] == made["id"]
    assert rotated["key"] != made["key"]
    assert [one["prefix"] for one in rotated["former_secrets"]] == [made["prefix"]]
    await door.services.keys.refresh()
    for token in (made["key"], rotated["key"]):
        assert (await door.chat(token=token)).status_code == 200
    again = await someone.do("POST", f"keys/{made['id']}/rotate", {"overlap": "0"})
    await door.services.keys.refresh()
    statuses = [(await door.chat(token=one["key"])).status_code for one in (made, rotated, again)]
    assert statuses == [401, 401, 200]
    rows = (await someone.get("audit", action="key.rotate"))["data"]
    assert [row["after"]["prefix"] for row in rows] == [again["prefix"], rotated["prefix"]]
    text = json.dumps(await everything(someone, "audit", 100))
    for one in (made, rotated, again):
        assert one["key"][3:] not in text


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "param"),
    [
        ("POST", "keys", {"nmae": "x"}, "unknown_parameter", "nmae"),
        ("POST", "keys", {"name": ""}, "invalid_value", "name"),
        ("POST", "keys", {"name": 5}, "invalid_type", "name"),
        ("POST", "keys", {"parallel": 0}, "invalid_value", "parallel"),
        ("POST", "keys", {"parallel": 1.5}, "invalid_type", "parallel"),
        ("POST", "keys", {"budget_usd": 1.5}, "invalid_type", "budget_usd"),
        ("POST", "keys", {"budget_usd": "ten"}, "invalid_value", "budget_usd"),
        ("POST", "keys", {"budget_usd": "-1"}, "invalid_value", "budget_usd"),
        ("POST", "keys", {"expires": "yesterday"}, "invalid_value", "expires"),
        ("POST", "keys", {"expires": "2020-01-01"}, "invalid_value", "expires"),
        ("POST", "keys", {"expires": "999999w"}, "invalid_value", "expires"),
        ("POST", "keys", {"allowed_models": ["mokc"]}, "invalid_value", "allowed_models"),
        ("POST", "keys", {"allowed_tiers": ["huge"]}, "invalid_value", "allowed_tiers"),
        ("POST", "keys", {"allowed_routes": []}, "invalid_value", "allowed_routes"),
        ("POST", "keys", {"team": "a/b"}, "invalid_value", "team"),
        ("POST", "keys", [], "invalid_type", None),
        ("POST", "teams", {"name": "x"}, "missing_required_parameter", "organisation"),
        ("POST", "teams", {"organisation": "a", "name": "b/c"}, "invalid_value", "name"),
        ("POST", "organisations", {"name": "x", "budget_usd": "1e99"}, "invalid_value", "budget_usd"),
        ("GET", "keys?limit=0", None, "invalid_value", "limit"),
        ("GET", "keys?limit=1001", None, "invalid_value", "limit"),
        ("GET", "keys?cursor=%C3%BC", None, "invalid_request", "cursor"),
        ("GET", "keys?state=gone", None, "invalid_value", "state"),
        ("GET", "keys?stat=active", None, "unknown_parameter", "stat"),
        ("GET", "keys?state=active&state=revoked", None, "invalid_request", "state"),
        ("GET", "self?x=1", None, "unknown_parameter", "x"),
        ("GET", "self", {"x": 1}, "invalid_type", None),
        ("GET", "organisations?team=x", None, "invalid_value", "team"),
        ("GET", "costs?by=teem", None, "invalid_value", "by"),
        ("GET", "costs?since=7d&until=30d", None, "invalid_value", "since"),
    ],
)
async def test_what_makes_no_sense_is_refused_and_nothing_is_made(
    door: FrontDoor, method: str, path: str, body: Any, code: str, param: str | None
) -> None:
    someone = await admin(door)
    before = await someone.get("audit")
    response = await someone.ask(method, path, body)
    assert refused(response) == (400, code), response.text
    assert response.json()["error"]["param"] == param
    assert await someone.get("audit") == before


async def test_what_is_not_there_is_not_found(door: FrontDoor) -> None:
    someone = await admin(door)
    for path in ("organisations", "teams", "projects", "keys"):
        assert refused(await someone.ask("GET", f"{path}/{NOBODY}")) == (404, "not_found")
        assert refused(await someone.ask("PATCH", f"{path}/{NOBODY}", {"parallel": 1})) == (404, "not_found")
    assert refused(await someone.ask("GET", "teams/default")) == (404, "not_found")
    assert refused(await someone.ask("GET", "keys/first")) == (404, "not_found")
    assert refused(await someone.ask("POST", "organisations", {"name": "default"})) == (409, "already_exists")
    assert refused(await someone.ask("DELETE", "keys")) == (405, "method_not_allowed")
    assert (await someone.ask("DELETE", "keys")).headers["allow"] == "GET, POST"
    for header in ("idempotency-key", "if-match"):
        response = await someone.ask("POST", "keys", {"name": "x"}, headers={header: "1"})
        assert refused(response) == (400, "unsupported_header")


async def test_a_revoked_key_cannot_be_changed(door: FrontDoor) -> None:
    someone = await admin(door)
    made = await someone.do("POST", "keys", {"name": "ci"})
    revoked = await someone.do("POST", f"keys/{made['id']}/revoke")
    assert revoked["state"] == "revoked"
    assert await someone.do("POST", f"keys/{made['id']}/revoke") == revoked
    assert len((await someone.get("audit", action="key.revoke"))["data"]) == 1
    for method, path, body in (("PATCH", "", {"parallel": 1}), ("POST", "/rotate", {})):
        response = await someone.ask(method, f"keys/{made['id']}{path}", body)
        assert refused(response) == (400, "invalid_value")
        assert "revoked" in response.json()["error"]["message"]


async def test_pages_hold_everything_once(door: FrontDoor) -> None:
    someone = await admin(door)
    for number in range(7):
        await someone.do("POST", "keys", {"team": f"t{number % 3}", "name": f"k{number}"})
    names = ["first", *(f"k{number}" for number in range(7))]
    for limit in (1, 3, 8, 100):
        assert [key["name"] for key in await everything(someone, "keys", limit)] == names
        assert [team["name"] for team in await everything(someone, "teams", limit)] == ["default", "t0", "t1", "t2"]
        log = await everything(someone, "audit", limit)
        assert [row["id"] for row in log] == sorted({row["id"] for row in log}, reverse=True)
    assert [key["name"] for key in await everything(someone, "keys", 2, team="t1")] == ["k1", "k4"]
    assert [key["name"] for key in await everything(someone, "keys", 2, name="k3")] == ["k3"]
    assert await everything(someone, "keys", 2, organisation="elsewhere") == []
    info = await find_key(door.services.database, "k5")
    assert [key["id"] for key in await everything(someone, "keys", 2, prefix=f"{info.prefix}…")] == [info.key_id]
    await someone.do("POST", f"keys/{info.key_id}/revoke")
    assert [key["name"] for key in await everything(someone, "keys", 2, state="revoked")] == ["k5"]
    assert len(await everything(someone, "keys", 2, state="active")) == 7
    assert await everything(someone, "keys", 2, state="expired") == []
    assert {project["team"] for project in await everything(someone, "projects", 2, team="t1")} == {"t1"}


async def test_an_organisations_admin_sees_and_changes_only_its_own(door: FrontDoor) -> None:
    everybody = await admin(door)
    theirs = await everybody.do("POST", "keys", {"organisation": "globex", "team": "x", "name": "theirs"})
    await everybody.do("POST", "organisations", {"name": "acme"})
    bound = await admin(door, organisation="acme")
    mine = await bound.do("POST", "keys", {"team": "support", "name": "mine"})
    assert mine["organisation"] == "acme"
    await bound.do("POST", "teams", {"organisation": "acme", "name": "sales"})
    assert [key["name"] for key in await everything(bound, "keys", 10)] == ["mine"]
    assert [one["name"] for one in await everything(bound, "organisations", 10)] == ["acme"]
    assert [one["name"] for one in await everything(bound, "teams", 10)] == ["sales", "support"]
    assert {row["organisation_id"] for row in await everything(bound, "audit", 10)} == {mine["organisation_id"]}
    for method, path, body in (
        ("GET", f"keys/{theirs['id']}", None),
        ("PATCH", f"keys/{theirs['id']}", {"parallel": 1}),
        ("POST", f"keys/{theirs['id']}/rotate", {}),
        ("POST", f"keys/{theirs['id']}/revoke", None),
        ("GET", f"keys/{theirs['id']}/standing", None),
        ("GET", f"organisations/{theirs['organisation_id']}", None),
        ("PATCH", f"teams/{theirs['team_id']}", {"parallel": 1}),
        ("GET", f"projects/{theirs['project_id']}/usage", None),
    ):
        assert refused(await bound.ask(method, path, body)) == (404, "not_found"), path
    # An id that is a name elsewhere tells nothing either.
    assert "id is" not in (await bound.ask("GET", "teams/x")).text
    for path, body in (
        ("keys", {"organisation": "globex", "name": "x"}),
        ("teams", {"organisation": "globex", "name": "x"}),
        ("projects", {"organisation": "globex", "team": "x", "name": "x"}),
        ("organisations", {"name": "new"}),
    ):
        assert refused(await bound.ask("POST", path, body)) == (403, "organisation_key"), path
    assert (await everybody.get(f"keys/{theirs['id']}"))["state"] == "active"
