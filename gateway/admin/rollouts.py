"""`/admin/v1/rollouts`: policies that are tried in the place of others, and what was measured of them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.admin.call import AdminRoute, Call
from gateway.dialects.errors import NotFound
from gateway.rollouts.report import Rollout, report


class Rollouts(msgspec.Struct, frozen=True):
    data: list[Rollout]


async def listed(call: Call[None, None]) -> Rollouts:
    policies = call.services.policies.current
    found = await call.database(lambda database: report(database, policies))
    return Rollouts([msgspec.structs.replace(one, file=Path(one.file).name) for one in found])


async def one(call: Call[None, None]) -> Rollout:
    name = call.path["policy"]
    for found in (await listed(call)).data:
        if found.policy == name:
            return found
    raise NotFound(f"No policy '{name[:100]}' is being rolled out.")


ROUTES = [
    AdminRoute("GET", "/admin/v1/rollouts", "Policies that are tried.", listed, Rollouts, gateway_wide=True),
    AdminRoute("GET", "/admin/v1/rollouts/{policy}", "One of them.", one, Rollout, gateway_wide=True),
]
