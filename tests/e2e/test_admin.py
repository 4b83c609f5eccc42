"""The admin API of the real thing: its first key, the running cache, a budget that a real answer meets."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import Stack


@pytest.fixture(scope="module")
def admin(tierline_stack: Stack) -> Iterator[httpx.Client]:
    token = (tierline_stack.data_dir / "admin-key").read_text().strip()
    url = f"{tierline_stack.base_url}/admin/v1"
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60) as client:
        yield client


def ask(stack: Stack, token: str, text: str) -> httpx.Response:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], "temperature": 0}
    headers = {"authorization": f"Bearer {token}"}
    return httpx.post(f"{stack.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_the_first_admin_key_opens_the_admin_api_and_nothing_else(tierline_stack: Stack, admin: httpx.Client) -> None:
    path = tierline_stack.data_dir / "admin-key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert admin.get("/self").json()["role"] == "write"
    assert ask(tierline_stack, path.read_text().strip(), "Hello").status_code == 401
    assert (
        httpx.get(f"{admin.base_url}self", headers={"authorization": f"Bearer {tierline_stack.key}"}).status_code == 401
    )
    assert path.read_text().strip() not in tierline_stack.log("gateway")


def test_answers_of_a_team_are_forgotten(tierline_stack: Stack, admin: httpx.Client) -> None:
    keys = [
        admin.post("/keys", json={"organisation": "acme", "team": team, "name": team}).json()["key"]
        for team in ("purged", "kept")
    ]
    question = "What is the capital of Norway?"
    for key in keys:
        assert ask(tierline_stack, key, question).headers["x-tierline-cache"] == "miss"
        assert ask(tierline_stack, key, question).headers["x-tierline-cache"] == "exact"
    assert admin.get("/cache").json()["stats"]["entries"] >= 2
    purged = admin.post("/cache/purge", json={"scope": "team:acme/purged"})
    assert purged.json() == {"removed": 1, "confirmed": 1, "unconfirmed": []}
    states = [ask(tierline_stack, key, question).headers["x-tierline-cache"] for key in keys]
    assert states == ["miss", "exact"]
    row = admin.get("/audit", params={"action": "cache.purge"}).json()["data"][0]
    assert row["after"] == {"scope": "team:acme/purged"}
    assert row["request_id"] == purged.headers["x-request-id"]


def test_a_budget_set_here_is_met_there(tierline_stack: Stack, admin: httpx.Client) -> None:
    made = admin.post("/keys", json={"organisation": "acme", "team": "thrifty", "name": "ci"}).json()
    assert ask(tierline_stack, made["key"], "What is the capital of Italy?").status_code == 200
    tierline_stack.wait_for_ledger()
    used = admin.get(f"/teams/{made['team_id']}/usage").json()
    assert (used["requests"], used["cost_nanousd"] > 0) == (1, True)
    report = tierline_stack.cli("cost", "report", "--by", "team", "--json").stdout
    mine = next(row for row in json.loads(report)["rows"] if row["team"] == "thrifty")
    assert mine["cost_nanousd"] == used["cost_nanousd"]
    admin.patch(f"/teams/{made['team_id']}", json={"budget_usd": used["cost_usd"]}).raise_for_status()
    standing = admin.get(f"/keys/{made['id']}/standing").json()  # as the gateway goes by from now on
    assert [level["budget_usd"] for level in standing["levels"]] == [None, None, used["cost_usd"], None]
    refused = ask(tierline_stack, made["key"], "What is the capital of Greece?")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exhausted")
    assert "team 'thrifty'" in refused.json()["error"]["message"]
