"""A gateway with admin keys for the tests: who asks as whom, in few words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import httpx

from gateway.access.admin_keys import AdminRole, create_admin_key
from gateway.access.secret import load_secret
from tests.gateway.front_door import FrontDoor


@dataclasses.dataclass
class Admin:
    """Somebody with an admin key, in front of a gateway."""

    door: FrontDoor
    token: str
    key_id: str

    async def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] = {}, **query: Any
    ) -> httpx.Response:
        """A request to `/admin/v1/` + path, with a JSON body where one is given."""
        return await self.door.client.request(
            method,
            f"/admin/v1/{path}",
            json=body,
            params=query or None,
            headers={"authorization": f"Bearer {self.token}", **headers},
        )

    async def get(self, path: str, **query: Any) -> Any:
        """The JSON of an answer that must be one."""
        response = await self.ask("GET", path, **query)
        assert response.status_code == 200, response.text
        return response.json()

    async def do(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The JSON of a change that must succeed."""
        response = await self.ask(method, path, body, headers=headers)
        assert response.status_code in (200, 201), response.text
        return response.json()


async def admin(door: FrontDoor, role: AdminRole = "write", organisation: str | None = None, **options: Any) -> Admin:
    """Somebody with a new admin key."""
    secret = load_secret(door.root / "var" / "secret")
    made = await create_admin_key(
        door.services.database, secret, name="tester", role=role, organisation=organisation, **options
    )
    return Admin(door, made.token, made.info.key_id)


def refused(response: httpx.Response) -> tuple[int, str]:
    """Status and code of an error; it must have the error object's whole form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    return response.status_code, error["code"]
