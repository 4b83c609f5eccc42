"""A gateway that starts while its policy folder is broken: the last good set is in force, and that is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.mock_upstream import MockUpstream
from gateway.policy_news import REFUSED
from tests.gateway.front_door import POLICY, configuration, eventually, front_door
from tests.gateway.test_policy_faults import told

BROKEN = POLICY.replace("routes:", "rouets:")


async def test_a_restart_with_a_broken_folder_keeps_the_last_good_policies(
    tmp_path: Path, upstream: MockUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    document = configuration({"up": upstream})
    async with front_door(tmp_path, document, policy=POLICY) as door:
        door.write_policy(POLICY.replace("name: everything", "name: edited"))
        await eventually(lambda: door.services.policies.current.named("default").document.routes[0].name == "edited")
        version = door.services.policies.version
    caplog.clear()
    async with front_door(tmp_path, document, policy=BROKEN) as door:
        assert (await door.chat("auto")).status_code == 200
        assert door.services.policies.version == version
        await told(door, 1)
        (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith(REFUSED)]
        assert "policies/default.yaml:" in said
        assert "Did you mean 'routes'?" in said
        door.write_policy(POLICY)
        await told(door, 0)
        assert door.services.policies.version != version
        assert (await door.chat("auto")).status_code == 200
