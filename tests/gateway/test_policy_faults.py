"""A running gateway whose policy folder breaks: it says so everywhere, serves on, and takes the next good edit."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.gateway.front_door import POLICY, FrontDoor, eventually

TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
COSTLY = "".join(f"{TEN}.all(x{level}, " for level in range(7)) + "true" + ")" * 7


async def told(door: FrontDoor, faults: int) -> None:
    """Wait until `/health/ready` and the metric both count so many faults."""
    async with asyncio.timeout(20):
        while True:
            ready = (await door.client.get("/health/ready")).json()["policies"]["problems"]
            page = (await door.client.get("/metrics")).text
            metric = re.search(r"^tierline_policy_problems (.+)$", page, re.MULTILINE)
            assert metric is not None
            if (ready, float(metric[1])) == (faults, faults):
                return


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("description: !!int abc", "default.yaml:9:14: 'abc' is no int."),
        ("description: !!bool maybe", "default.yaml:9:14: 'maybe' is no bool."),
        ("description: !!timestamp foo", "default.yaml:9:14: the tag 'timestamp' is not supported"),
        ('description: "\\UFFFFFFFF"', "default.yaml:9:"),
        ("description: &a [*a]", "default.yaml:9:14: nested too deeply"),
        ("routes: []", "the key 'routes' stands twice"),
    ],
)
async def test_a_fault_is_told_and_the_next_good_edit_counts(
    door: FrontDoor, caplog: pytest.LogCaptureFixture, line: str, message: str
) -> None:
    policies = door.services.policies
    version = policies.version
    door.write_policy(f"{POLICY}{line}\n")
    await told(door, 1)
    await eventually(lambda: message in caplog.text)
    assert policies.version == version
    assert (await door.chat("auto")).status_code == 200
    door.write_policy(f"{POLICY}description: 2020-99-99\n")
    await told(door, 0)
    assert policies.version != version


async def test_a_condition_that_would_hold_up_the_gateway_never_runs(
    door: FrontDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door.write_policy(POLICY.replace("    tier: small", f"    when: '{COSTLY}'\n    tier: small"))
    await told(door, 1)
    await eventually(lambda: "default.yaml:6:44: too costly: up to " in caplog.text)
    assert (await door.chat("auto")).status_code == 200
