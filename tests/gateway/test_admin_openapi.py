"""The description of the admin API is true: whatever is read by it is answered as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis

from gateway.admin.openapi import document
from gateway.admin.routes import ADMIN_ROUTES
from tests.gateway.described import RIGHT, Running, check, running

DOCUMENT = document(ADMIN_ROUTES)
READING = [route for route in ADMIN_ROUTES if route.method == "GET"]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("gateway")) as found:
        yield found


@pytest.fixture(scope="module")
def known(gateway: Running) -> dict[str, str]:
    """What there is, by the names that paths have for it."""
    asked = {"model": "mock", "messages": [{"role": "user", "content": "a"}]}
    answer = gateway.client.post("/v1/chat/completions", json=asked, headers=gateway.headers())

    def first(kind: str) -> str:
        page = gateway.client.get(f"/admin/v1/{kind}s", headers=gateway.admin_headers()).json()
        return str(page["data"][0]["id"])

    ids = {kind: first(kind) for kind in ("organisation", "team", "project", "key")}
    in_force = gateway.client.get("/admin/v1/policies/default", headers=gateway.admin_headers()).json()["version"]
    request = {"request": answer.headers["x-request-id"], "policy": "default", "version": in_force}
    return {**ids, **request, "batch": _batch(gateway.client, gateway.headers(), asked)}


def _batch(client: httpx.Client, headers: dict[str, str], body: dict[str, Any]) -> str:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
    upload = {"file": ("lines.jsonl", line.encode())}
    file = client.post("/v1/files", data={"purpose": "batch"}, files=upload, headers=headers).json()["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str(client.post("/v1/batches", json=wanted, headers=headers).json()["id"])


def schema(known: dict[str, str]) -> Any:
    made = schemathesis.openapi.from_dict(DOCUMENT)

    @made.hook
    def map_path_parameters(context: Any, path_parameters: Any) -> Any:
        """Most name what there is."""
        for name, value in (path_parameters or {}).items():
            if len(str(value)) % 4 != 3:
                path_parameters[name] = known[name]
        return path_parameters

    return made


def test_the_document_is_valid() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()


@pytest.mark.parametrize("path", [route.path for route in READING])
def test_what_is_read(gateway: Running, known: dict[str, str], path: str) -> None:
    operation = schema(known)[path]["get"]
    check(gateway.url, gateway.admin_headers(), operation, RIGHT, 20 if operation.definition.raw["parameters"] else 3)


@pytest.mark.parametrize("path", [route.path for route in READING])
def test_queries_are_kept_to_what_is_described(gateway: Running, known: dict[str, str], path: str) -> None:
    wrong = [{"unheard_of": "1"}]
    for parameter in DOCUMENT["paths"][path]["get"]["parameters"]:
        described = parameter["schema"]
        if described.get("type") == "integer":
            numbers = (described["minimum"] - 1, described["maximum"] + 1, "many", "")
            wrong += [{parameter["name"]: str(number)} for number in numbers]
        if "enum" in json.dumps(described):
            wrong.append({parameter["name"]: "unheard_of"})
    for query in wrong:
        response = gateway.client.get(path.format(**known), params=query, headers=gateway.admin_headers())
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(query)))


def test_costs_as_a_table_are_described(gateway: Running) -> None:
    response: httpx.Response = gateway.client.get(
        "/admin/v1/costs", params={"format": "csv"}, headers=gateway.admin_headers()
    )
    described = DOCUMENT["paths"]["/admin/v1/costs"]["get"]["responses"]["200"]["content"]
    assert response.headers["content-type"].partition(";")[0] in described
